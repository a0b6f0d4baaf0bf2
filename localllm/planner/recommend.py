"""From a Device, the models and a Workload to ranked Plans: every variant × KV type × offload, at
most eight picks.

Pure and deterministic: the same inputs give the same Plans in the same order. Ranking is a sum of
points on the quality index (localllm/planner/quality.py): the model's rating, minus what format and
KV type cost, minus what a speed below the purpose's good speed costs, plus a little for spare speed
and recency.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

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
    engines = set(backends_of(device))
    if overrides.backends:
        engines &= set(overrides.backends)
    return [v for v in model.variants if backend_of(v).name in engines and v.file_bytes > 0]


def _small_enough(device: Device, model: Model, variants: Sequence[Variant]) -> list[Variant]:
    room_bytes = device.room_bytes
    if device.host and device.kind == "discrete":
        room_bytes += device.host.limit_bytes
    return [v for v in variants if v.file_bytes - places.disk_bytes(model, v, USUAL) <= room_bytes]


def _is_sound(model: Model, variant: Variant) -> bool:
    """False if more than 3 points are lost to the format: the next smaller model is the better use
    of the memory. Such a file ranks below every sound one of any model: the loss of two bits was
    measured on text, and is worse in long thoughts and tool calls."""
    return quality.format_cost(model, variant) <= _MOST_LOST_POINTS


def recommend(
    device: Device,
    models: Iterable[Model],
    workload: Workload,
    *,
    overrides: Overrides = NOTHING_FIXED,
    limit: int = MAX_PICKS,
    on_plan: Callable[[Plan], object] | None = None,
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
            if on_plan is not None:
                on_plan(outcome)
        elif outcome is not None:
            rejected.append(outcome)
    best = picks.no_less_than_older(best)
    best.sort(key=attrgetter("model.release_date", "model.id"), reverse=True)
    best.sort(key=_rank)
    shown, left = picks.choose(_sure_first(best), limit)
    for plan, reason in left:
        rejected.append(_not_shown(device, plan, reason, workload, overrides))
    rejected.sort(key=lambda r: (-quality.rate(r.model, workload.purpose).points, r.model.id))
    detailed = [
        detailed_plan(device, plan, everything, workload, overrides)
        for plan in why.explained(shown, need)
    ]
    return Recommendation(tuple(detailed), tuple(rejected), workload)


def _rank(plan: Plan) -> tuple[bool, float]:
    """Sound files before poor ones, then by score, the best first."""
    return not _is_sound(plan.model, plan.variant), -plan.score


def _is_sure(plan: Plan) -> bool:
    """True if somebody has rated the model, and its files are listed and lose little to their
    format. A plan without points is no answer in any case."""
    if plan.quality < 0 or not plan.is_rated or plan.variant.is_estimate:
        return False
    return _is_sound(plan.model, plan.variant)


def _sure_first(ranked: list[Plan]) -> list[Plan]:
    """`ranked` with the first sure plan in front: one that others than its maker rated, if there is
    any. If no plan is sure, the rank alone decides."""
    sure = [plan for plan in ranked if _is_sure(plan)]
    if not sure:
        return ranked
    first = next((plan for plan in sure if not plan.makers_own), sure[0])
    return [first, *(plan for plan in ranked if plan is not first)]


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
    more = mb(plan.kv_bytes_per_1k)
    reasons: list[str | None] = [
        f"up to {longest:,} tokens of context fit; each further 1,024 cost {more}"
    ]
    predicted = speed.decode(device, plan.model, plan.variant, plan.settings)
    reasons.append(why.on_disk(plan, predicted.value))
    if "measured" not in plan.decode_tok_s.basis:
        reasons.append(efficiency.limit_of(device))
    reasons.append(needs.sentence(plan, needs.need_of(workload)))
    other = _other_engine(device, plan, workload, overrides)
    if other is not None:
        reasons.append(picks.compare(device, plan, other))
    reasons += [
        _other_kernels(device, plan),
        _draft_sentence(device, plan, models),
        drafting.heads_sentence(device, plan),
        drafting.edit_sentence(device, plan),
        drafting.companions_sentence(plan),
    ]
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
    """The speed of llama.cpp's other build on a Radeon; None on other machines, and if it is the
    same."""
    other = rival(device.accelerator)
    if other is None or not backend_of(plan.variant).runs_on(other):
        return None
    vendor, _, _ = efficiency.generation(device.match or device.name)
    if vendor != "amd":
        return None
    there = replace(device, accelerator=other)
    run = (plan.model, plan.variant, plan.settings)
    decode = speed.decode(there, *run).value / speed.decode(device, *run).value
    prompt = speed.prefill(there, *run).value / speed.prefill(device, *run).value
    if all(1 / _KERNELS_PAY < ratio < _KERNELS_PAY for ratio in (decode, prompt)):
        return None
    return (
        f"with a {KINDS[other].label} build instead of {KINDS[device.accelerator].label}: "
        f"answers {decode:.2f}× as fast, prompts {prompt:.2f}× as fast (predicted)"
    )


_DRAFT_PAYS = 1.25


def _draft_sentence(device: Device, plan: Plan, models: Sequence[Model]) -> str | None:
    """The gain of the listed draft model that pays most and still fits; None if none does."""
    known = {m.id: m for m in models}
    found: list[tuple[float, str, int]] = []
    for name in plan.model.drafts:
        if name not in known:
            continue
        pair = draft_pair(known[name], plan.variant)
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
    rough = partial(plan_for, device, model, workload=workload, overrides=overrides, rough=True)
    fitting: list[Plan] = []
    for group in _by_class(model, _small_enough(device, model, variants)):
        plans = [plan for plan in map(rough, group) if plan.fits != "no"]
        fast = [plan for plan in plans if not too_slow(plan, need)]
        if fast:
            best, chosen = _best_file(fast, need)
            return replace(finished(device, chosen, workload, overrides), score=best.score)
        fitting = fitting or plans
    if fitting:
        quickest = max(fitting, key=attrgetter("stream_tok_s", "variant.quant"))
        return Rejected(model, quickest.variant, why.is_too_slow(quickest, need), "speed")
    shown = typical(variants)
    return Rejected(model, shown, why.does_not_fit(rough(shown), device), "memory")


def _by_class(model: Model, variants: Sequence[Variant]) -> Iterator[list[Variant]]:
    """Listed files before constructed ones; poor ones last, for a machine on which no sound one
    fits, or is fast enough."""
    classes: dict[tuple[bool, bool], list[Variant]] = defaultdict(list)
    for variant in variants:
        classes[not _is_sound(model, variant), variant.is_estimate].append(variant)
    for kind in sorted(classes):
        # Eight bits lose nothing that anybody has measured: sixteen are twice the memory for
        # nothing.
        smaller = [v for v in classes[kind] if quality.bits(model, v) < _SIXTEEN_BITS]
        yield smaller or classes[kind]


def _best_file(plans: Sequence[Plan], need: Need) -> tuple[Plan, Plan]:
    """Of one model's plans that are fast enough, the best by score, which the model ranks by, and
    the one to run: of those near it the one that loses least to its format and keeps the purpose's
    good speed, else the best. Four bits and more, which lose little, go before fewer; and what
    leaves an agent's context room to grow before what does not."""
    best = max(plans, key=_worth)
    near = [
        p for p in plans if p.score >= best.score - _NEAR_POINTS and p.fits in ("yes", best.fits)
    ]
    near = [p for p in near if _loses_little(p)] or near
    near = [p for p in near if needs.context_can_grow(p, need)] or near
    kept = [p for p in near if p.stream_tok_s >= need.good_tok_s]
    if kept:
        return best, max(kept, key=lambda p: (p.quality, _worth(p)))
    return best, max(near, key=_worth)


