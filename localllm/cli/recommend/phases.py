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
_PROMPTS = (2048, 8192, 32_768)
# Links that are compared with the chosen one.
_OTHERS = ("1gbe", "2.5gbe", "10gbe")
_JOINED = re.compile(r"(?P<prefilling>.+?)\s+--with\s+(?P<decoding>.+?)\s+--link\s+(?P<link>\S+)")


class JoinedNames(NamedTuple):
    """The names of two machines, and of the link between them."""

    prefilling: str
    decoding: str
    link: str


def joined_names(machine: str) -> JoinedNames | None:
    """The names in "A --with B --link L"; None if it is a single machine."""
    match = _JOINED.fullmatch(machine.strip())
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
        why = self._why_not(plan, here, workload)
        if why:
            return [why]
        return _lines(plan, _split(self, here, plan, workload, _OTHERS), explains=explains)

    def in_a_line(self, plan: Plan, here: Device, workload: Workload) -> str:
        """The first-token time of a long prompt, and from which prompt on the link pays."""
        why = self._why_not(plan, here, workload)
        if why:
            return why
        found = _split(self, here, plan, workload, ())
        both, _, alone, *_ = found.ways
        n_tokens = found.prompt_tokens[-1]
        seconds = (
            f"{_seconds(both.ttft_s[-1].value)}, here alone {_seconds(alone.ttft_s[-1].value)}"
        )
        return f"{self.words}: first token of {n_tokens:,} tokens in {seconds}; {_pays(found)}"

    def _why_not(self, plan: Plan, here: Device, workload: Workload) -> str:
        why = phase_split.why_not(plan.variant, self.device, here)
        if why or _fits(self.device, plan, workload):
            return why
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
    reader = prefilling_of(JoinedNames(prefilling, decoding, link))
    here = resolve(decoding)
    chosen = _plan(reader.device, here, reference, workload)
    found = _split(reader, here, chosen, workload, _OTHERS)
    if as_json:
        return [json.dumps(_json(chosen, found), indent=2)]
    return _lines(chosen, found, explains=explains)


