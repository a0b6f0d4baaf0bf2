"""From a Device, the models and a Workload to ranked Plans: every variant × KV type × offload, at
most eight picks.

Pure and deterministic: the same inputs give the same Plans in the same order. Ranking is a sum of
points on the quality index (localllm/planner/quality.py): the model's rating, minus what format and
KV type cost, minus what a speed below the purpose's good speed costs, plus a little for spare speed
and recency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from localllm.device.accelerators import KINDS, rival
from localllm.device.types import Device
from localllm.formatting import gb, mb
from localllm.planner import (
    drafting,
    efficiency,
    memory,
    needs,
    picks,
    places,
    quality,
    speed,
    why,
)
from localllm.planner.needs import Need
from localllm.planner.placing import verdict
from localllm.planner.plan import finished, max_context, plan_for
from localllm.planner.starting_settings import NOTHING_FIXED, Overrides, draft_pair, typical
from localllm.planner.types import (
    USUAL,
    DraftChoice,
    Plan,
    Recommendation,
    Rejected,
    Workload,
    backend_of,
)
from localllm_backends import registry
from localllm_catalog.types import Model, Variant

MAX_PICKS = 8
_MOST_LOST_POINTS = 3.0
# A file this near the best of its model in score is run instead, where it loses less to its format.
_NEAR_POINTS = 2.0
# Four bits lose no more than this of a model of 4 billion weights and more: nobody goes below them
# for speed.
_LITTLE_LOST_POINTS = 1.0
# Files of more bits a weight than this are of 16: BF16, F16.
_SIXTEEN_BITS = 12.0


def backends_of(device: Device) -> tuple[str, ...]:
    """Engines that exist for this kind of machine."""
    return tuple(d.name for d in registry.declarations() if d.runs_on(device.accelerator))


def too_slow(plan: Plan, need: Need) -> bool:
    """True when the plan's speed, or its wait for the first token, is not what the purpose can live
    with."""
    return plan.stream_tok_s < need.least_tok_s or needs.too_long(plan, need)


def _candidates(device: Device, model: Model, overrides: Overrides) -> list[Variant]:
    possible = backends_of(device)
    if overrides.backends:
        engines = tuple(b for b in possible if b in overrides.backends)
    else:
        engines = possible
    return [v for v in model.variants if backend_of(v).name in engines and v.file_bytes > 0]


def _small_enough(device: Device, model: Model, variants: Sequence[Variant]) -> list[Variant]:
    pool = device.room_bytes + (
        device.host.limit_bytes if device.host and device.kind == "discrete" else 0
    )
    return [v for v in variants if v.file_bytes - places.disk_bytes(model, v, USUAL) <= pool]


def _is_sound(model: Model, variant: Variant) -> bool:
    """False where more than 3 points are lost to the format: the next smaller model is the better
    use of the memory. Such a file ranks behind every sound one, of whatever model: what two bits
    take away was measured on text, and is worse in long thoughts and calls of tools."""
    return quality.format_cost(model, variant) <= _MOST_LOST_POINTS


def recommend(
    device: Device,
    models: Iterable[Model],
    workload: Workload,
    *,
    overrides: Overrides = NOTHING_FIXED,
    limit: int = MAX_PICKS,
    on_plan: Callable[[Plan], object] = lambda _: None,
) -> Recommendation:
    """At most `limit` Plans (0 = all that fit) for `workload` on `device`, best first, and the
    reason for every other model. `on_plan` gets each model's own best as it is found, unranked.

    At most two picks of a family, of different sizes, so that eight of one maker's do not crowd out
    the rest; and none that another pick matches in everything (localllm/planner/picks.py).
    """
    everything = list(models)
    need = needs.need_of(workload)
    best: list[Plan] = []
    rejected: list[Rejected] = []
    for model in everything:
        outcome = _best_of(device, model, workload, need, overrides)
        if isinstance(outcome, Plan):
            best.append(outcome)
            on_plan(outcome)
        elif outcome is not None:
            rejected.append(outcome)
    best = picks.no_less_than_older(best)
    best.sort(key=lambda p: (p.model.release_date, p.model.id), reverse=True)
    best.sort(key=lambda p: (not _is_sound(p.model, p.variant), -p.score))
    best = _sure_first(best)
    shown, left = picks.choose(best, limit)
    rejected += [_not_shown(device, *one, workload, overrides) for one in left]
    rejected.sort(key=lambda r: (-quality.rate(r.model, workload.purpose).points, r.model.id))
    detailed = [
        detailed_plan(device, plan, everything, workload, overrides)
        for plan in why.explained(shown, need)
    ]
    return Recommendation(tuple(detailed), tuple(rejected), workload)


def _sure_first(ranked: list[Plan]) -> list[Plan]:
    """`ranked`, but with the first one in front that somebody has rated, whose files are listed and
    lose little to their format: that others than its maker rated, if there is any. One of no points
    is no answer, whatever is known of it: then the rank alone decides."""

    def doubts(plan: Plan) -> tuple[bool, ...]:
        poor = not _is_sound(plan.model, plan.variant)
        return poor or not plan.is_rated or plan.variant.is_estimate, plan.makers_own

    sure = min((p for p in ranked if p.quality >= 0), key=doubts, default=None)
    if sure is None or doubts(sure)[0]:
        return ranked
    return [sure, *(p for p in ranked if p is not sure)]


def _not_shown(
    device: Device, plan: Plan, reason: str, workload: Workload, overrides: Overrides
) -> Rejected:
    """Why a plan that fits is not among the picks: the `reason`, or only a small format of it
    fits."""
    usual = typical(_candidates(device, plan.model, overrides))
    if usual.file_bytes > plan.variant.file_bytes:
        whole = plan_for(device, plan.model, usual, workload, overrides=overrides, rough=True)
        if whole.fits == "no":
            reason = f"{why.does_not_fit(whole, device)}; {plan.variant.quant} would fit"
            return Rejected(plan.model, usual, reason, "memory")
    return Rejected(plan.model, plan.variant, reason, "ranking")


def detailed_plan(
    device: Device,
    plan: Plan,
    models: Sequence[Model],
    workload: Workload,
    overrides: Overrides = NOTHING_FIXED,
) -> Plan:
    """`plan` with its longest context, and further reasons: the cliff, how the other engine would
    do, and a draft model where one would pay."""
    longest = max_context(device, plan)
    if "measured" not in plan.decode_tok_s.basis:
        limit = efficiency.limit_of(device)
    else:
        limit = None
    other = _other_engine(device, plan, workload, overrides)
    reasons = (
        f"up to {longest:,} tokens of context fit; each further 1,024 cost "
        f"{mb(plan.kv_bytes_per_1k)}",
        why.on_disk(plan, speed.decode(device, plan.model, plan.variant, plan.settings).value),
        limit,
        needs.sentence(plan, needs.need_of(workload)),
        picks.compare(device, plan, other) if other is not None else None,
        _other_kernels(device, plan),
        _draft_sentence(device, plan, models),
        drafting.heads_sentence(device, plan),
        drafting.edit_sentence(device, plan),
        drafting.companions_sentence(plan),
    )
    return replace(plan, max_ctx=longest, reasons=tuple(filter(None, reasons)))


def _other_engine(
    device: Device, plan: Plan, workload: Workload, overrides: Overrides
) -> Plan | None:
    """The plan of the same model in files of about the same size on the machine's other engine, if
    it fits."""
    others = [
        v for v in _candidates(device, plan.model, overrides) if backend_of(v).name != plan.backend
    ]
    variant = picks.nearest_of_other(plan, others)
    if variant is None:
        return None
    other = plan_for(device, plan.model, variant, workload, overrides=overrides)
    if other.fits != "no":
        return other
    return None


# Less than this between ROCm and Vulkan is not worth another build.
_KERNELS_PAY = 1.05


def _other_kernels(device: Device, plan: Plan) -> str | None:
    """On a Radeon, what llama.cpp's other build would do: "Vulkan instead of ROCm: …", where that
    differs and fits."""
    other = rival(device.accelerator)
    if other is None or not backend_of(plan.variant).runs_on(other):
        return None
    if efficiency.generation(device.match or device.name)[0] != "amd":
        return None

    def rates(machine: Device) -> tuple[float, float]:
        known = (machine, plan.model, plan.variant, plan.settings)
        return speed.decode(*known).value, speed.prefill(*known).value

    ratios = [
        a / b for a, b in zip(rates(replace(device, accelerator=other)), rates(device), strict=True)
    ]
    if all(1 / _KERNELS_PAY < ratio < _KERNELS_PAY for ratio in ratios):
        return None
    decode, prompt = (f"{ratio:.2f}× as fast" for ratio in ratios)
    return (
        f"with a {KINDS[other].label} build instead of {KINDS[device.accelerator].label}: "
        "answers "
        f"{decode}, prompts {prompt} (predicted)"
    )


_DRAFT_PAYS = 1.25


def _draft_sentence(device: Device, plan: Plan, models: Sequence[Model]) -> str | None:
    """What the listed draft model that pays most and still fits would bring; None where none
    does."""
    known = {m.id: m for m in models}
    found: list[tuple[float, str, int]] = []
    for name in plan.model.drafts:
        if name in known:
            pair = draft_pair(known[name], plan.variant)
        else:
            pair = None
        if pair is None:
            continue
        gain = drafting.draft_gain(device, (plan.model, plan.variant), pair)
        drafted = replace(plan.settings, drafter=DraftChoice(name, pair))
        need = memory.need(plan.model, plan.variant, drafted, device)
        if gain >= _DRAFT_PAYS and verdict(device, need) == "yes":
            found.append((gain, name, need.draft_bytes))
    if not found:
        return None
    gain, name, extra = max(found)
    assumed = f"{drafting.ASSUMED_ACCEPTANCE:.0%} of its tokens accepted, assumed"
    return f"with --draft {name}: about {gain:.1f}× as fast ({assumed}), {gb(extra)} more"


def beyond_training(model: Model, workload: Workload) -> str:
    """What is wrong with a context longer than `model` was trained for; "" of any other."""
    if not model.native_context or workload.context <= model.native_context:
        return ""
    return f"trained for {model.native_context:,} tokens, {workload.context:,} asked"


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
    untrained = beyond_training(model, workload)
    if untrained:
        return Rejected(model, smallest, untrained, "context")
    fitting: list[Plan] = []
    fast: list[Plan] = []
    for group in _by_class(model, _small_enough(device, model, variants)):
        plans = [
            plan_for(device, model, v, workload, overrides=overrides, rough=True) for v in group
        ]
        plans = [p for p in plans if p.fits != "no"]
        fitting = fitting or plans
        fast = [p for p in plans if not too_slow(p, need)]
        if fast:
            break
    if not fitting:
        shown = typical(variants)
        return Rejected(
            model,
            shown,
            why.does_not_fit(
                plan_for(device, model, shown, workload, overrides=overrides, rough=True), device
            ),
            "memory",
        )
    if not fast:
        quickest = max(fitting, key=lambda p: (p.stream_tok_s, p.variant.quant))
        return Rejected(model, quickest.variant, why.is_too_slow(quickest, need), "speed")
    best, chosen = _best_file(fast, need)
    return replace(finished(device, chosen, workload, overrides), score=best.score)


def _by_class(model: Model, variants: Sequence[Variant]) -> list[list[Variant]]:
    """Listed files before constructed ones; poor ones behind, for where no sound one fits, or is
    fast enough."""
    classes: dict[tuple[bool, bool], list[Variant]] = {}
    for variant in variants:
        classes.setdefault((not _is_sound(model, variant), variant.is_estimate), []).append(variant)
    # Eight bits lose nothing that anybody has measured: sixteen are twice the memory for nothing.
    return [
        [v for v in classes[kind] if quality.bits(model, v) < _SIXTEEN_BITS] or classes[kind]
        for kind in sorted(classes)
    ]


def _best_file(plans: Sequence[Plan], need: Need) -> tuple[Plan, Plan]:
    """Of one model's plans that are fast enough, the best by score, which the model ranks by, and
    the one to run: of those near it the one that loses least to its format and keeps the purpose's
    good speed, else the best. Four bits and more, which lose little, go before fewer; and what
    leaves an agent's context room to grow before what does not."""
    best = max(plans, key=lambda p: (p.score, -why.all_memory(p), p.variant.quant))
    near = [
        p for p in plans if p.score >= best.score - _NEAR_POINTS and p.fits in ("yes", best.fits)
    ]
    near = [
        p for p in near if quality.format_cost(p.model, p.variant) <= _LITTLE_LOST_POINTS
    ] or near
    near = [p for p in near if needs.context_can_grow(p, need)] or near
    kept = [p for p in near if p.stream_tok_s >= need.good_tok_s]
    return best, max(
        kept or near,
        key=lambda p: (p.quality if kept else 0, p.score, -why.all_memory(p), p.variant.quant),
    )


