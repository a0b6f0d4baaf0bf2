"""`localllm recommend --device A --with B --link L`: prefill on A and decode on B, as text or JSON.

The screen of models takes the same words as the name of a machine: "A --with B --link L".
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from localllm.cli.recommend import cluster as joined
from localllm.device.name_lookup import resolve
from localllm.device.types import Device
from localllm.errors import DoesNotFitError, UsageError
from localllm.library.catalog import load_catalog
from localllm.library.describe import describe
from localllm.load.candidates import overrides_for
from localllm.planner import cluster, phase_split
from localllm.planner import recommend as planner
from localllm.planner.cluster import Link
from localllm.planner.phase_split import PhaseSplit
from localllm.planner.starting_settings import context_for
from localllm.planner.types import Plan, RunSettings, Workload

# Prompts that are compared, as far as they fit the context.
_PROMPT_TOKENS = (2048, 8192, 32_768)
# Links that are compared with the chosen one.
_OTHER_LINKS = ("1gbe", "2.5gbe", "10gbe")
_JOINED_TEXT = re.compile(
    r"(?P<prefilling>.+?)\s+--with\s+(?P<decoding>.+?)\s+--link\s+(?P<link>\S+)"
)


class JoinedNames(NamedTuple):
    """The names of two machines, and of the link between them."""

    prefilling: str
    decoding: str
    link: str


def joined_names(machine: str) -> JoinedNames | None:
    """The names in "A --with B --link L"; None if it is a single machine."""
    match = _JOINED_TEXT.fullmatch(machine.strip())
    if match is None:
        return None
    return JoinedNames(match["prefilling"], match["decoding"], match["link"])


class Prefilling(NamedTuple):
    """Another machine that reads prompts, and the link to it."""

    device: Device
    link: Link

    @property
    def words(self) -> str:
        return f"prefill on {self.device.name}, {self.link.name}"

    def lines(self, plan: Plan, here: Device, workload: Workload, *, explains: bool) -> list[str]:
        """The prediction for `plan`, whose answers are written on `here`."""
        reason = self._why_not(plan, here, workload)
        if reason:
            return [reason]
        return _lines(plan, _split(self, here, plan, workload, _OTHER_LINKS), explains=explains)

    def one_line(self, plan: Plan, here: Device, workload: Workload) -> str:
        """The first-token time of a long prompt, and from which prompt on the link pays."""
        reason = self._why_not(plan, here, workload)
        if reason:
            return reason
        split = _split(self, here, plan, workload, ())
        split_way, _, decoding_only, *_ = split.ways
        n_tokens = split.prompt_tokens[-1]
        seconds = (
            f"{_seconds(split_way.ttft_s[-1].value)}, here alone "
            f"{_seconds(decoding_only.ttft_s[-1].value)}"
        )
        return f"{self.words}: first token of {n_tokens:,} tokens in {seconds}; {_pays_text(split)}"

    def _why_not(self, plan: Plan, here: Device, workload: Workload) -> str:
        reason = phase_split.why_not(plan.variant, self.device, here)
        if reason or _fits(self.device, plan, workload):
            return reason
        return f"it does not fit on {self.device.name}, so prompts are read here"


def prefilling_of(names: JoinedNames) -> Prefilling:
    """The machine and the link. Raises DeviceNotFoundError and UsageError."""
    return Prefilling(resolve(names.prefilling), joined.link_named(names.link))


def answer(
    prefilling: str | None,
    decoding: str,
    link: str | None,
    reference: str | None,
    workload: Workload,
    *,
    explains: bool,
    as_json: bool,
) -> list[str]:
    """Return the lines of the answer. Without `reference`, the model is the best one that fits on
    both machines. Raises UsageError if the question is incomplete, and DoesNotFitError."""
    if prefilling is None or link is None:
        raise UsageError(
            "--with needs --device and --link: the machine that reads prompts, and the link to it",
            hint='--device "dgx spark" --with "m4 max 128GB" --link 10gbe',
        )
    prefilling_machine = prefilling_of(JoinedNames(prefilling, decoding, link))
    here = resolve(decoding)
    plan = _plan_on_both(prefilling_machine.device, here, reference, workload)
    split = _split(prefilling_machine, here, plan, workload, _OTHER_LINKS)
    if as_json:
        return [json.dumps(_json(plan, split), indent=2)]
    return _lines(plan, split, explains=explains)


def _split(
    prefilling_machine: Prefilling,
    here: Device,
    plan: Plan,
    workload: Workload,
    others: Sequence[str],
) -> PhaseSplit:
    """The prediction for `plan`. `others`: the names of links to compare."""
    settings = RunSettings(
        n_ctx=context_for(plan.model, workload),
        kv_type_k=plan.settings.kv_type_k,
        kv_type_v=plan.settings.kv_type_v,
        slots=workload.parallel,
    )
    prompt_tokens = [n_tokens for n_tokens in _PROMPT_TOKENS if n_tokens < settings.n_ctx] or [
        settings.n_ctx // 2
    ]
    return phase_split.plan(
        plan.model,
        plan.variant,
        settings,
        prefilling_machine.device,
        here,
        prefilling_machine.link,
        [cluster.LINKS[name] for name in others],
        prompt_tokens,
    )


def _lines(plan: Plan, split: PhaseSplit, *, explains: bool) -> list[str]:
    lines = [
        f"{plan.model.id} {plan.variant.quant}: prefill on {split.there.name}, "
        f"decode on {split.here.name}, {split.link.name}",
        *_table(split),
        _links_text(split),
        _needed_text(split),
    ]
    if explains:
        lines += _arithmetic(split)
    return [*lines, f"basis: {split.ways[0].ttft_s[0].basis}; {split.link.source}"]


def _plan_on_both(there: Device, here: Device, reference: str | None, workload: Workload) -> Plan:
    """The plan on `here` of the named model, or of the best model, that also fits on `there`."""
    catalog = load_catalog()
    overrides = overrides_for(here, catalog)
    if reference is None:
        plans = [*planner.recommend(here, catalog.models, workload, overrides=overrides).plans]
        quant = ""
    else:
        model, quant = describe(reference, catalog)
        plans = planner.variants_of(here, model, workload, overrides=overrides)
    reason = ""
    for plan in sorted(plans, key=lambda plan: plan.score, reverse=True):
        if plan.fits == "no" or (quant and plan.variant.quant.lower() != quant.lower()):
            continue
        reason = phase_split.why_not(plan.variant, there, here)
        if not reason and _fits(there, plan, workload):
            return plan
    name = reference or "any model"
    raise DoesNotFitError(
        f"{name} does not fit on {there.name} and on {here.name}, each with all of its layers",
        hint=reason or 'to divide the layers, use --device "A + B" -m MODEL --link LINK',
    )


def _fits(device: Device, plan: Plan, workload: Workload) -> bool:
    variants = planner.variants_of(device, plan.model, workload)
    same_variant = [variant for variant in variants if variant.variant == plan.variant]
    return any(variant.fits in ("yes", "tight") for variant in same_variant)


def _table(split: PhaseSplit) -> list[str]:
    """First-token times and tokens/s of every way, one line each."""
    width = max(len(way.name) for way in split.ways)
    prompts = "".join(f"{n_tokens:>10,}" for n_tokens in split.prompt_tokens)
    lines = [f"{'first token, for a prompt of':{width}}{prompts}    decode"]
    for way in split.ways:
        seconds = "".join(f"{_seconds(ttft.value):>10}" for ttft in way.ttft_s)
        lines.append(f"{way.name:{width}}{seconds}    {way.decode_tok_s.value:.1f} tok/s")
    return lines


def _seconds(value: float) -> str:
    if value < 10:
        return f"{value:.1f} s"
    return f"{value:.0f} s"


def _pays_text(split: PhaseSplit) -> str:
    """From which prompt on the chosen link pays, which comes first."""
    return f"pays {_from_text(split.pays_from[0][1])}"


def _from_text(n_tokens: int | None) -> str:
    if n_tokens is None:
        return "never"
    return f"from {n_tokens:,} tokens"


def _links_text(split: PhaseSplit) -> str:
    """From which prompt on each link pays."""
    others = [f"with {link.name} {_from_text(n_tokens)}" for link, n_tokens in split.pays_from[1:]]
    return "; ".join([_pays_text(split), *others])


def _needed_text(split: PhaseSplit) -> str:
    """The link that is needed for a gain."""
    n_tokens = split.prompt_tokens[-1]
    if split.needed_bytes_s is None:
        return (
            f"no link is fast enough for a prompt of {n_tokens:,} tokens: "
            f"{split.here.name} reads it as fast"
        )
    gigabits = split.needed_bytes_s * 8 / 1e9
    kv_text = f"{split.kv_bytes[-1] / 1e9:.2f} GB of KV"
    return (
        f"a prompt of {n_tokens:,} tokens ({kv_text}) gains over a link of "
        f"{gigabits:.2g} Gbit/s or more"
    )


def _arithmetic(split: PhaseSplit) -> list[str]:
    """The terms of the first-token times."""
    split_way, prefilling_only, decoding_only, *_ = split.ways
    step_s = 1 / split_way.decode_tok_s.value
    lines = []
    for i, n_tokens in enumerate(split.prompt_tokens):
        sent_s = split.kv_bytes[i] / split.link.bytes_per_s
        computed_s = prefilling_only.ttft_s[i].value - 1 / prefilling_only.decode_tok_s.value
        lines.append(
            f"{n_tokens:,} tokens: computed there in {computed_s:.2f} s, "
            f"{split.kv_bytes[i] / 1e6:,.0f} MB "
            f"sent in {sent_s:.2f} s, overlapped in parts of {phase_split.PART_TOKENS}; "
            f"one step here {step_s * 1e3:.0f} ms; here alone {decoding_only.ttft_s[i].value:.2f} s"
        )
    return lines


def _json(plan: Plan, split: PhaseSplit) -> dict[str, Any]:
    return {
        "model": plan.model.id,
        "quant": plan.variant.quant,
        "prefill_on": split.there.name,
        "decode_on": split.here.name,
        "link": asdict(split.link),
        "prompt_tokens": split.prompt_tokens,
        "kv_bytes": split.kv_bytes,
        "ways": [asdict(way) for way in split.ways],
        "pays_from_tokens": {link.name: n_tokens for link, n_tokens in split.pays_from},
        "needed_bytes_s": split.needed_bytes_s,
    }
