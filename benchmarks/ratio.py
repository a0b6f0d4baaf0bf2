"""How every benchmark here measures: interleaved rounds, medians, a ratio; single numbers on a shared machine lie."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Comparison:
    """Values per name over rounds; `better` says whether a larger or a smaller value wins."""

    title: str
    unit: str
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """One round's value."""
        self.values.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        """Median over rounds."""
        return statistics.median(self.values[name])

    def ratio(self, name: str, to: str) -> float:
        """Median of `name` over median of `to`."""
        return self.median(name) / self.median(to) if self.median(to) else float("nan")

    def paired(self, name: str, to: str) -> float:
        """Median of the rounds' own ratios: what changes from round to round (the text, the neighbours) cancels out."""
        rounds = zip(self.values[name], self.values[to], strict=False)
        return statistics.median(a / b if b else float("nan") for a, b in rounds)

    def report(self, to: str) -> dict[str, object]:
        """Print one line per name, with its ratio to `to`, and return the figures."""
        print(f"\n{self.title}")
        for name, values in self.values.items():
            spread = f"[{min(values):.4g}–{max(values):.4g}]"
            ratios = f"× {self.ratio(name, to):.3f}, round by round {self.paired(name, to):.3f}"
            print(f"  {name:28} {self.median(name):10.4g} {self.unit:8} {spread:22} {ratios}", flush=True)
        medians, paired = ({n: of(n) for n in self.values} for of in (self.median, lambda n: self.paired(n, to)))
        return {"title": self.title, "unit": self.unit, "medians": medians, "paired": paired, "to": to}


def interleave(rounds: int, *runs: Callable[[], None]) -> None:
    """Call every run once per round, in turn."""
    for i in range(rounds):
        for run in runs:
            run()
        print(f"  round {i + 1}/{rounds}", file=sys.stderr)


def write(path: str | None, results: list[dict[str, object]]) -> None:
    """Keep the figures as JSON."""
    if path:
        with open(path, "w", encoding="utf-8") as f:
            json.dump(results, f, indent=1)