def variants_of(
    device: Device, model: Model, workload: Workload, *, overrides: Overrides = NOTHING_FIXED
) -> list[Plan]:
    """Every variant of one model that this machine's engines can read, whether or not it fits,
    smallest file first."""
    plans = [
        plan_for(device, model, v, workload, overrides=overrides)
        for v in _candidates(device, model, overrides)
    ]
    need = needs.need_of(workload)
    plans = [
        replace(p, max_ctx=max_context(device, p), why=why.of_variant(p, device, need))
        for p in plans
    ]
    untrained = beyond_training(model, workload)
    if untrained:
        plans = [replace(p, fits="no", why=untrained) for p in plans]
    return sorted(plans, key=lambda p: (p.variant.file_bytes, p.variant.format, p.variant.quant))


@dataclass(frozen=True, slots=True)
class Reach:
    """The machines that run a model at a speed, those with the slowest memory first, each in its
    smallest size that does; and the fastest one that holds the model and does not (None: every one
    that holds it does)."""

    found: tuple[tuple[Device, Plan], ...]
    nearest: tuple[Device, Plan] | None


def reaching(
    devices: Iterable[Device],
    model: Model,
    workload: Workload,
    tok_s: float,
    *,
    overrides: Overrides = NOTHING_FIXED,
) -> Reach:
    """Which of `devices` decode `model` at `tok_s` or more, in its best format of at least that
    speed.

    A format that loses more than a smaller model would is not considered, nor a plan whose prompt
    takes too long.
    """
    need = needs.need_of(workload)
    found: dict[str, tuple[Device, Plan]] = {}
    nearest: tuple[Device, Plan] | None = None
    for device in sorted(devices, key=lambda d: (d.bandwidth_gbps.value, d.room_bytes, d.name)):
        if device.match in found:
            continue
        plans = [
            plan_for(device, model, variant, workload, overrides=overrides)
            for variant in _small_enough(device, model, _candidates(device, model, overrides))
            if _is_sound(model, variant)
        ]
        whole = [p for p in plans if p.fits in ("yes", "tight") and not needs.too_long(p, need)]
        fast = [p for p in whole if p.decode_tok_s.value >= tok_s]
        if fast:
            found[device.match] = device, max(fast, key=lambda p: (p.quality, p.decode_tok_s.value))
        elif whole:
            best = max(whole, key=lambda p: p.decode_tok_s.value)
            if nearest is None or best.decode_tok_s.value > nearest[1].decode_tok_s.value:
                nearest = device, best
    return Reach(tuple(found.values()), nearest)
