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


def lines(device: Device, found: LongContext) -> list[str]:
    """Format the answer for a terminal."""
    out = heading(device, f"What makes {found.tokens:,} tokens of context fit")
    out += ["", *_model_lines(found), "", *_other_lines(found)]
    if _is_beyond_training(found):
        return out
    return [*out, "", *_machine_lines(found)]


def _is_beyond_training(found: LongContext) -> bool:
    return 0 < found.model.native_context < found.tokens


def _model_lines(found: LongContext) -> list[str]:
    name = found.model.name
    if found.plan is None:
        return paragraph(f"{name}: no file of it fits this machine")
    out = [f"{name} {found.plan.variant.quant} on this machine:"]
    if _is_beyond_training(found):
        native = found.model.native_context
        out.append(f"  trained for {native:,} tokens: no KV type is enough")
    for choice in found.choices:
        verdict = "enough" if choice.max_ctx >= found.tokens else "too little"
        out.append(f"  KV cache {choice.kv_type:5} {choice.max_ctx:>11,} tokens  {verdict}")
    return out


def _other_lines(found: LongContext) -> list[str]:
    if not found.others:
        return paragraph("no model of the catalog holds so many tokens on this machine")
    head, rows = numbered_rows(found.others, frozenset())
    caches = {plan.settings.kv_type for plan in found.others} - {"f16"}
    out = ["models that hold so many tokens here:", head, *rows]
    for kv_type in sorted(caches):
        numbers = [
            str(number)
            for number, plan in enumerate(found.others, 1)
            if plan.settings.kv_type == kv_type
        ]
        out.append(f"  with a {kv_type} KV cache: {', '.join(numbers)}")
    return out


def _machine_lines(found: LongContext) -> list[str]:
    if found.machine is None:
        return paragraph(f"no machine of the table holds so many tokens with {found.model.name}")
    device, plan = found.machine
    return paragraph(
        f"least machine for {found.model.name} with so many tokens: {device.name}, "
        f"{plan.variant.quant} in {gb(plan.memory.total_bytes)}, {speed(plan.decode_tok_s)} tok/s"
    )


def as_json(found: LongContext) -> str:
    """Return the answer as JSON."""
    machine: dict[str, Any] | None = None
    if found.machine is not None:
        device, plan = found.machine
        machine = {"device": device.name, **_plan(plan)}
    answer = {
        "tokens": found.tokens,
        "model": found.model.id,
        "trained_for": found.model.native_context,
        "kv_types": [
            {"kv_type": choice.kv_type, "longest": choice.max_ctx} for choice in found.choices
        ],
        "models": [_plan(plan) for plan in found.others],
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
