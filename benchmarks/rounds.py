"""Rounds in turn and what they come to: the same for every bench that compares a few ways of doing one thing."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence

from localllm.bench.ratio import RoundComparison


def interleave(rounds: int, *runs: Callable[[], None]) -> None:
    for i in range(rounds):
        for run in runs:
            run()
        print(f"  round {i + 1}/{rounds}", file=sys.stderr)


def report(table: RoundComparison, to: str) -> dict[str, object]:
    """Print one line per name, with its ratio to `to` (of the medians, and round by round), and return the figures."""
    print(f"\n{table.title}")
    medians = {name: table.median(name) for name in table.values}
    ratios = {name: table.ratios(name, to) for name in table.values}
    paired = {name: found.median if found else math.nan for name, found in ratios.items()}
    for name, median in medians.items():
        known = table.known(name) or [math.nan]
        spread = f"[{min(known):.4g}–{max(known):.4g}]"
        said = f"× {median / medians[to]:.3f}, round by round {paired[name]:.3f}"
        print(f"  {name:28} {median:10.4g} {table.unit:8} {spread:22} {said}", flush=True)
    return {"title": table.title, "unit": table.unit, "medians": medians, "paired": paired, "to": to}


def write(path: str | None, results: Sequence[dict[str, object]]) -> None:
    if path:
        with open(path, "w", encoding="utf-8") as f:
            json.dump(results, f, indent=1)
