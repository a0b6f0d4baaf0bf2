"""How wide a predicted speed's 80 % range is: as wide as held four in five of what was left out of
the fit in the same stratum.

A stratum is named by what is known of the machine, its family and engine, dense or mixture, how
deep and how many sequences: "seen: apple-max.metal MoE deep". Where too few rows were left out
there, the next wider one speaks. benchmarks/planner_fit/ranges.py writes the widths
(efficiency.toml, `[*.width]`), and a table of how much each holds (benchmarks/planner_fit.md).
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
    if not rows.get(hardware_keys[0]):
        return ""
    if any(rows.get(key) for key in hardware_keys if key.startswith("part:")):
        return SEEN
    if rows.get(family(hardware_keys)):
        return UNSEEN_PART
    return UNSEEN_KIND


@lru_cache(maxsize=4096)
def strata(known: str, hardware_keys: tuple[str, ...], kind: str, depth: int) -> tuple[str, ...]:
    """Names of what a prediction belongs to, the narrowest first: `known` is its `evidence`, `kind`
    "MoE" or "dense", `depth` tokens of context."""
    if known != SEEN and family(hardware_keys).startswith(_MADE_FOR_ROOMS):
        return (MACHINE_ROOM,)
    where = "deep" if depth >= DEEP else "short"
    groups = [hardware_keys[0]]
    if known != UNSEEN_KIND:
        groups.insert(0, family(hardware_keys))
    narrow = [
        f"{known}: {group}{more}"
        for group in groups
        for more in (f" {kind} {where}", f" {kind}", "")
    ]
    return (*narrow, f"{known}: {kind}", known)


def width(widths: Mapping[str, float], names: Sequence[str]) -> float:
    """ln of an 80 % range's upper end ÷ the prediction, of the narrowest of `names` that is
    known."""
    return next((widths[name] for name in names if name in widths), NOTHING_KNOWN)
