"""`localllm recommend --fits TOKENS`: what makes a long context fit, as text or JSON."""

from __future__ import annotations

import json
import re
from typing import Any

from localllm.cli.recommend.page import paragraph, speed
from localllm.cli.recommend.view import heading, numbered_rows
from localllm.device.types import Device
from localllm.errors import UsageError
from localllm.formatting import gb
from localllm.planner.long_context import LongContext
from localllm.planner.types import Plan

_TOKENS = re.compile(r"(\d{1,12})([kM]?)")
_FACTORS = {"": 1, "k": 1024, "M": 1024**2}
# More tokens than any model was trained for.
_MAX_TOKENS = 100 * 1024**2


def tokens_of(text: str) -> int:
    """Return the tokens of "1M", "256k" or "32768". Raises UsageError for other texts."""
    match = _TOKENS.fullmatch(text.strip())
    tokens = 0
    if match is not None:
        tokens = int(match[1]) * _FACTORS[match[2]]
    if not 0 < tokens <= _MAX_TOKENS:
        raise UsageError(
            f"--fits {text}: not a number of tokens",
            hint="for example --fits 256k or --fits 1M",
            param="--fits",
        )
    return tokens


def lines(device: Device, answer: LongContext) -> list[str]:
    """Format the answer for a terminal."""
    text_lines = heading(device, f"What makes {answer.tokens:,} tokens of context fit")
    text_lines += ["", *_model_lines(answer), "", *_other_lines(answer)]
    if _is_beyond_training(answer):
        return text_lines
    return [*text_lines, "", *_machine_lines(answer)]


def _is_beyond_training(answer: LongContext) -> bool:
    return 0 < answer.model.native_context < answer.tokens


def _model_lines(answer: LongContext) -> list[str]:
    name = answer.model.name
    if answer.plan is None:
        return paragraph(f"{name}: no file of it fits this machine")
    text_lines = [f"{name} {answer.plan.variant.quant} on this machine:"]
    if _is_beyond_training(answer):
        native = answer.model.native_context
        text_lines.append(f"  trained for {native:,} tokens: no KV type is enough")
    for choice in answer.choices:
        verdict = "enough" if choice.max_ctx >= answer.tokens else "too little"
        text_lines.append(f"  KV cache {choice.kv_type:5} {choice.max_ctx:>11,} tokens  {verdict}")
    return text_lines


def _other_lines(answer: LongContext) -> list[str]:
    if not answer.others:
        return paragraph("no model of the catalog holds so many tokens on this machine")
    head, rows = numbered_rows(answer.others, frozenset())
    kv_types = {plan.settings.kv_type for plan in answer.others} - {"f16"}
    text_lines = ["models that hold so many tokens here:", head, *rows]
    for kv_type in sorted(kv_types):
        numbers = [
            str(number)
            for number, plan in enumerate(answer.others, 1)
            if plan.settings.kv_type == kv_type
        ]
        text_lines.append(f"  with a {kv_type} KV cache: {', '.join(numbers)}")
    return text_lines


def _machine_lines(answer: LongContext) -> list[str]:
    if answer.machine is None:
        return paragraph(f"no machine of the table holds so many tokens with {answer.model.name}")
    device, plan = answer.machine
    return paragraph(
        f"least machine for {answer.model.name} with so many tokens: {device.name}, "
        f"{plan.variant.quant} in {gb(plan.memory.total_bytes)}, {speed(plan.decode_tok_s)} tok/s"
    )


def as_json(answer_found: LongContext) -> str:
    """Return the answer as JSON."""
    machine: dict[str, Any] | None = None
    if answer_found.machine is not None:
        device, plan = answer_found.machine
        machine = {"device": device.name, **_plan(plan)}
    answer = {
        "tokens": answer_found.tokens,
        "model": answer_found.model.id,
        "trained_for": answer_found.model.native_context,
        "kv_types": [
            {"kv_type": choice.kv_type, "longest": choice.max_ctx}
            for choice in answer_found.choices
        ],
        "models": [_plan(plan) for plan in answer_found.others],
        "machine": machine,
    }
    return json.dumps(answer, indent=2)


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.model.id,
        "quant": plan.variant.quant,
        "kv_type": plan.settings.kv_type,
        "fits": plan.fits,
        "needs_bytes": plan.memory.total_bytes,
        "decode_tok_s": round(plan.decode_tok_s.value, 2),
    }
