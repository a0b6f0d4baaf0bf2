"""The widths of the 80 % ranges, from what was left out of the fit alone.

Every recent row is predicted three times: by a fit that saw none of its source, none of its source
and its device, none of its source and its family of devices. Each is an error of one stratum
(localllm/planner/ranges.py), and a stratum is as wide as holds four in five of its own errors
(conformal prediction by strata: Vovk et al. 2003). A stratum of few rows or of one source hands
them to the next wider one. A family or engine is divided by depth only if both sides have enough
rows and the deeper one is the wider one. If a family's unseen parts have the narrower range, they
share one width with the seen ones (pooled adjacent violators: Barlow et al. 1972). A row counts less the more rows its source has in
the stratum: they miss alike, and a new report is another source.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.planner_fit.fit import Design, Fit, Floats
from benchmarks.planner_fit.rows import RECENT, Row
from localllm.planner import ranges

SHARE = 0.8
# A stratum's width is held near the next wider one's, as far as a share between these of its own
# is inside.
LEAST, MOST = 0.76, 0.84
# Power of the number of a source's rows in a stratum that each of them counts less by. Chosen by the
# share inside of rows and of sources: both are near four in five.
_ONE_SOURCE = 0.5
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
    predicted in, the narrowest first. Its range may not be narrower than those of `bounds`."""

    error: float
    source: str
    strata: tuple[str, ...]
    bounds: tuple[tuple[str, ...], ...] = ()

    def is_inside(self, widths: Mapping[str, float]) -> bool:
        """Whether the range that `widths` state holds the error."""
        stated = max(ranges.width(widths, names) for names in (self.strata, *self.bounds))
        return abs(self.error) <= stated


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
    bounds = ranges.bounds(ranges.evidence(learnt, keys), keys, kind, row.depth)
    return Miss(math.log1p(error), row.source, bounds[0], tuple(bounds[1:]))


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
    """Strata with one width (ln), and what was missed in them, by a number of sources."""

    names: tuple[str, ...]
    width: float
    members: tuple[Miss, ...]
    n_sources: int

    @property
    def off(self) -> tuple[float, ...]:
        """The absolute errors (ln)."""
        return tuple(abs(miss.error) for miss in self.members)

    @property
    def inside(self) -> float:
        """Share of its errors that the width holds, weighed by source."""
        return _share_inside(self.members, self.width)

    @property
    def holding(self) -> float:
        """The width that would hold just four in five of them."""
        return quantile(self.members, SHARE)


def _ordered(members: Sequence[Miss]) -> tuple[Floats, Floats]:
    """The absolute errors in order, and the share of the members, weighed by source, up to each."""
    n_rows = Counter(miss.source for miss in members)
    off = np.array([abs(miss.error) for miss in members])
    weights = np.array([n_rows[miss.source] ** -_ONE_SOURCE for miss in members])
    order = np.argsort(off, kind="stable")
    upto = np.cumsum(weights[order])
    return off[order], upto / upto[-1]


def quantile(members: Sequence[Miss], share: float) -> float:
    """The least absolute error that at least `share` of the members do not exceed."""
    off, upto = _ordered(members)
    return float(off[min(int(np.searchsorted(upto, share - 1e-9)), len(off) - 1)])


def _share_inside(members: Sequence[Miss], width: float) -> float:
    off, upto = _ordered(members)
    n_inside = int(np.searchsorted(off, width, side="right"))
    return float(upto[n_inside - 1]) if n_inside else 0.0


Groups = dict[str, list[Miss]]


def strata(found: Sequence[Miss]) -> list[Stratum]:
    """A partition of the misses into strata, each with a width of its own, held near that of the
    next wider one as far as it still holds what it should."""
    groups = _partition(found)
    pools = {name: Stratum((name,), *_width(name, of, found)) for name, of in groups.items()}
    while True:
        wrong = [
            (pools[less].width - pools[more].width, less, more)
            for less, more in _in_order(groups)
            if pools[less].width > pools[more].width
        ]
        if not wrong:
            break
        _, less, more = max(wrong)
        pooled = _pooled(pools[less], pools[more])
        pools.update(dict.fromkeys(pooled.names, pooled))
    return [pool for name, pool in sorted(pools.items()) if name == pool.names[0]]


