"""The widths of the 80 % ranges: from errors of rows whose source, or whose source and device, the
law had not seen.

Quantile regression of ln |error| on the strata of a row (localllm/planner/ranges.py), each
stratum's share held near zero, then scaled so that four in five of the errors of sources that
neither the law nor the widths had seen are inside (conformal prediction by leaving out: Barber et
al. 2021, https://arxiv.org/abs/1905.02928).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.planner_fit.fit import Design, Fit, Floats
from benchmarks.planner_fit.rows import RECENT, Row
from localllm.planner import ranges

SHARE = 0.8
# How strongly a stratum's share is held near what is expected of it, in rows that would have to say
# otherwise; a stratum that fewer rows than these have says nothing of its own.
_HOLD = 8.0
_FEWEST = 4
# What is expected of what one source or two tell of: what was asked less often is known less well,
# never better.
EXPECTED = {
    "several cards": 0.5, "quantised KV": 0.3, "deep": 0.0, "very deep": 0.3, "rare format": 0.1,
    "latent KV": 0.0,
    "unseen part": 0.1, "unseen kind": 0.4, "unseen engine": 0.5, "nvidia-emulated-dp4a.cuda": 0.5,
}  # fmt: skip
# A key of fewer sources than these narrows nothing in full.
_SURE_SOURCES = 5
_STEPS = 3000


@dataclass(frozen=True)
class Miss:
    """How far a row that was not seen is off: ln (predicted ÷ measured), and the strata it was
    predicted in."""

    row: Row
    error: float
    strata: tuple[str, ...]


def known(rows: Sequence[Row]) -> Counter[str]:
    """Rows by the key of where they ran."""
    return Counter(key for row in rows for key in row.keys if not key.startswith("quant:"))


def misses(design: Design, held_with: Callable[[Row, Row], bool]) -> list[Miss]:
    """Every recent row, predicted by a fit without the rows that are `held_with` it."""
    data = design.data
    learn = [i for i, row in enumerate(data) if not row.suspect]
    whole = Fit(design, learn).theta
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, row in enumerate(data):
        if row.era in RECENT and not row.suspect:
            groups[row.source, row.device].append(i)
    fits: dict[frozenset[int], Fit] = {}
    found = []
    for members in groups.values():
        rest = [i for i in learn if not held_with(data[members[0]], data[i])]
        fit = fits.setdefault(frozenset(rest), Fit(design, rest, near=whole, passes=6))
        lacking = ranges.evidence(known([data[i] for i in rest]), data[members[0]].keys)
        for i, error in zip(members, fit.errors(members), strict=True):
            found.append(Miss(data[i], math.log1p(float(error)), (*data[i].strata, *lacking)))
    return found


def same_source(one: Row, other: Row) -> bool:
    """Held back with it: rows of its source."""
    return one.source == other.source


def same_source_or_device(one: Row, other: Row) -> bool:
    """Held back with it: rows of its source, and of its device."""
    return one.source == other.source or one.device == other.device


def report(design: Design) -> tuple[list[str], dict[str, float]]:
    """(Lines of a report, shares for the table) of one law."""
    by_source, apart = misses(design, same_source), misses(design, same_source_or_device)
    unseen = [miss for miss in apart if "unseen part" in miss.strata]
    table, widths = scaled(by_source, unseen)
    lines = [
        "### Inside the stated 80 % range",
        "",
        "Recent rows of a source that neither law nor range had seen:",
        "",
    ]
    lines += coverage(by_source, widths[: len(by_source)])
    lines += [
        "",
        "The same with its device held back too:",
        "",
        *coverage(unseen, widths[len(by_source) :]),
    ]
    return [*lines, ""], table


def shares(found: Sequence[Miss]) -> dict[str, float]:
    """The share of every stratum in ln width, "base" among them: pinball loss, by subgradients that
    shrink."""
    counts = Counter(name for miss in found for name in miss.strata)
    names = ["base", *sorted({name for name, n in counts.items() if n >= _FEWEST} | set(EXPECTED))]
    told = {name: len({miss.row.source for miss in found if name in miss.strata}) for name in names}
    x = np.array([[1.0, *(name in miss.strata for name in names[1:])] for miss in found])
    y = np.log(np.maximum(0.01, np.abs([miss.error for miss in found])))
    sources = Counter(miss.row.source for miss in found)
    weight = np.array([sources[miss.row.source] ** -0.5 for miss in found])
    weight *= len(found) / weight.sum()
    hold = np.array([0.0, *(_HOLD for _ in names[1:])])
    expected = np.array([EXPECTED.get(name, 0.0) for name in names])
    least = np.array(
        [0.0 if name in EXPECTED else -min(1.0, told[name] / _SURE_SOURCES) for name in names]
    )
    least[0] = -np.inf
    theta, best = expected.copy(), np.zeros(len(names))
    theta[0] = float(np.quantile(y, SHARE))
    for step in range(_STEPS):
        above = y > x @ theta
        gradient = x.T @ (weight * np.where(above, -SHARE, 1 - SHARE)) + hold * (theta - expected)
        theta = np.maximum(
            least, theta - gradient / (len(found) * SHARE * (1 - SHARE)) / math.sqrt(1 + step / 20)
        )
        best += (theta - best) / (step + 1 - _STEPS // 2) if step >= _STEPS // 2 else 0.0
    return {name: float(value) for name, value in zip(names, best, strict=True)}


def scaled(found: Sequence[Miss], further: Sequence[Miss]) -> tuple[dict[str, float], Floats]:
    """(shares for the table, width of each miss of `found` and then `further` by shares that saw
    none of its source), scaled to the share wanted of `found`. `further`: what is learnt from
    beside."""
    every = [*found, *further]
    widths = np.zeros(len(every))
    for source in {miss.row.source for miss in every}:
        own = shares([miss for miss in every if miss.row.source != source])
        for i, miss in enumerate(every):
            if miss.row.source == source:
                widths[i] = ranges.width(own, miss.strata)
    ratio = np.abs([miss.error for miss in found]) / widths[: len(found)]
    scale = float(np.quantile(ratio, SHARE))
    table = {name: round(value, 3) for name, value in shares(every).items()}
    return {**table, "base": round(table["base"] + math.log(scale), 3)}, widths * scale


def coverage(found: Sequence[Miss], widths: Floats, least: int = 15) -> list[str]:
    """Lines of a report: how much of the misses is inside, in all and by stratum that enough rows
    have."""
    inside = np.abs([miss.error for miss in found]) <= widths
    lines = ["| stratum | predictions | inside % | half width % (median) |", "|---|---|---|---|"]

    def line(name: str, which: Floats) -> str:
        half = 100 * math.expm1(float(np.median(widths[which])))
        return (
            f"| {name} | {int(which.sum())} | {100 * float(np.mean(inside[which])):.0f} | "
            f"{half:.0f} |"
        )

    lines.append(line("**all**", np.ones(len(found), dtype=bool)))
    counts = Counter(name for miss in found for name in miss.strata)
    for name in sorted(name for name, n in counts.items() if n >= least):
        lines.append(line(name, np.array([name in miss.strata for miss in found])))
    return lines
