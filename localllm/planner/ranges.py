"""Width of a predicted speed's 80 % range. The range contains 80 % of the held-out measurements of
the same stratum.

A stratum combines the evidence about the machine, its family and engine, dense or MoE, and the
depth. An example is "seen: apple-max.metal MoE deep". If a stratum has too few held-out
measurements, the stratum of the engine is used ("metal MoE"). benchmarks/planner_fit/ranges.py
writes the widths (efficiency.json, `width`). It also writes a table with the coverage of each
(benchmarks/planner_fit.md).

Less evidence or a deeper context never makes a range narrower. `width_of` takes the widest range
among those for more evidence and a shallower context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

# From this context length on, attention is a substantial part of a step.
DEEP = 8_192
# ln of high ÷ predicted if no similar machine was measured.
UNMEASURED_WIDTH = 0.58
# Evidence about a machine: measurements of the part, of other parts of its family only, or of other
# families only.
SEEN = "seen"
UNSEEN_PART = "unseen part"
UNSEEN_KIND = "unseen kind"
# Data centre families. Their kernels and memories differ from those of other cards. A part without
# measurements is as uncertain as the first of its family was.
DATA_CENTER = "data center"
_DATA_CENTER_FAMILIES = ("nvidia-hbm.", "nvidia-b200.", "amd-cdna.", "amd-cdna3.")


def family(hardware_keys: Sequence[str]) -> str:
    """Return the narrowest key that a machine shares with others: vendor and generation, or Apple's
    tier."""
    shared = [key for key in hardware_keys if not key.startswith("part:")]
    return next((key for key in reversed(shared) if "-" in key), shared[0])


def evidence(rows: Mapping[str, int], hardware_keys: Sequence[str]) -> str:
    """Return the evidence about a machine, from the number of rows by key.

    It is `SEEN`, `UNSEEN_PART` or `UNSEEN_KIND`, or "" for an engine without measurements.
    """
    engine = hardware_keys[0]
    if not rows.get(engine):
        return ""
    if any(rows.get(key) for key in hardware_keys if key.startswith("part:")):
        return SEEN
    shared = family(hardware_keys)
    if shared != engine and rows.get(shared):
        return UNSEEN_PART
    return UNSEEN_KIND


@lru_cache(maxsize=4096)
def strata(known: str, hardware_keys: tuple[str, ...], kind: str, depth: int) -> tuple[str, ...]:
    """Return the names of a prediction's strata, narrowest first.

    `known` is the machine's `evidence`, `kind` is "MoE" or "dense", and `depth` is in tokens of
    context. A measured part is known at least as well as an unmeasured one of its family, so its
    family's strata follow. The strata of an engine are the same for all evidence.
    """
    engine = hardware_keys[0]
    shared = family(hardware_keys)
    if known != SEEN and shared.startswith(_DATA_CENTER_FAMILIES):
        return (DATA_CENTER,)
    groups = [engine]
    if known in (SEEN, UNSEEN_PART) and shared != engine:
        groups.insert(0, f"{UNSEEN_PART}: {shared}")
    if known == SEEN and shared != engine:
        groups.insert(0, f"{SEEN}: {shared}")
    side = "deep" if depth >= DEEP else "short"
    names = [f"{group}{more}" for group in groups for more in (f" {kind} {side}", f" {kind}", "")]
    return (*names, kind, known)


def width(widths: Mapping[str, float], names: Sequence[str]) -> float:
    """Return ln of an 80 % range's upper end ÷ the prediction, for the first of `names` that has a
    width."""
    return next((widths[name] for name in names if name in widths), UNMEASURED_WIDTH)


def bounds(
    known: str, hardware_keys: tuple[str, ...], kind: str, depth: int
) -> list[tuple[str, ...]]:
    """Return the strata of a prediction, and those that its range must not be narrower than.

    The latter are those of a short context, and of the same part if it were measured. A machine of
    an unmeasured family has the strata of its engine. They do not depend on the evidence.
    """
    strata_of_bounds = [strata(known, hardware_keys, kind, tokens) for tokens in (depth, 0)]
    if known == UNSEEN_PART:
        strata_of_bounds += [strata(SEEN, hardware_keys, kind, tokens) for tokens in (depth, 0)]
    return strata_of_bounds


def width_of(
    widths: Mapping[str, float], known: str, hardware_keys: tuple[str, ...], kind: str, depth: int
) -> float:
    """Return ln of an 80 % range's upper end ÷ the prediction."""
    return max(width(widths, names) for names in bounds(known, hardware_keys, kind, depth))
