"""From a Device, the models and a Workload to ranked Plans: every variant × KV type × offload, at most eight picks.

Pure and deterministic: the same inputs give the same Plans in the same order. Ranking is a sum of points on the
quality index (localllm/planner/quality.py): the model's rating, minus what format and KV type cost, minus what a
speed below the purpose's good speed costs, plus a little for spare speed and recency.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from localllm.device.types import Device
from localllm.planner import drafting, engines, memory, needs, quality, speed, why
from localllm.planner.needs import Need
from localllm.planner.plan import NOTHING_FIXED, Overrides, draft_pair, max_context, plan_for, typical, verdict
from localllm.planner.types import Drafter, Plan, Recommendation, Rejected, Workload, backend_for
from localllm_catalog.types import Model, Variant

MAX_PICKS = 8
_PER_FAMILY = 2
_MOST_LOST_POINTS = 3.0


def backends_of(device: Device) -> tuple[str, ...]:
    """Engines that exist for this kind of machine: llama.cpp everywhere, MLX on Apple GPUs."""
    return ("llamacpp", "mlx") if device.accelerator == "metal" else ("llamacpp",)


def too_slow(plan: Plan, need: Need) -> bool:
    """True when the plan's speed is below the least the purpose can live with."""
    return plan.decode_tok_s.value < need.least_tok_s


def _candidates(device: Device, model: Model, overrides: Overrides) -> list[Variant]:
    possible = backends_of(device)
    engines = tuple(b for b in possible if b in overrides.backends) if overrides.backends else possible
    return [v for v in model.variants if backend_for(v) in engines and v.file_bytes > 0]


def recommend(
    device: Device,
    models: Iterable[Model],
    workload: Workload,
    *,
    overrides: Overrides = NOTHING_FIXED,
    limit: int = MAX_PICKS,
) -> Recommendation:
    """At most `limit` Plans (0 = all that fit) for `workload` on `device`, best first, and the reason for every other model.

    At most two picks per model family, so that eight of one maker's sizes do not crowd out the rest.
    """
    everything = list(models)
    need = needs.need_of(workload)
    best: list[Plan] = []
    rejected: list[Rejected] = []
    for model in everything:
        outcome = _best_of(device, model, workload, need, overrides)
        if isinstance(outcome, Plan):
            best.append(outcome)
        elif outcome is not None:
            rejected.append(outcome)
    best.sort(key=lambda p: (-p.score, p.model.id))
    picks: list[Plan] = []
    for plan in best:
        same_family = sum(p.model.family == plan.model.family for p in picks)
        if limit and (len(picks) == limit or same_family == _PER_FAMILY):
            rejected.append(_not_shown(device, plan, workload, overrides))
        else:
            picks.append(plan)
    rejected.sort(key=lambda r: (-quality.rate(r.model).points, r.model.id))
    detailed = [detailed_plan(device, plan, everything, workload, overrides) for plan in why.explained(picks, need)]
    return Recommendation(tuple(detailed), tuple(rejected), workload)


def _not_shown(device: Device, plan: Plan, workload: Workload, overrides: Overrides) -> Rejected:
    """Why a plan that fits is not among the picks: outranked, or only a small format of it fits."""
    usual = typical(_candidates(device, plan.model, overrides))
    if usual.file_bytes > plan.variant.file_bytes:
        whole = plan_for(device, plan.model, usual, workload, overrides=overrides)
        if whole.fits == "no":
            reason = f"{why.does_not_fit(whole, device)}; {plan.variant.quant} would fit"
            return Rejected(plan.model, usual, reason, "memory")
    return Rejected(plan.model, plan.variant, "fits, and ranks below the ones shown", "ranking")


def detailed_plan(
    device: Device, plan: Plan, models: Sequence[Model], workload: Workload, overrides: Overrides = NOTHING_FIXED
) -> Plan:
    """`plan` with its longest context, and further reasons: the cliff, how the other engine would do, and a draft model
    where one would pay."""
    longest = max_context(device, plan)
    reasons = [
        f"up to {longest:,} tokens of context fit; each further 1,024 cost {plan.kv_bytes_per_1k / 2**20:.1f} MiB"
    ]
    other = _other_engine(device, plan, workload, overrides)
    if other is not None:
        reasons.append(engines.compare(device, plan, other))
    draft = _draft_for(device, plan, models)
    if draft is not None:
        name, gain, extra = draft
        assumed = f"{speed.ASSUMED_ACCEPTANCE:.0%} of its tokens accepted, assumed"
        reasons.append(f"with --draft {name}: about {gain:.1f}× as fast ({assumed}), {why.gb(extra)} more")
    edits = drafting.edit_sentence(device, plan)
    if edits is not None:
        reasons.append(edits)
    return replace(plan, max_ctx=longest, reasons=tuple(reasons))


