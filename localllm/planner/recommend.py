"""Rank Plans for a Device, the models and a Workload: each variant × KV type × offload, at most
eight picks.

Pure and deterministic: the same inputs give the same Plans in the same order. Plans are ranked by
points on the quality index (localllm/planner/quality.py). Points are the model's rating, less the
cost of format and KV type, less the cost of a speed below the purpose's good speed. Spare speed
adds a little.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from localllm.device.accelerators import KINDS, rival_kind
from localllm.device.types import Device
from localllm.formatting import gb, mb
from localllm.planner import (
    drafting,
    efficiency,
    explanations,
    layer_bytes,
    memory,
    quality,
    scoring,
    selection,
    speed,
)
from localllm.planner.placement_search import verdict
from localllm.planner.plan import finished, max_context, plan_for
from localllm.planner.scoring import Need
from localllm.planner.starting_settings import NO_OVERRIDES, Overrides, draft_pair, typical
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
_MAX_LOST_POINTS = 3.0
# A file whose score is within this many points of its model's best is preferred if it loses less to
# its format.
_CLOSE_POINTS = 2.0
# Files whose points differ by less answer alike: the faster one is preferred if it drafts.
_SAME_QUALITY_POINTS = 0.5
# The most points that a format may lose and still count as losing little. Four bits stay below it
# for models of 4 billion weights and more. For such models users do not go below four bits for
# speed.
_SMALL_LOSS_POINTS = 1.0
# Files with more bits a weight than this are 16-bit: BF16, F16.
_SIXTEEN_BITS = 12.0


def backends_of(device: Device) -> tuple[str, ...]:
    """Return the engines that support this kind of machine."""
    return tuple(d.name for d in registry.declarations() if d.runs_on(device.accelerator))


def _candidates(device: Device, model: Model, overrides: Overrides) -> list[Variant]:
    engines = set(backends_of(device))
    if overrides.backends:
        engines &= set(overrides.backends)
    found = [v for v in model.variants if backend_of(v).name in engines and v.file_bytes > 0]
    if model.id in dict(overrides.too_new):
        # Folders are of MLX, which does not depend on llama.cpp.
        found = [v for v in found if v.is_folder]
    return found


def _small_enough(device: Device, model: Model, variants: Sequence[Variant]) -> list[Variant]:
    usable_bytes = device.usable_bytes
    if device.host and device.kind == "discrete":
        usable_bytes += device.host.limit_bytes
    return [
        v
        for v in variants
        if v.file_bytes - layer_bytes.disk_bytes(model, v, USUAL) <= usable_bytes
    ]


def _is_sound(model: Model, variant: Variant) -> bool:
    """Return False if the format loses more than 3 points.

    The next smaller model then uses the memory better. Such a file ranks below all sound ones of
    any model. The loss of two-bit formats was measured on text, and is larger in long thinking and
    tool calls.
    """
    return quality.format_cost(model, variant) <= _MAX_LOST_POINTS


def recommend(
    device: Device,
    models: Iterable[Model],
    workload: Workload,
    *,
    overrides: Overrides = NO_OVERRIDES,
    limit: int = MAX_PICKS,
    on_plan: Callable[[Plan], object] | None = None,
    detailed: bool = True,
) -> Recommendation:
    """Return at most `limit` Plans (0 = all that fit) for `workload` on `device`, best first, and
    the reason against each other model.

    `on_plan` gets each model's own best plan as soon as it is found, unranked. If `detailed`, the
    picks have their longest context and all reasons (`detailed_plan`). At most two picks
    are from one family, with different sizes, so that one maker cannot fill all eight. No pick is
    matched by another one in all figures (localllm/planner/selection.py).

    Ranks need rough plans only. If the answer shows few plans without details, only those are
    completed, and `on_plan` gets rough ones.
    """
    everything = list(models)
    need = scoring.need_of(workload)
    best: list[Plan] = []
    rejected: list[Rejected] = []
    complete = partial(_completed, device, workload=workload, overrides=overrides)
    completes_all = detailed or not limit
    for model in everything:
        outcome = _best_of(device, model, workload, need, overrides)
        if isinstance(outcome, Plan):
            outcome = complete(outcome) if completes_all else outcome
            best.append(outcome)
            if on_plan is not None:
                on_plan(outcome)
        elif outcome is not None:
            rejected.append(outcome)
    best = selection.at_least_older_scores(best)
    best = selection.at_least_smaller_siblings(best, need)
    largest = attrgetter("model.params_active", "model.release_date", "model.id")
    best.sort(key=largest, reverse=True)
    best.sort(key=_rank)
    late = None if completes_all else complete
    shown, left = selection.choose(_reliable_first(best), limit, late)
    for plan, reason in left:
        rejected.append(_not_shown(device, plan, reason, workload, overrides))
    rejected.sort(key=lambda r: (-quality.rate(r.model, workload.purpose).points, r.model.id))
    picks = explanations.with_reasons(shown, need)
    if detailed:
        picks = [detailed_plan(device, plan, everything, workload, overrides) for plan in picks]
    return Recommendation(tuple(picks), tuple(rejected), workload)


def _completed(device: Device, plan: Plan, *, workload: Workload, overrides: Overrides) -> Plan:
    """Return `plan` with the figures that its rank does not need. Its score stays."""
    return finished(device, plan, workload, overrides)._replace(score=plan.score)


def _rank(plan: Plan) -> tuple[bool, float]:
    """Sort key: sound files before poor ones, then the best score first."""
    return not _is_sound(plan.model, plan.variant), -plan.score


def _is_reliable(plan: Plan) -> bool:
    """Return whether the model has a rating, and its files are listed and lose little to their
    format. A plan without points left is never sure."""
    if min(plan.quality, plan.score) < 0 or not plan.is_rated or plan.variant.is_estimate:
        return False
    return _is_sound(plan.model, plan.variant)


def _reliable_first(ranked: list[Plan]) -> list[Plan]:
    """Return `ranked` with the first sure plan moved to the front.

    A sure plan rated by others than its maker is preferred. If no plan is sure, a listed file with
    points left comes first.
    """
    reliable = [plan for plan in ranked if _is_reliable(plan)]
    if not reliable:
        reliable = [plan for plan in ranked if plan.score >= 0 and not plan.variant.is_estimate]
    if not reliable:
        return ranked
    first = next((plan for plan in reliable if not plan.makers_own), reliable[0])
    return [first, *(plan for plan in ranked if plan is not first)]


def _not_shown(
    device: Device, plan: Plan, reason: str, workload: Workload, overrides: Overrides
) -> Rejected:
    """Return why a plan that fits is not among the picks: the `reason`, or that the model fits only
    in a small format."""
    usual = typical(_candidates(device, plan.model, overrides))
    if usual.file_bytes > plan.variant.file_bytes:
        typical_plan = plan_for(
            device, plan.model, usual, workload, overrides=overrides, rough=True
        )
        if typical_plan.fits == "no":
            reason = (
                f"{explanations.does_not_fit_text(typical_plan, device)}; "
                f"{plan.variant.quant} would fit"
            )
            return Rejected(plan.model, usual, reason, "memory")
    return Rejected(plan.model, plan.variant, reason, "ranking")


def detailed_plan(
    device: Device,
    plan: Plan,
    models: Sequence[Model],
    workload: Workload,
    overrides: Overrides = NO_OVERRIDES,
) -> Plan:
    """Return `plan` with its longest context and more reasons.

    The reasons include data on disk, the speed of the other engine, and a draft model if one would
    pay.
    """
    longest = max_context(device, plan)
    more = mb(plan.kv_bytes_per_1k)
    reasons: list[str | None] = [
        f"up to {longest:,} tokens of context fit; each further 1,024 tokens cost {more}"
    ]
    predicted = speed.decode(device, plan.model, plan.variant, plan.settings)
    reasons.append(explanations.disk_note(plan, predicted.value))
    if "measured" not in plan.decode_tok_s.basis:
        reasons.append(efficiency.power_limit_note(device))
    reasons.append(scoring.sentence(plan, scoring.need_of(workload)))
    other = _other_engine(device, plan, workload, overrides)
    if other is not None:
        reasons.append(selection.compare(device, plan, other))
    reasons += [
        _other_kernels(device, plan),
        _draft_sentence(device, plan, models),
        drafting.heads_sentence(device, plan),
        drafting.edit_sentence(device, plan),
        drafting.companions_sentence(plan),
    ]
    return plan._replace(max_ctx=longest, reasons=tuple(filter(None, reasons)))


def _other_engine(
    device: Device, plan: Plan, workload: Workload, overrides: Overrides
) -> Plan | None:
    """Return the plan of the same model on the machine's other engine, if it fits. Its files have
    about the same size."""
    others = [
        v for v in _candidates(device, plan.model, overrides) if backend_of(v).name != plan.backend
    ]
    variant = selection.nearest_of_other(plan, others)
    if variant is None:
        return None
    other = plan_for(device, plan.model, variant, workload, overrides=overrides)
    if other.fits != "no":
        return other
    return None


# A smaller difference between ROCm and Vulkan is not worth another build.
_KERNELS_PAY = 1.05


def _other_kernels(device: Device, plan: Plan) -> str | None:
    """Return the speed of llama.cpp's other build on a Radeon. Returns None on other machines, or
    if the speed is the same."""
    other = rival_kind(device.accelerator)
    if other is None or not backend_of(plan.variant).runs_on(other):
        return None
    vendor, _, _ = efficiency.generation(device.match or device.name)
    if vendor != "amd":
        return None
    other_device = replace(device, accelerator=other)
    run = (plan.model, plan.variant, plan.settings)
    decode = speed.decode(other_device, *run).value / speed.decode(device, *run).value
    prompt = speed.prefill(other_device, *run).value / speed.prefill(device, *run).value
    if all(1 / _KERNELS_PAY < ratio < _KERNELS_PAY for ratio in (decode, prompt)):
        return None
    return (
        f"with a {KINDS[other].label} build instead of {KINDS[device.accelerator].label}: decode "
        f"{decode:.2f}× as fast, prefill {prompt:.2f}× as fast (predicted)"
    )


_DRAFT_PAYS = 1.25


def _draft_sentence(device: Device, plan: Plan, models: Sequence[Model]) -> str | None:
    """Return the gain of the listed draft model that pays most and still fits, or None."""
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
    """Return the warning for a context longer than `model` was trained for, else ""."""
    if not model.native_context or workload.context <= model.native_context:
        return ""
    return f"trained for {model.native_context:,} tokens, {workload.context:,} requested"


# Purposes whose answers cannot be checked at a glance.
_DEMANDING = ("coding", "long")


def _too_weak(model: Model, workload: Workload) -> str | None:
    """Return why `model` is rated too low for this purpose, or None."""
    if workload.purpose not in _DEMANDING:
        return None
    points = quality.rate(model, workload.purpose).points
    if points >= 0:
        return None
    return f"is rated too low for this purpose ({points:.0f} points)"


def _best_of(
    device: Device, model: Model, workload: Workload, need: Need, overrides: Overrides
) -> Plan | Rejected | None:
    variants = _candidates(device, model, overrides)
    if not variants:
        reason = dict(overrides.too_new).get(model.id)
        if reason is None or not model.variants:
            return None
        return Rejected(model, typical(model.variants), reason, "engine")
    smallest = min(variants, key=lambda v: (v.file_bytes, v.quant))
    unsuited = scoring.unsuited(model, workload) or _too_weak(model, workload)
    if unsuited is not None:
        return Rejected(model, smallest, unsuited, "purpose")
    untrained = beyond_training(model, workload)
    if untrained:
        return Rejected(model, smallest, untrained, "context")
    rough = partial(plan_for, device, model, workload=workload, overrides=overrides, rough=True)
    fitting: list[Plan] = []
    for group in _by_class(model, _small_enough(device, model, variants)):
        plans = [plan for plan in map(rough, group) if plan.fits != "no"]
        fast = [plan for plan in plans if not scoring.too_slow(plan, need)]
        if fast:
            best, chosen = _best_file(fast, need)
            return chosen._replace(score=best.score)
        fitting = fitting or plans
    if fitting:
        quickest = max(fitting, key=attrgetter("stream_tok_s", "variant.quant"))
        return Rejected(
            model, quickest.variant, explanations.too_slow_text(quickest, need), "speed"
        )
    shown = typical(variants)
    return Rejected(model, shown, explanations.does_not_fit_text(rough(shown), device), "memory")


def _by_class(model: Model, variants: Sequence[Variant]) -> Iterator[list[Variant]]:
    """Yield listed files before constructed ones. Poor files come last, for machines on which no
    sound file fits or is fast enough."""
    classes: dict[tuple[bool, bool], list[Variant]] = defaultdict(list)
    for variant in variants:
        classes[not _is_sound(model, variant), variant.is_estimate].append(variant)
    for kind in sorted(classes):
        # No measurement shows a loss with eight bits, so sixteen bits would double the memory
        # without a gain.
        smaller = [v for v in classes[kind] if quality.bits(model, v) < _SIXTEEN_BITS]
        yield smaller or classes[kind]


def _best_file(plans: Sequence[Plan], need: Need) -> tuple[Plan, Plan]:
    """Return (the best plan by score, the plan to run) for one model's plans that are fast enough.

    The model ranks by the first. The plan to run is near it in score, loses least to its format,
    and keeps the purpose's good speed; else it is the best. Formats that lose little (four bits and
    more) come first. Then come plans that leave room for an agent's context to grow.
    """
    best = max(plans, key=_sort_key)
    near_misses = [
        p for p in plans if p.score >= best.score - _CLOSE_POINTS and p.fits in ("yes", best.fits)
    ]
    near_misses = [p for p in near_misses if _loses_little(p)] or near_misses
    near_misses = [p for p in near_misses if scoring.context_can_grow(p, need)] or near_misses
    kept = [p for p in near_misses if p.stream_tok_s >= need.good_tok_s]
    if not kept:
        return best, max(near_misses, key=_sort_key)
    largest = max(kept, key=_by_quality)
    drafting = [p for p in kept if _drafts_more(p, largest)]
    return best, max(drafting, key=_by_quality, default=largest)


def _by_quality(plan: Plan) -> tuple[float, tuple[float, int, str]]:
    return plan.quality, _sort_key(plan)


def _drafts_more(plan: Plan, other: Plan) -> bool:
    """Return whether `plan` loses few points to `other` and drafting makes it much faster."""
    if plan.drafting is None or plan.quality < other.quality - _SAME_QUALITY_POINTS:
        return False
    gained = 1.0 if other.drafting is None else other.drafting.value
    return plan.drafting.value >= _DRAFT_PAYS * gained


def _sort_key(plan: Plan) -> tuple[float, int, str]:
    """Return the sort key for plans of one model: score, then memory, then name."""
    return plan.score, -explanations.all_memory(plan), plan.variant.quant


def _loses_little(plan: Plan) -> bool:
    return quality.format_cost(plan.model, plan.variant) <= _SMALL_LOSS_POINTS


def variants_of(
    device: Device, model: Model, workload: Workload, *, overrides: Overrides = NO_OVERRIDES
) -> list[Plan]:
    """Return the plans of all variants of a model that this machine's engines can read, smallest
    file first. Plans that do not fit are included."""
    need = scoring.need_of(workload)
    untrained = beyond_training(model, workload)
    plans = []
    for variant in _candidates(device, model, overrides):
        plan = plan_for(device, model, variant, workload, overrides=overrides)
        reason = explanations.variant_verdict(plan, device, need)
        plan = plan._replace(max_ctx=max_context(device, plan), why=reason)
        if untrained:
            plan = plan._replace(fits="no", why=untrained)
        plans.append(plan)
    return sorted(plans, key=attrgetter("variant.file_bytes", "variant.format", "variant.quant"))


class Reach(NamedTuple):
    """The machines that run a model at a given speed.

    `found` has them with the slowest memory first, each with the best plan that is fast enough.
    `nearest` is the fastest machine that holds the model but is too slow (None: no such machine).
    """

    found: tuple[tuple[Device, Plan], ...]
    nearest: tuple[Device, Plan] | None


def reaching(
    devices: Iterable[Device],
    model: Model,
    workload: Workload,
    tok_s: float,
    *,
    overrides: Overrides = NO_OVERRIDES,
) -> Reach:
    """Return which of `devices` decode `model` at `tok_s` or more, with its best format of at least
    that speed.

    Formats that lose more quality than a smaller model are not considered. Neither are plans whose
    prompt takes too long.
    """
    need = scoring.need_of(workload)
    found: dict[str, tuple[Device, Plan]] = {}
    nearest: tuple[Device, Plan] | None = None
    for device in sorted(devices, key=lambda d: (d.bandwidth_gbps.value, d.usable_bytes, d.name)):
        if device.match in found:
            continue
        variants = _small_enough(device, model, _candidates(device, model, overrides))
        plans = [
            plan_for(device, model, variant, workload, overrides=overrides)
            for variant in variants
            if _is_sound(model, variant)
        ]
        typical_plan = [
            p for p in plans if p.fits in ("yes", "tight") and not scoring.too_long(p, need)
        ]
        fast = [p for p in typical_plan if p.decode_tok_s.value >= tok_s]
        if fast:
            best = max(fast, key=attrgetter("quality", "decode_tok_s.value"))
            found[device.match] = device, best
        elif typical_plan:
            best = max(typical_plan, key=attrgetter("decode_tok_s.value"))
            if nearest is None or best.decode_tok_s.value > nearest[1].decode_tok_s.value:
                nearest = device, best
    return Reach(tuple(found.values()), nearest)
