"""Comparisons of servers over interleaved rounds: medians and ratios. A single number from a shared
machine is not reliable."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Better = Literal["more", "less"]
# Number of characters of a name that a table shows.
_MAX_NAME_CHARS = 26


def rotated(runs: Sequence[T], by: int) -> list[T]:
    """Rotate `runs` for round `by`, so that each run begins a round in turn."""
    start = by % len(runs)
    return [*runs[start:], *runs[:start]]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratios of one server to another: the ratio of each round, and their median, minimum and
    maximum."""

    median: float
    low: float
    high: float
    rounds: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.median:.2f}× [{self.low:.2f}–{self.high:.2f}]"


@dataclass
class RoundComparison:
    """Values by name and round. NaN marks a round without a value.

    `better`: whether more or less is better.
    """

    title: str
    unit: str
    better: Better = "more"
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def fill(self, name: str, rounds: int) -> None:
        """Append NaN until there are `rounds` values."""
        values = self.values.setdefault(name, [])
        values += [math.nan] * (rounds - len(values))

    def known_values(self, name: str) -> list[float]:
        return [value for value in self.values.get(name, ()) if not math.isnan(value)]

    def median(self, name: str) -> float:
        """Median over the rounds; NaN if no round has a value."""
        known_values = self.known_values(name)
        if known_values:
            return statistics.median(known_values)
        return math.nan

    def ratios(self, name: str, to: str) -> Ratio | None:
        """The ratio of each round in which both names have a value; None if there is no such round.
        A change from round to round (the text, other load on the machine) cancels out."""
        pairs = zip(self.values.get(name, ()), self.values.get(to, ()), strict=False)
        ratios_of_rounds = tuple(a / b for a, b in pairs if b and not math.isnan(a / b))
        if ratios_of_rounds:
            return Ratio(
                statistics.median(ratios_of_rounds),
                min(ratios_of_rounds),
                max(ratios_of_rounds),
                ratios_of_rounds,
            )
        return None

    def to_json(self, first: str) -> dict[str, Any]:
        """Return all data, with the ratio of `first` to every other name."""
        medians: dict[str, float | None] = {}
        values: dict[str, list[float | None]] = {}
        ratios: dict[str, dict[str, Any]] = {}
        for name in self.values:
            medians[name] = _or_none(self.median(name))
            values[name] = [_or_none(value) for value in self.values[name]]
            ratio = self.ratios(first, name) if name != first else None
            if ratio is not None:
                ratios[name] = asdict(ratio)
        return {
            "title": self.title,
            "unit": self.unit,
            "better": self.better,
            "medians": medians,
            "values": values,
            "ratios": ratios,
            "of": first,
        }

    def lines(self, first: str) -> list[str]:
        """The title, and a line per name with its median, its spread and the ratio of `first` to
        it. Lines have at most 80 columns if the names are addresses."""
        text_lines = [f"{self.title} ({self.unit}, {self.better} is better)"]
        width = min(max(map(len, self.values), default=0), _MAX_NAME_CHARS)
        for name in self.values:
            known_values = self.known_values(name)
            if not known_values:
                text_lines.append(f"  {name[:width]:{width}} has no value")
                continue
            spread = f"[{min(known_values):.4g}–{max(known_values):.4g}]"
            line = f"  {name[:width]:{width}} {self.median(name):9.4g} {spread}"
            ratio = self.ratios(first, name) if name != first else None
            if ratio is not None:
                line += f"  {first[:width]} ÷ it: {ratio}"
            text_lines.append(line)
        return text_lines


def _or_none(value: float) -> float | None:
    if math.isnan(value):
        return None
    return value
