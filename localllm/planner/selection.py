"""Choose which of the fitting plans to show.

At most two plans of a family are shown, and one version of each size. A plan that another one
matches in every figure is not shown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache

from localllm.device.types import Device
from localllm.planner import decode_cost
from localllm.planner.explanations import all_memory
from localllm.planner.scoring import Need
from localllm.planner.types import Plan, backend_of
from localllm_catalog.types import Model, Variant

_PER_FAMILY = 2
# Differences smaller than the table's ranges: a share of speed, wait and memory; points of quality.
_SAME_SHARE = 0.02
_SAME_POINTS = 0.1
# Models of a family whose sizes differ by no more than this factor are versions of one.
_SAME_SIZE = 1.25

_VERSION = re.compile(r"-?\d+(?:\.\d+)*(?=-|$)")


def choose(
    ranked: Sequence[Plan], limit: int, complete: Callable[[Plan], Plan] | None = None
) -> tuple[list[Plan], list[tuple[Plan, str]]]:
    """Return at most `limit` of `ranked` (best first; 0 = all). Also return the others, each with
    the reason why it is not shown.

    `complete` adds the figures that a rough plan lacks, until `limit` plans are shown.
    """
    if not limit:
        return list(ranked), []
    shown: list[Plan] = []
    left: list[tuple[Plan, str]] = []
    for rough in ranked:
        plan = rough
        if complete is not None and len(shown) < limit:
            plan = complete(rough)
        reason = _not_shown(plan, shown, limit)
        if reason:
            left.append((plan, reason))
            continue
        matched = [other for other in shown if matches(plan, other, exactly=True)]
        left += [(other, _matched_by(plan)) for other in matched]
        position = shown.index(matched[0]) if matched else len(shown)
        shown.insert(position, plan)
        shown = [other for other in shown if other not in matched]
    return shown, left


def _not_shown(plan: Plan, shown: Sequence[Plan], limit: int) -> str:
    """Return why `plan` is not shown with the better ones, or "" if it is shown."""
    for other in shown:
        if matches(other, plan):
            return _matched_by(other)
    for other in shown:
        if is_version_of(other.model, plan.model):
            return f"fits; {other.model.name}, of the same family and size, ranks above it"
    line = family_line(plan.model.family)
    of_family = sum(family_line(p.model.family) == line for p in shown)
    if len(shown) == limit or of_family == _PER_FAMILY:
        return "fits, and ranks below the ones shown"
    return ""


def _matched_by(plan: Plan) -> str:
    return f"fits, and {plan.model.name} is at least as good, as fast and as small"


def family_line(family: str) -> str:
    """Return the family without its version. qwen3.5, qwen3.6 and qwen3.8 belong to one line;
    qwen3-coder and qwen2.5-coder belong to another."""
    return _VERSION.sub("", family)


def is_version_of(one: Model, other: Model) -> bool:
    """Return whether two models have the same line and about the same size, such as Qwen3.6-27B and
    Qwen3.8-27B."""
    if family_line(one.family) != family_line(other.family):
        return False
    sizes = ((one.params_total, other.params_total), (one.params_active, other.params_active))
    return all(max(pair) <= _SAME_SIZE * min(pair) for pair in sizes)


def at_least_older_scores(plans: Sequence[Plan]) -> list[Plan]:
    """Return `plans`, each with at least the score of the older models that it replaces.

    A small difference of an index between models of the same publisher and shape is noise, and
    users prefer the newer model.
    """
    alike: dict[object, list[Plan]] = defaultdict(list)
    for plan in plans:
        alike[_shape(plan.model)].append(plan)
    raised = []
    for plan in plans:
        replaced = [p.score for p in alike[_shape(plan.model)] if _replaces(plan, p)]
        raised.append(_with_score(plan, max([plan.score, *replaced])))
    return raised


# Points that a larger model of a family may lack against a smaller one and still count as much, and
# the same if its wait for a prompt is good.
_SIBLING_POINTS = 2.0
_SIBLING_POINTS_SOON = 4.5
# Share of the good speed that it must keep. Guides run a 9B on an M2 with 16 GB, at 17 tokens/s,
# and llama.vim's presets a 7B on a Radeon 890M, at 22.
_NEARLY_GOOD_SHARE = 0.85


def at_least_smaller_siblings(plans: Sequence[Plan], need: Need) -> list[Plan]:
    """Return `plans`, each with at least the score of the smaller models of its family that are a
    little above it only because they are faster.

    The plan must nearly keep the good speed of the purpose and fit with room. Then a larger model
    of the same training is what users run.
    """
    families: dict[str, list[Plan]] = defaultdict(list)
    for plan in plans:
        families[plan.model.family].append(plan)
    raised = []
    for plan in plans:
        family = families[plan.model.family]
        smaller = [p.score for p in family if _outgrows(plan, p, need)]
        is_soon = plan.later_ttft_s <= need.ttft_good_s
        most = plan.score + (_SIBLING_POINTS_SOON if is_soon else _SIBLING_POINTS)
        near_scores = [score for score in smaller if score <= most]
        raised.append(_with_score(plan, max([plan.score, *near_scores])))
    return raised


def _with_score(plan: Plan, score: float) -> Plan:
    return plan if score == plan.score else plan._replace(score=score)


def _outgrows(large: Plan, small: Plan, need: Need) -> bool:
    """Return whether `large` is a larger and better model than `small` of its family, and fast
    enough."""
    return (
        large.model.params_active > small.model.params_active
        and large.quality > small.quality
        and large.fits == "yes"
        and large.stream_tok_s >= _NEARLY_GOOD_SHARE * need.good_tok_s
        and _weaknesses(large) <= _weaknesses(small)
    )


def _replaces(new: Plan, old: Plan) -> bool:
    """Return whether `new` is a later model of the same line, shape and reasoning kind, rated with
    no more doubts."""
    return (
        new.model.release_date > old.model.release_date
        and _shape(new.model) == _shape(old.model)
        and _weaknesses(new) <= _weaknesses(old)
    )


@lru_cache(4096)
def _shape(model: Model) -> tuple[object, ...]:
    line = family_line(model.family)
    return line, model.params_total, model.params_active, model.reasoning_kind != "none"


def matches(one: Plan, other: Plan, *, exactly: bool = False) -> bool:
    """Return whether `one` is at least as good as `other` in all figures shown, and better in one.

    An unrated model never matches a rated one. A model rated by its maker alone never matches one
    rated by others. A constructed file never matches a listed one, and an older model never matches
    the one that replaces it. `exactly` also counts differences within the ranges.
    """
    weaknesses = zip(_weaknesses(one), _weaknesses(other), strict=True)
    if any(mine and not theirs for mine, theirs in weaknesses) or _replaces(other, one):
        return False
    share = 0.0 if exactly else _SAME_SHARE
    points = 0.0 if exactly else _SAME_POINTS
    costs = list(zip(_costs(one), _costs(other), strict=True))
    if one.quality < other.quality - points:
        return False
    if any(mine > theirs * (1 + share) for mine, theirs in costs):
        return False
    return one.quality > other.quality or any(mine < theirs for mine, theirs in costs)


def _weaknesses(plan: Plan) -> tuple[bool, ...]:
    return not plan.is_rated, plan.is_rated and plan.makers_own, plan.variant.is_estimate


def _costs(plan: Plan) -> tuple[float, ...]:
    """Return all figures that a table shows of a plan except its quality, where less is better."""
    return (
        1 / plan.stream_tok_s,
        plan.later_ttft_s,
        all_memory(plan),
        1 / plan.settings.n_ctx,
    )


# Two files whose sizes differ by more than this share are not equivalent choices.
_SAME_BITS = 0.25
# Within this factor the ranges overlap almost completely, so neither is called faster.
_MIN_NOTED_RATIO = 1.05


def nearest_of_other(plan: Plan, variants: Sequence[Variant]) -> Variant | None:
    """Return the variant of the other engine's `variants` with the file size nearest to the plan's.
    Returns None if it differs by more than 25 %."""
    size = plan.variant.file_bytes
    closest = sorted(variants, key=lambda v: (abs(v.file_bytes - size), v.quant))
    if closest and abs(closest[0].file_bytes / size - 1) <= _SAME_BITS:
        return closest[0]
    return None


def compare(device: Device, plan: Plan, other: Plan) -> str:
    """Return one sentence that compares the other engine's plan with this one and gives the reason.

    The reasons are the predicted bytes read, share of the bandwidth, and fixed time a token.
    """
    plan_tok_s = plan.decode_tok_s.value
    other_tok_s = other.decode_tok_s.value
    ratio = other_tok_s / plan_tok_s
    other_text = f"{backend_of(other.variant).label} ({other.variant.quant})"
    plan_text = f"{plan_tok_s:.3g} tok/s of {backend_of(plan.variant).label} ({plan.variant.quant})"
    if 1 / _MIN_NOTED_RATIO < ratio < _MIN_NOTED_RATIO:
        comparison = f"{other_text} is predicted as fast as the {plan_text}"
    elif ratio > 1:
        comparison = f"{other_text} is predicted faster: {other_tok_s:.3g} against the {plan_text}"
    else:
        comparison = f"{other_text} is predicted slower: {other_tok_s:.3g} against the {plan_text}"
    other_bytes, other_share, other_s = _parts(device, other)
    plan_bytes, plan_share, plan_s = _parts(device, plan)
    return (
        f"{comparison}; a token reads {other_bytes / 1e9:.3g} against {plan_bytes / 1e9:.3g} GB at "
        f"{other_share:.0%} against {plan_share:.0%} of the bandwidth, "
        f"and costs {other_s * 1e3:.1f} against {plan_s * 1e3:.1f} ms besides"
    )


def _parts(device: Device, plan: Plan) -> tuple[int, float, float]:
    """Return (bytes read, share of the bandwidth, fixed seconds) of one token with an empty
    context."""
    hardware = decode_cost.hardware_of(device, plan.backend)
    terms = decode_cost.decode_terms(plan.model, plan.variant, hardware)
    read = terms.streamed.total_bytes
    share = read / (hardware.bandwidth_gbps * 1e9 * terms.memory_s)
    return read, share, terms.total_s - terms.memory_s