def _other_engine(device: Device, plan: Plan, workload: Workload, overrides: Overrides) -> Plan | None:
    """The plan of the same model in files of about the same size on the machine's other engine, if it fits."""
    others = [v for v in _candidates(device, plan.model, overrides) if backend_for(v) != plan.backend]
    variant = engines.nearest_of_other(plan, others)
    if variant is None:
        return None
    other = plan_for(device, plan.model, variant, workload, overrides=overrides)
    return other if other.fits != "no" else None


_DRAFT_PAYS = 1.25


def _draft_for(device: Device, plan: Plan, models: Sequence[Model]) -> tuple[str, float, int] | None:
    """(id, speed-up, bytes) of the listed draft model that pays most and still fits; None where none does."""
    known = {m.id: m for m in models}
    found: list[tuple[float, str, int]] = []
    for name in plan.model.drafts:
        pair = draft_pair(known[name], plan.variant) if name in known else None
        if pair is None:
            continue
        gain = speed.draft_gain(device, (plan.model, plan.variant), pair)
        drafted = replace(plan.settings, drafter=Drafter(name, pair))
        need = memory.need(plan.model, plan.variant, drafted, device)
        if gain >= _DRAFT_PAYS and verdict(device, need) == "yes":
            found.append((gain, name, need.draft_bytes))
    if not found:
        return None
    gain, name, extra = max(found)
    return name, gain, extra


def _best_of(
    device: Device, model: Model, workload: Workload, need: Need, overrides: Overrides
) -> Plan | Rejected | None:
    variants = _candidates(device, model, overrides)
    if not variants:
        return None
    smallest = min(variants, key=lambda v: (v.file_bytes, v.quant))
    unsuited = needs.unsuited(model, workload)
    if unsuited is not None:
        return Rejected(model, smallest, unsuited, "purpose")
    if workload.context and model.native_context and workload.context > model.native_context:
        reason = f"trained for {model.native_context:,} tokens, {workload.context:,} asked"
        return Rejected(model, smallest, reason, "context")
    pool = device.memory.limit_bytes + (device.host.limit_bytes if device.host and device.kind == "discrete" else 0)
    small_enough = [v for v in variants if v.file_bytes <= pool]
    # More than 3 points lost to the format: the next smaller model is the better use of the memory.
    sound = [v for v in small_enough if quality.format_cost(model, v) <= _MOST_LOST_POINTS]
    poor = [v for v in small_enough if v not in sound]
    fitting: list[Plan] = []
    for group in (sound, poor):
        plans = [plan_for(device, model, v, workload, overrides=overrides) for v in group]
        fitting = [p for p in plans if p.fits != "no"]
        if fitting:
            break
    if not fitting:
        shown = typical(variants)
        needed = plan_for(device, model, shown, workload, overrides=overrides)
        return Rejected(model, shown, why.does_not_fit(needed, device), "memory")
    fast = [p for p in fitting if not too_slow(p, need)]
    if not fast:
        quickest = max(fitting, key=lambda p: (p.decode_tok_s.value, p.variant.quant))
        return Rejected(model, quickest.variant, why.is_too_slow(quickest, need), "speed")
    return max(fast, key=lambda p: (p.score, -p.memory.total_bytes, p.variant.quant))


def variants_of(
    device: Device, model: Model, workload: Workload, *, overrides: Overrides = NOTHING_FIXED
) -> list[Plan]:
    """Every variant of one model that this machine's engines can read, whether or not it fits, smallest file first."""
    plans = [plan_for(device, model, v, workload, overrides=overrides) for v in _candidates(device, model, overrides)]
    need = needs.need_of(workload)
    plans = [replace(p, max_ctx=max_context(device, p), why=why.of_variant(p, device, need)) for p in plans]
    return sorted(plans, key=lambda p: (p.variant.file_bytes, p.variant.format, p.variant.quant))
