"""How wide a predicted speed's 80 % range is: as wide as held four in five of the measurements that
were left out of the fit in the same stratum.

A stratum of a family names what is known of the machine, its family and engine, dense or mixture,
and how deep: "seen: apple-max.metal MoE deep". If too few rows were left out there, the range is
that of the engine's stratum ("metal MoE"). benchmarks/planner_fit/ranges.py writes the widths
(efficiency.toml, `[*.width]`), and a table of the share that each holds
(benchmarks/planner_fit.md).

Less evidence and a deeper context never make a range narrower: `width_of` takes the widest of the
ranges that more evidence and a shallower context would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

# From so many tokens of context on attention is a part of a step that counts.
DEEP = 8_192
# ln of high ÷ predicted where nothing like it was ever measured.
NOTHING_KNOWN = 0.58
# What is known of a machine: rows of the part, of others of its family, or of other families alone.
SEEN = "seen"
UNSEEN_PART = "unseen part"
UNSEEN_KIND = "unseen kind"
# Families made for machine rooms: their kernels and memories are not as other cards' are, so that
# one without rows of its own is known as little as the first of them was.
MACHINE_ROOM = "machine room"
_MADE_FOR_ROOMS = ("nvidia-hbm.", "nvidia-b200.", "amd-cdna.", "amd-cdna3.")


def family(hardware_keys: Sequence[str]) -> str:
    """The narrowest key of a machine that others share: vendor and generation, or Apple's tier."""
    shared = [key for key in hardware_keys if not key.startswith("part:")]
    return next((key for key in reversed(shared) if "-" in key), shared[0])


def evidence(rows: Mapping[str, int], hardware_keys: Sequence[str]) -> str:
    """What is known of a machine, from how many rows there are by key: `SEEN`, `UNSEEN_PART` or
    `UNSEEN_KIND`; "" of an engine that nobody measured."""
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
    """Names of the strata that a prediction belongs to, the narrowest first: `known` is its
    `evidence`, `kind` "MoE" or "dense", `depth` tokens of context.

    A part that was measured is known at least as well as an unseen one of its family, so its
    family's strata follow. The strata of an engine are the same for each evidence."""
    engine = hardware_keys[0]
    shared = family(hardware_keys)
    if known != SEEN and shared.startswith(_MADE_FOR_ROOMS):
        return (MACHINE_ROOM,)
    groups = [engine]
    if known in (SEEN, UNSEEN_PART) and shared != engine:
        groups.insert(0, f"{UNSEEN_PART}: {shared}")
    if known == SEEN and shared != engine:
        groups.insert(0, f"{SEEN}: {shared}")
    side = "deep" if depth >= DEEP else "short"
    names = [f"{group}{more}" for group in groups for more in (f" {kind} {side}", f" {kind}", "")]
    return (*names, kind, known)


def width(widths: Mapping[str, float], names: Sequence[str]) -> float:
    """ln of an 80 % range's upper end ÷ the prediction, of the narrowest of `names` that is
    known."""
    return next((widths[name] for name in names if name in widths), NOTHING_KNOWN)


def bounds(
    known: str, hardware_keys: tuple[str, ...], kind: str, depth: int
) -> list[tuple[str, ...]]:
    """The strata of a prediction, and those that its range must not be narrower than: those of a
    short context, and of the same part if it were seen. (A machine of an unseen family has the
    strata of its engine, which are the same with more evidence.)"""
    found = [strata(known, hardware_keys, kind, tokens) for tokens in (depth, 0)]
    if known == UNSEEN_PART:
        found += [strata(SEEN, hardware_keys, kind, tokens) for tokens in (depth, 0)]
    return found


def width_of(
    widths: Mapping[str, float], known: str, hardware_keys: tuple[str, ...], kind: str, depth: int
) -> float:
    """ln of an 80 % range's upper end ÷ the prediction."""
    return max(width(widths, names) for names in bounds(known, hardware_keys, kind, depth))
