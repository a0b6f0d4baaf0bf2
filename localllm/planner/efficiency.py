"""The table of how close each kind of machine comes to its limits (efficiency.toml), and the one way to read it.

Every coefficient is exp(base + Σ effects): the keys of a machine and model (engine, chip generation, part, format …)
each add what was learnt about them, so an unseen part falls back on its generation and an unseen generation on its
engine. benchmarks/planner_fit writes the table from published measurements.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

FILE = Path(__file__).with_name("efficiency.toml")


@dataclass(frozen=True, slots=True)
class Table:
    """Coefficients of one law ("decode", "prefill" or "batched"): natural logs. `rows` counts measurements behind each key,
    `spread` is the standard deviation of ln(measured / predicted) on unseen rows when that key was the nearest."""

    name: str
    base: Mapping[str, float]
    effects: Mapping[str, Mapping[str, float]]
    rows: Mapping[str, int]
    spread: Mapping[str, float]
    source: str

    def coefficients(self, keys: Iterable[str]) -> dict[str, float]:
        """Every coefficient with the effects of `keys` (unknown ones add nothing)."""
        logs = dict(self.base)
        for key in keys:
            for name, value in self.effects.get(key, {}).items():
                logs[name] = logs.get(name, 0.0) + value
        return {name: math.exp(value) for name, value in logs.items()}

    def nearest(self, hardware_keys: Iterable[str]) -> tuple[str, int]:
        """The most specific hardware key with measurements, and how many ("none", 0 where nothing is known)."""
        found = ("none", 0)
        for key in hardware_keys:
            if self.rows.get(key, 0) > 0:
                found = (key, self.rows[key])
        return found

    def spread_of(self, nearest_key: str) -> float:
        """Expected ln-error when `nearest_key` is the best that is known."""
        level = "part" if nearest_key.startswith("part:") else "family" if "-" in nearest_key else "engine"
        return self.spread.get("none" if nearest_key == "none" else level, 0.4)


@cache
def load() -> dict[str, Table]:
    """The shipped tables by law name. Package data: read once per process."""
    with FILE.open("rb") as f:
        raw = tomllib.load(f)
    return {
        name: Table(
            name=name,
            base=raw[name]["base"],
            effects=raw[name].get("effects", {}),
            rows=raw[name].get("rows", {}),
            spread=raw[name].get("spread", {}),
            source=raw["meta"]["source"],
        )
        for name in ("decode", "prefill", "batched")
    }


@lru_cache(maxsize=4096)
def coefficients(law: str, keys: tuple[str, ...]) -> dict[str, float]:
    """`Table.coefficients` of the shipped table, remembered (read-only: every caller gets the same dict)."""
    return load()[law].coefficients(keys)