def _partition(found: Sequence[Miss]) -> Groups:
    """The misses by the narrowest of their strata that has enough of them. What is left over is
    predicted by the widest stratum, whose width is that of everything in it."""
    left = list(found)
    kept: Groups = {}
    for level in range(max(len(miss.strata) for miss in found)):
        groups: Groups = defaultdict(list)
        for miss in left:
            name = miss.strata[min(level, len(miss.strata) - 1)]
            groups[_whole(name) if _whole(name) in kept else name].append(miss)
        left = []
        for name, of in groups.items():
            if name in kept:
                kept[name] += of
            elif _is_enough(name, groups):
                kept[name] = of
            else:
                left += of
    for widest in {miss.strata[-1] for miss in left} - set(kept):
        kept[widest] = [miss for miss in found if miss.strata[-1] == widest]
    return kept


def _is_enough(name: str, groups: Groups) -> bool:
    """Whether a stratum has rows and sources enough for a width of its own. One side of a depth
    has, if the other does too, and the deeper one is no narrower: for what is known less well of a
    machine as for the rest."""
    whole = _whole(name)
    if whole == name:
        return _has_enough(groups[name])
    _, _, shared = whole.rpartition(": ")
    halves = [half for half in groups if half.rpartition(": ")[2] in _sides(shared)]
    divided = {_whole(half) for half in halves}
    return all(_is_divided(groups, one) for one in divided)


def _is_divided(groups: Groups, whole: str) -> bool:
    short, deep = (groups.get(side, []) for side in _sides(whole))
    if not _has_enough(short) or not _has_enough(deep):
        return False
    return _holding(short) <= _holding(deep)


def _has_enough(of: Sequence[Miss]) -> bool:
    return len(of) >= FEWEST and len({miss.source for miss in of}) > 1


def _holding(of: Sequence[Miss]) -> float:
    return quantile(of, SHARE)


def _sides(whole: str) -> tuple[str, str]:
    return f"{whole} short", f"{whole} deep"


def _whole(name: str) -> str:
    """The stratum that a side of a depth belongs to; any other is one itself."""
    return name.removesuffix(" short").removesuffix(" deep")


def _in_order(names: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of strata of which the second may not be narrower: a family's seen and unseen parts,
    and the two sides of a depth."""
    known = set(names)
    pairs = [_sides(_whole(name)) for name in known]
    for name in known:
        state, _, group = name.partition(": ")
        if state == ranges.SEEN and group:
            pairs.append((name, f"{ranges.UNSEEN_PART}: {group}"))
    return sorted({(less, more) for less, more in pairs if less in known and more in known})


def _pooled(less: Stratum, more: Stratum) -> Stratum:
    """Both, as wide as holds four in five of all of them."""
    members = less.members + more.members
    names = tuple(sorted(less.names + more.names))
    return Stratum(names, _holding(members), members, len({miss.source for miss in members}))


def _width(
    name: str, members: Sequence[Miss], found: Sequence[Miss]
) -> tuple[float, tuple[Miss, ...], int]:
    """The width of a stratum, what was missed in it, and its number of sources."""
    n_sources = len({miss.source for miss in members})
    following = members[0].strata[members[0].strata.index(name) :]
    around = following[1] if len(following) > 1 else name
    wider = [miss for miss in found if around in miss.strata]
    own = math.log(quantile(members, SHARE))
    beside = math.log(quantile(wider, SHARE))
    near = math.exp((n_sources * own + _SOURCES * beside) / (n_sources + _SOURCES))
    least = quantile(members, LEAST)
    off, upto = _ordered(members)
    most = float(off[max(0, int(np.searchsorted(upto, MOST, side="right")) - 1)])
    return max(least, min(near, most)), tuple(members), n_sources


def report(law: str, found: Sequence[Miss]) -> tuple[list[str], dict[str, float]]:
    """(The table of a law's strata as Markdown, widths for efficiency.json)."""
    kept = [s for s in strata(found) if s.names != (ranges.DATA_CENTER,)]
    widths = {name: math.ceil(1e3 * s.width) / 1e3 for s in kept for name in s.names}
    widths[ranges.DATA_CENTER] = FIRST_OF_ITS_KIND[law]
    lines = [
        "| stratum | left out | sources | inside % | range × ÷ | holds just 80 % |",
        "|---|---|---|---|---|---|",
    ]
    for s in kept:
        inside = 100 * np.mean([miss.is_inside(widths) for miss in s.members])
        lines.append(
            f"| {' and '.join(s.names)} | {len(s.off)} | {s.n_sources} | {inside:.0f} | "
            f"{math.exp(s.width):.2f} | {math.exp(s.holding):.2f} |"
        )
    judged = [miss for miss in found if miss.strata != (ranges.DATA_CENTER,)]
    inside = 100 * np.mean([miss.is_inside(widths) for miss in judged])
    lines += ["", f"Of all {len(judged)} together {inside:.0f} % are inside.", ""]
    return lines, widths
