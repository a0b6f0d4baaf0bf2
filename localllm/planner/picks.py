"""Which of the plans that fit are shown: few of one family, one of each size whatever its version, and none that another
shown one matches in everything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from localllm.planner.types import Plan
from localllm.planner.why import all_memory
from localllm_catalog.types import Model

_PER_FAMILY = 2
# Differences that the ranges of the table swallow: of speed, wait and memory a share, of quality points.
_SAME_SHARE = 0.02
_SAME_POINTS = 0.1
# Models of a family within this of each other in size are versions of one.
_SAME_SIZE = 1.25
_VERSION = re.compile(r"-?\d+(?:\.\d+)*(?=-|$)")


@dataclass(frozen=True, slots=True)
class Left:
    """A plan that fits and is not shown, because of a shown one: one that is at least its match in everything, or another
    version of the same model. Neither where it ranks below them all."""

    plan: Plan
    matched_by: Plan | None = None
    version_of: Plan | None = None


def choose(ranked: Sequence[Plan], limit: int) -> tuple[list[Plan], list[Left]]:
    """At most `limit` of the plans, which come best first (0 = all of them), and the rest with the reason."""
    if not limit:
        return list(ranked), []
    shown: list[Plan] = []
    left: list[Left] = []
    for plan in ranked:
        better = next((p for p in shown if matches(p, plan)), None)
        version = next((p for p in shown if is_version_of(p.model, plan.model)), None)
        of_family = sum(line_of(p.model.family) == line_of(plan.model.family) for p in shown)
        if better is not None or version is not None or len(shown) == limit or of_family == _PER_FAMILY:
            left.append(Left(plan, better, version))
            continue
        outdone = [p for p in shown if matches(plan, p, exactly=True)]
        left += [Left(p, plan) for p in outdone]
        shown = [*(p for p in shown if p not in outdone), plan]
    return shown, left


def line_of(family: str) -> str:
    """The family without its version: qwen3.5, qwen3.6 and qwen3.8 are one line, qwen3-coder and qwen2.5-coder another."""
    return _VERSION.sub("", family)


def is_version_of(one: Model, other: Model) -> bool:
    """True for two models of one line and about one size: Qwen3.6-27B and Qwen3.8-27B."""
    if line_of(one.family) != line_of(other.family):
        return False
    sizes = ((one.params_total, other.params_total), (one.params_active, other.params_active))
    return all(max(pair) <= _SAME_SIZE * min(pair) for pair in sizes)


def matches(one: Plan, other: Plan, *, exactly: bool = False) -> bool:
    """True if `one` is no worse than `other` in anything that is shown, and better in something.

    What nobody has rated is no match for what somebody has, and a constructed file none for a listed one. `exactly`:
    a difference within what the ranges swallow counts too.
    """
    if (other.is_rated and not one.is_rated) or (one.variant.is_estimate and not other.variant.is_estimate):
        return False
    share, points = (0.0, 0.0) if exactly else (_SAME_SHARE, _SAME_POINTS)
    mine, theirs = _costs(one), _costs(other)
    no_worse = one.quality >= other.quality - points and all(
        a <= b * (1 + share) for a, b in zip(mine, theirs, strict=True)
    )
    return no_worse and (one.quality > other.quality or any(a < b for a, b in zip(mine, theirs, strict=True)))


def _costs(plan: Plan) -> tuple[float, ...]:
    """Everything a table shows of a plan but its quality, as figures of which less is better."""
    return (
        1 / plan.decode_tok_s.value,
        (plan.ttft_cached_s or plan.ttft_s).value,
        all_memory(plan),
        1 / plan.settings.n_ctx,
    )