def _worth(plan: Plan) -> tuple[float, int, str]:
    """What plans of one model are compared by: score, then memory, then the name."""
    return plan.score, -why.all_memory(plan), plan.variant.quant


def _loses_little(plan: Plan) -> bool:
    return quality.format_cost(plan.model, plan.variant) <= _LITTLE_LOST_POINTS


def variants_of(
    device: Device, model: Model, workload: Workload, *, overrides: Overrides = NOTHING_FIXED
) -> list[Plan]:
    """Every variant of one model that this machine's engines can read, whether or not it fits,
    smallest file first."""
    need = needs.need_of(workload)
    untrained = beyond_training(model, workload)
    plans = []
    for variant in _candidates(device, model, overrides):
        plan = plan_for(device, model, variant, workload, overrides=overrides)
        reason = why.of_variant(plan, device, need)
        plan = replace(plan, max_ctx=max_context(device, plan), why=reason)
        if untrained:
            plan = replace(plan, fits="no", why=untrained)
        plans.append(plan)
    return sorted(plans, key=attrgetter("variant.file_bytes", "variant.format", "variant.quant"))


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
        variants = _small_enough(device, model, _candidates(device, model, overrides))
        plans = [
            plan_for(device, model, variant, workload, overrides=overrides)
            for variant in variants
            if _is_sound(model, variant)
        ]
        whole = [p for p in plans if p.fits in ("yes", "tight") and not needs.too_long(p, need)]
        fast = [p for p in whole if p.decode_tok_s.value >= tok_s]
        if fast:
            best = max(fast, key=attrgetter("quality", "decode_tok_s.value"))
            found[device.match] = device, best
        elif whole:
            best = max(whole, key=attrgetter("decode_tok_s.value"))
            if nearest is None or best.decode_tok_s.value > nearest[1].decode_tok_s.value:
                nearest = device, best
    return Reach(tuple(found.values()), nearest)