def _split(
    reader: Prefilling, here: Device, chosen: Plan, workload: Workload, others: Sequence[str]
) -> PhaseSplit:
    """The prediction for `chosen`. `others`: the names of links to compare."""
    settings = RunSettings(
        n_ctx=context_for(chosen.model, workload),
        kv_type_k=chosen.settings.kv_type_k,
        kv_type_v=chosen.settings.kv_type_v,
        slots=workload.parallel,
    )
    prompts = [n for n in _PROMPTS if n < settings.n_ctx] or [settings.n_ctx // 2]
    return phase_split.plan(
        chosen.model,
        chosen.variant,
        settings,
        reader.device,
        here,
        reader.link,
        [cluster.LINKS[name] for name in others],
        prompts,
    )


def _lines(chosen: Plan, found: PhaseSplit, *, explains: bool) -> list[str]:
    lines = [
        f"{chosen.model.id} {chosen.variant.quant}: prefill on {found.there.name}, "
        f"decode on {found.here.name}, {found.link.name}",
        *_table(found),
        _links(found),
        _needed(found),
    ]
    if explains:
        lines += _arithmetic(found)
    return [*lines, f"basis: {found.ways[0].ttft_s[0].basis}; {found.link.source}"]


def _plan(there: Device, here: Device, reference: str | None, workload: Workload) -> Plan:
    """The plan on `here` of the named model, or of the best model, that also fits on `there`."""
    catalog = load_catalog()
    overrides = overrides_for(here, catalog)
    if reference is None:
        plans = [*planner.recommend(here, catalog.models, workload, overrides=overrides).plans]
        quant = ""
    else:
        model, quant = describe(reference, catalog)
        plans = planner.variants_of(here, model, workload, overrides=overrides)
    why = ""
    for plan in sorted(plans, key=lambda plan: plan.score, reverse=True):
        if plan.fits == "no" or (quant and plan.variant.quant.lower() != quant.lower()):
            continue
        why = phase_split.why_not(plan.variant, there, here)
        if not why and _fits(there, plan, workload):
            return plan
    name = reference or "any model"
    raise DoesNotFitError(
        f"{name} does not fit on {there.name} and on {here.name}, each with all of its layers",
        hint=why or 'to divide the layers, use --device "A + B" -m MODEL --link LINK',
    )


def _fits(device: Device, plan: Plan, workload: Workload) -> bool:
    others = planner.variants_of(device, plan.model, workload)
    same = [p for p in others if p.variant == plan.variant]
    return any(p.fits in ("yes", "tight") for p in same)


def _table(found: PhaseSplit) -> list[str]:
    """First-token times and tokens/s of every way, one line each."""
    width = max(len(way.name) for way in found.ways)
    prompts = "".join(f"{n:>10,}" for n in found.prompt_tokens)
    lines = [f"{'first token, for a prompt of':{width}}{prompts}    decode"]
    for way in found.ways:
        seconds = "".join(f"{_seconds(ttft.value):>10}" for ttft in way.ttft_s)
        lines.append(f"{way.name:{width}}{seconds}    {way.decode_tok_s.value:.1f} tok/s")
    return lines


def _seconds(value: float) -> str:
    if value < 10:
        return f"{value:.1f} s"
    return f"{value:.0f} s"


def _pays(found: PhaseSplit) -> str:
    """From which prompt on the chosen link pays, which comes first."""
    return f"pays {_from(found.pays_from[0][1])}"


def _from(n_tokens: int | None) -> str:
    if n_tokens is None:
        return "never"
    return f"from {n_tokens:,} tokens"


def _links(found: PhaseSplit) -> str:
    """From which prompt on each link pays."""
    others = [f"with {link.name} {_from(n_tokens)}" for link, n_tokens in found.pays_from[1:]]
    return "; ".join([_pays(found), *others])


def _needed(found: PhaseSplit) -> str:
    """The link that is needed for a gain."""
    n_tokens = found.prompt_tokens[-1]
    if found.needed_bytes_s is None:
        return f"no link is fast enough for a prompt of {n_tokens:,} tokens: {found.here.name} reads it as fast"
    gigabits = found.needed_bytes_s * 8 / 1e9
    carried = f"{found.kv_bytes[-1] / 1e9:.2f} GB of KV"
    return f"a prompt of {n_tokens:,} tokens ({carried}) gains over a link of {gigabits:.2g} Gbit/s or more"


def _arithmetic(found: PhaseSplit) -> list[str]:
    """The terms of the first-token times."""
    split, there, here, *_ = found.ways
    step_s = 1 / split.decode_tok_s.value
    lines = []
    for i, n_tokens in enumerate(found.prompt_tokens):
        sent_s = found.kv_bytes[i] / found.link.bytes_per_s
        computed_s = there.ttft_s[i].value - 1 / there.decode_tok_s.value
        lines.append(
            f"{n_tokens:,} tokens: computed there in {computed_s:.2f} s, {found.kv_bytes[i] / 1e6:,.0f} MB "
            f"sent in {sent_s:.2f} s, overlapped in parts of {phase_split.PART_TOKENS}; "
            f"one step here {step_s * 1e3:.0f} ms; here alone {here.ttft_s[i].value:.2f} s"
        )
    return lines


def _json(chosen: Plan, found: PhaseSplit) -> dict[str, Any]:
    return {
        "model": chosen.model.id,
        "quant": chosen.variant.quant,
        "prefill_on": found.there.name,
        "decode_on": found.here.name,
        "link": asdict(found.link),
        "prompt_tokens": found.prompt_tokens,
        "kv_bytes": found.kv_bytes,
        "ways": [asdict(way) for way in found.ways],
        "pays_from_tokens": {link.name: n_tokens for link, n_tokens in found.pays_from},
        "needed_bytes_s": found.needed_bytes_s,
    }
