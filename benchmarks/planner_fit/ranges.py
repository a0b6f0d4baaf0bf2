"""The widths of the 80 % ranges, from left-out rows alone.

Every recent row is predicted three times: by a fit without its source, without its source and its
device, and without its source and its family of devices. Each is an error of one stratum
(localllm/planner/ranges.py). A stratum's width contains 80 % of its own errors (conformal
prediction by strata: Vovk et al. 2003). A stratum with few rows or one source passes them on to the
next wider one.

A family or engine is divided by depth only if both sides have enough rows and the deeper side is
wider. If a family's unseen parts have the narrower range, they share one width with the seen ones
(pooled adjacent violators: Barlow et al. 1972). A row counts less if its source has more rows in
the stratum: their errors are similar, and a new report is another source.
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
# A stratum's width is near that of the next wider one, as long as a share between these of its own
# errors is inside.
LEAST, MOST = 0.76, 0.84
# The weight of a row falls with this power of its source's number of rows in the stratum. It was
# chosen by the share inside, of rows and of sources: both are near 80 %.
_ONE_SOURCE = 0.5
# With this number of sources, a stratum's own width counts as much as the next wider one's.
_SOURCES = 3.0
FEWEST = 15
# The error for the first data-centre card before the fit had a row of its kind (an H200: a mixture
# 1.73 times as fast as predicted, prompts a quarter as fast). The next card may be predicted as
# badly.
FIRST_OF_ITS_KIND = {"decode": 0.55, "prefill": 1.36, "batched": 0.75}


@dataclass(frozen=True)
class Miss:
    """The error of an unseen row, ln (predicted ÷ measured), and the strata that it was predicted
    in, the narrowest first. Its range may not be narrower than those of `bounds`."""

    error: float
    source: str
    strata: tuple[str, ...]
    bounds: tuple[tuple[str, ...], ...] = ()

    def is_inside(self, widths: Mapping[str, float]) -> bool:
        """Return whether the error is inside the range with these `widths`."""
        stated = max(ranges.width(widths, names) for names in (self.strata, *self.bounds))
        return abs(self.error) <= stated


HeldWith = Callable[[Row, Row], bool]
# By the knowledge of the machine: the rows left out together with a row, in addition to its source.
HELD: dict[str, HeldWith] = {
    ranges.SEEN: lambda _row, _other: False,
    ranges.UNSEEN_PART: lambda row, other: row.device == other.device,
    ranges.UNSEEN_KIND: lambda row, other: (
        row.device == other.device or ranges.family(row.keys) == ranges.family(other.keys)
    ),
}


def hardware_keys(row: Row) -> tuple[str, ...]:
    """Return the keys of the hardware of a row."""
    return tuple(key for key in row.keys if not key.startswith("quant:"))


def known(rows: Iterable[Row]) -> Counter[str]:
    """Return the number of rows by key of their hardware."""
    return Counter(key for row in rows for key in hardware_keys(row))


def missed(row: Row, error: float, learnt: Mapping[str, int]) -> Miss:
    """Return the miss of a row whose prediction is wrong by `error` (÷ measured − 1), by the rows
    that the fit used."""
    keys = hardware_keys(row)
    kind = "MoE" if row.moe else "dense"
    bounds = ranges.bounds(ranges.evidence(learnt, keys), keys, kind, row.depth)
    return Miss(math.log1p(error), row.source, bounds[0], tuple(bounds[1:]))


def misses(design: Design) -> list[Miss]:
    """Return every recent row in every state of knowledge that can be simulated for it."""
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
    """Strata with a common width (ln), their misses, and the number of sources."""

    names: tuple[str, ...]
    width: float
    members: tuple[Miss, ...]
    n_sources: int

    @property
    def off(self) -> tuple[float, ...]:
        """Return the absolute errors (ln)."""
        return tuple(abs(miss.error) for miss in self.members)

    @property
    def inside(self) -> float:
        """Return the share of its errors inside the width, weighted by source."""
        return _share_inside(self.members, self.width)

    @property
    def holding(self) -> float:
        """Return the width that contains exactly 80 % of the errors."""
        return quantile(self.members, SHARE)


def _ordered(members: Sequence[Miss]) -> tuple[Floats, Floats]:
    """Return the sorted absolute errors, and for each the share of the members up to it, weighted
    by source."""
    n_rows = Counter(miss.source for miss in members)
    off = np.array([abs(miss.error) for miss in members])
    weights = np.array([n_rows[miss.source] ** -_ONE_SOURCE for miss in members])
    order = np.argsort(off, kind="stable")
    upto = np.cumsum(weights[order])
    return off[order], upto / upto[-1]


def quantile(members: Sequence[Miss], share: float) -> float:
    """Return the smallest absolute error that at least `share` of the members do not exceed."""
    off, upto = _ordered(members)
    return float(off[min(int(np.searchsorted(upto, share - 1e-9)), len(off) - 1)])


def _share_inside(members: Sequence[Miss], width: float) -> float:
    off, upto = _ordered(members)
    n_inside = int(np.searchsorted(off, width, side="right"))
    return float(upto[n_inside - 1]) if n_inside else 0.0


Groups = dict[str, list[Miss]]


def strata(found: Sequence[Miss]) -> list[Stratum]:
    """Divide the misses into strata. Each has its own width, which stays near that of the next
    wider stratum as long as it still contains the required share."""
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
    """Group the misses by the narrowest of their strata with enough of them. The rest is predicted
    by the widest stratum, whose width is that of all its members."""
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
    """Return whether a stratum has enough rows and sources for its own width. A side of a depth
    has, if the other side does too and the deeper one is no narrower, in all states of knowledge of
    a machine."""
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
    """Return the stratum that a side of a depth belongs to, or the name of any other stratum."""
    return name.removesuffix(" short").removesuffix(" deep")


def _in_order(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of strata whose second one may not be narrower: a family's seen and unseen
    parts, and the two sides of a depth."""
    known = set(names)
    pairs = [_sides(_whole(name)) for name in known]
    for name in known:
        state, _, group = name.partition(": ")
        if state == ranges.SEEN and group:
            pairs.append((name, f"{ranges.UNSEEN_PART}: {group}"))
    return sorted({(less, more) for less, more in pairs if less in known and more in known})


def _pooled(less: Stratum, more: Stratum) -> Stratum:
    """Return both as one stratum, with a width that contains 80 % of all their errors."""
    members = less.members + more.members
    names = tuple(sorted(less.names + more.names))
    return Stratum(names, _holding(members), members, len({miss.source for miss in members}))


def _width(
    name: str, members: Sequence[Miss], found: Sequence[Miss]
) -> tuple[float, tuple[Miss, ...], int]:
    """Return the width of a stratum, its misses, and its number of sources."""
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
    """Return the table of a law's strata as Markdown, and the widths for efficiency.json."""
    kept = [s for s in strata(found) if s.names != (ranges.DATA_CENTER,)]
    widths = {name: math.ceil(1e3 * s.width) / 1e3 for s in kept for name in s.names}
    widths[ranges.DATA_CENTER] = FIRST_OF_ITS_KIND[law]
    lines = [
        "| stratum | rows left out | sources | inside % | range × ÷ | range that contains 80 % |",
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
    lines += ["", f"Of all {len(judged)} predictions, {inside:.0f} % are inside their range.", ""]
    return lines, widths
