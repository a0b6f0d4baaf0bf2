"""The widths of the 80 % ranges, from what was left out of the fit alone.

Every recent row is predicted three times: by a fit that saw none of its source, none of its source
and its device, none of its source and its family of devices. Each is an error of one stratum
(localllm/planner/ranges.py), and a stratum is as wide as holds four in five of its own errors
(conformal prediction by strata: Vovk et al. 2003). A stratum of few rows or of one source hands
them to the next wider one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.planner_fit.fit import Design, Fit
from benchmarks.planner_fit.rows import RECENT, Row
from localllm.planner import ranges

SHARE = 0.8
# A stratum's width is held near the next wider one's, as far as a share between these of its own
# is inside.
LEAST, MOST = 0.76, 0.84
# Sources whose word of a stratum is worth as much as the next wider one's.
_SOURCES = 3.0
FEWEST = 15
# What the first card for machine rooms was off before a row of its kind was in the fit (an H200: a
# mixture 1.73 times as fast as said, prompts a quarter as fast), which others are not known to be
# better than.
FIRST_OF_ITS_KIND = {"decode": 0.55, "prefill": 1.36, "batched": 0.75}


@dataclass(frozen=True)
class Miss:
    """How far a row that was not seen is off, ln (predicted ÷ measured), and the strata it was
    predicted in, the narrowest first."""

    error: float
    source: str
    strata: tuple[str, ...]


HeldWith = Callable[[Row, Row], bool]
# By what is known of the machine then: what is left out with a row beside its source.
HELD: dict[str, HeldWith] = {
    ranges.SEEN: lambda _row, _other: False,
    ranges.UNSEEN_PART: lambda row, other: row.device == other.device,
    ranges.UNSEEN_KIND: lambda row, other: (
        row.device == other.device or ranges.family(row.keys) == ranges.family(other.keys)
    ),
}


def hardware_keys(row: Row) -> tuple[str, ...]:
    """The keys of where a row ran."""
    return tuple(key for key in row.keys if not key.startswith("quant:"))


def known(rows: Iterable[Row]) -> Counter[str]:
    """Rows by the key of where they ran."""
    return Counter(key for row in rows for key in hardware_keys(row))


def missed(row: Row, error: float, learnt: Mapping[str, int]) -> Miss:
    """The miss of a row whose prediction is `error` off (÷ measured − 1), by the rows that were
    learnt."""
    keys = hardware_keys(row)
    kind = "MoE" if row.moe else "dense"
    names = ranges.strata(ranges.evidence(learnt, keys), keys, kind, row.depth)
    return Miss(math.log1p(error), row.source, names)


def misses(design: Design) -> list[Miss]:
    """Every recent row in every state of knowledge that it can be left in."""
    data = design.data
    learn = [i for i, row in enumerate(data) if not row.suspect]
    whole = Fit(design, learn).theta
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i in learn:
        if data[i].era in RECENT:
            groups[data[i].source, data[i].device].append(i)
    fits: dict[frozenset[int], Fit] = {}
    found = []
    for members in groups.values():
        one = data[members[0]]
        for state, held_with in HELD.items():
            rest = [
                i for i in learn if data[i].source != one.source and not held_with(one, data[i])
            ]
            learnt = known(data[i] for i in rest)
            if ranges.evidence(learnt, hardware_keys(one)) != state:
                continue
            fit = fits.setdefault(frozenset(rest), Fit(design, rest, near=whole, passes=6))
            errors = fit.errors(members)
            found += [
                missed(data[i], float(e), learnt) for i, e in zip(members, errors, strict=True)
            ]
    return found


@dataclass(frozen=True)
class Stratum:
    """A stratum with a width of its own (ln), and the errors (ln, absolute) it is from."""

    name: str
    width: float
    off: tuple[float, ...]
    n_sources: int

    @property
    def inside(self) -> float:
        """Share of its errors that the width holds."""
        return float(np.mean(np.array(self.off) <= self.width))

    @property
    def holding(self) -> float:
        """The width that would hold just four in five of them."""
        return quantile(self.off, SHARE)


def quantile(off: Sequence[float], share: float) -> float:
    """The least of `off` that at least `share` of them do not exceed."""
    return sorted(off)[math.ceil(share * len(off)) - 1]


def strata(found: Sequence[Miss]) -> list[Stratum]:
    """A partition of the misses into strata, the widest first: each with a width of its own, held
    near that of the strata around it as far as it still holds what it should."""
    depth = max(len(miss.strata) for miss in found)
    left, kept = list(found), list[tuple[str, list[Miss]]]()
    for level in range(depth):
        groups: dict[str, list[Miss]] = defaultdict(list)
        for miss in left:
            groups[miss.strata[min(level, len(miss.strata) - 1)]].append(miss)
        enough = {
            name
            for name, of in groups.items()
            if len(of) >= FEWEST and len({miss.source for miss in of}) > 1
        }
        kept += [(name, of) for name, of in groups.items() if name in enough]
        left = [m for name, of in groups.items() if name not in enough for m in of]
    named = {name for name, _ in kept}
    for state in {miss.strata[-1] for miss in left} - named:
        kept.append((state, [miss for miss in found if miss.strata[-1] == state]))
    return [_stratum(name, of, found) for name, of in sorted(kept, key=lambda pair: pair[0])]


def _stratum(name: str, members: Sequence[Miss], found: Sequence[Miss]) -> Stratum:
    off = tuple(abs(miss.error) for miss in members)
    n_sources = len({miss.source for miss in members})
    around = members[0].strata[members[0].strata.index(name) :][:2][-1]
    wider = [abs(miss.error) for miss in found if around in miss.strata]
    own, beside = math.log(quantile(off, SHARE)), math.log(quantile(wider, SHARE))
    near = math.exp((n_sources * own + _SOURCES * beside) / (n_sources + _SOURCES))
    least = quantile(off, LEAST)
    most = sorted(off)[math.floor(MOST * len(off)) - 1]
    width = max(least, min(near, most))
    return Stratum(name, width, off, n_sources)


def report(law: str, found: Sequence[Miss]) -> tuple[list[str], dict[str, float]]:
    """(The table of a law's strata as Markdown, widths for efficiency.toml)."""
    kept = [s for s in strata(found) if s.name != ranges.MACHINE_ROOM]
    lines = [
        "| stratum | left out | sources | inside % | range × ÷ | what would hold 80 % |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {s.name} | {len(s.off)} | {s.n_sources} | {100 * s.inside:.0f} | "
        f"{math.exp(s.width):.2f} | {math.exp(s.holding):.2f} |"
        for s in kept
    ]
    lines.append("")
    widths = {s.name: round(s.width, 3) for s in kept}
    return lines, widths | {ranges.MACHINE_ROOM: FIRST_OF_ITS_KIND[law]}
