"""The fit of one law: every coefficient is exp(base + Σ effects of its keys), and priors keep it
near its parents.

The method is ridge-regularised Gauss-Newton on ln(seconds per token) with Huber weights, so a key
with few rows stays near its parent. The effects of single parts have Student-t priors, so one
unusual machine does not distort similar ones.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner_fit.rows import Row
from localllm.planner import decode_cost, efficiency

# The start of the fit, and the centre of its priors (_BASE_SD). Several sequences start at the
# values of prompts: products of a mixture cost 50 % more per parameter, a recurrent layer's
# launches 50 µs.
BASE = {
    "decode": {
        "eta": 0.8, "layer_s": 4e-5, "expert_layer_s": 3e-5, "recurrent_layer_s": 2e-5,
        "routed": 1.2, "kv": 0.5,
        "kv_mla": 0.1, "kv_unpack": 0.06, "state": 0.5, "quant": 1.0, "moe": 1.0, "unpack": 0.5,
        "index_kb": 9.0, "clock": math.e, "size": 1.0,
    },
    "prefill": {
        "matmul": 0.55, "attention": 0.25, "eta": 0.6, "layer_s": 4e-5, "expert_layer_s": 1e-4,
        "recurrent_layer_s": 5e-5, "scan": 0.05, "quant": 1.0, "moe": 1.5, "tile": 16.0,
        "activations": 1.0, "mask_s": 2e-9, "step_s": 5e-4,
        "clock": math.e,
    },
    "batched": {"many": 0.2, "row_s": 2e-5, "recurrent_row_s": 5e-5, "moe": 1.5},
    "drafted": {"row": 4.0, "guess_s": 1e-3},
}  # fmt: skip
_BASE_SD = {"size": 0.001, "moe": 0.4, "quant": 0.001, "routed": 0.2, "activations": 0.28}
# Prior standard deviations of effects, in ln, by level of key. Coefficients that are not listed do
# not move. They were chosen one at a time by the errors on left-out devices and files. For most of
# them, less freedom than the rows of a level would use was better.
PRIORS = {
    "decode": {
        "engine": {"eta": 0.15, "layer_s": 0.29, "expert_layer_s": 0.13, "kv": 0.40,
        "unpack": 0.25, "recurrent_layer_s": 0.20},
        "generation": {"eta": 0.15, "layer_s": 0.25, "expert_layer_s": 0.39, "kv": 0.13,
        "size": 0.06, "routed": 0.10},
        "tier": {"eta": 0.12, "layer_s": 0.06, "expert_layer_s": 0.12, "kv": 0.28},
        "part": {"eta": 0.13},
        "era": {"eta": 0.25, "layer_s": 0.20, "expert_layer_s": 0.50, "recurrent_layer_s": 0.30,
        "kv": 0.12},
        "own era": {"expert_layer_s": 0.70},
        "own era, cuda": {"expert_layer_s": 0.70},
        "quant": {"quant": 0.12},
    },
    "prefill": {
        "engine": {"matmul": 0.60, "attention": 0.68, "eta": 1.38, "layer_s": 0.90,
        "expert_layer_s": 0.81, "step_s": 1.60, "moe": 0.20, "tile": 0.30},
        "generation": {"matmul": 0.35, "attention": 0.60, "eta": 0.65, "layer_s": 0.30,
        "expert_layer_s": 1.08, "scan": 0.40, "activations": 0.20},
        "arithmetic": {"matmul": 0.81, "attention": 0.33, "expert_layer_s": 1.08, "moe": 0.40},
        "tier": {"matmul": 0.045, "attention": 0.08, "layer_s": 0.90, "expert_layer_s": 0.15},
        "part": {"matmul": 0.09},
        "era": {"matmul": 0.25, "attention": 0.17, "eta": 0.10, "layer_s": 0.30,
        "expert_layer_s": 0.50,
                "recurrent_layer_s": 0.30, "moe": 0.20},
        "own era": {"matmul": 1.40, "attention": 0.22},
        # CUDA's dense kernels were as fast in 2025 as today (an RTX 4090: 0.96 and 0.92 of its
        # nominal rate), but those of mixtures were not.
        "own era, cuda": {"matmul": 0.20, "attention": 0.22, "moe": 0.40, "expert_layer_s": 0.80},
        "quant": {"quant": 0.065},
    },
    "batched": {
        "engine": {"many": 0.70, "row_s": 0.70, "recurrent_row_s": 0.70},
        "generation": {"many": 0.50, "row_s": 0.50, "recurrent_row_s": 0.50},
    },
    "drafted": {"engine": {"row": 0.80}, "generation": {"row": 0.35}},
}  # fmt: skip
_WIDE_FORMATS = ("quant:bf16", "quant:iq", "quant:f16")
# Noise of one row, in ln. Runs of the same part and file by different people differ by about this
# much.
SIGMA = {"decode": 0.10, "prefill": 0.15, "batched": 0.15, "drafted": 0.12}
# Degrees of freedom of the Student-t prior on a part's own effects. None is a normal prior.
PART_FREEDOM: dict[str, float | None] = {"decode": 1.0}
# The weight of a row falls with this power of the number of rows from the same source and machine,
# because their errors are similar. For drafts, a source counts as one row.
ONE_MACHINE = {"decode": 0.2, "prefill": 0.2, "drafted": 1.0}
# The same power for a series: the same file on the same part at several depths.
SERIES = {"decode": 0.4, "prefill": 0.4, "batched": 0.4}
# Residuals above this multiple of the noise count linearly, not by their square (Huber).
HUBER = 1.2
# Leaving out fewer rows than this changes the fit little. With more rows, more passes are needed.
_MANY = 8
_PEAK = math.log(decode_cost.PEAK_SHARE)

Floats = NDArray[np.float64]
Matrices = tuple[Floats, NDArray[np.float32], NDArray[np.float32], Floats]


def level(key: str) -> str:
    """Return the kind of a key: engine, arithmetic (emulation of a number type), generation, tier,
    part, quant, era (of an engine), own era (of its kernels for one generation of chips; separate
    for CUDA), or "" (it has no effect)."""
    kind = key.partition(":")[0]
    if kind == "quant":
        return "quant"
    if kind == "era":
        if key.count(".") == 1:
            return "era"
        return "own era, cuda" if ".cuda." in key else "own era"
    if kind == "part":
        return kind
    if ":" in key:
        return ""
    head = key.split(".")[0]
    if "-" not in head:
        return "engine"
    if "-emulated-" in head:
        return "arithmetic"
    return (
        "tier" if head in ("apple-base", "apple-pro", "apple-max", "apple-ultra") else "generation"
    )


def prior_sd(law: str, key: str, name: str) -> float:
    """Return how far `key` may move `name`, as a standard deviation in ln. 0 means not at all."""
    if not key:
        return _BASE_SD.get(name, 1.0)
    sd = PRIORS[law].get(level(key), {}).get(name, 0.0)
    return sd * (3 if key in _WIDE_FORMATS else 1)


def family(device: str) -> str:
    """Return the vendor and Apple tier, or the vendor and generation."""
    vendor, gen, tier = efficiency.generation(device)
    return f"{vendor} {tier or gen}"


@dataclass(frozen=True)
class Design:
    """Rows as matrices over the parameters of a law, built once for all fits to parts of them."""

    law: str
    data: Sequence[Row]

    @cached_property
    def index(self) -> dict[tuple[str, str], int]:
        """Return the column of every base coefficient ("", name) and every effect (key, name)."""
        index = {("", name): i for i, name in enumerate(BASE[self.law])}
        for row in self.data:
            used = {name for value, powers in row.parts if value for name, _ in powers}
            for key in row.all_keys:
                for name in sorted(used):
                    if prior_sd(self.law, key, name) > 0:
                        index.setdefault((key, name), len(index))
        return index

    @cached_property
    def matrices(self) -> Matrices:
        """Return ln values, exponents, exponents of the share of the peak, and 1 for capped parts,
        by row × part."""
        n_parts = max(len(row.parts) for row in self.data)
        shape = (len(self.data), n_parts)
        values = np.full(shape, -np.inf)
        powers, shares = (np.zeros((*shape, len(self.index)), np.float32) for _ in range(2))
        capped = np.zeros(shape)
        for i, row in enumerate(self.data):
            for j, (value, named) in enumerate(row.parts):
                if value <= 0:
                    continue
                values[i, j] = math.log(value)
                for name, power in named:
                    for column in self._columns(row, name):
                        powers[i, j, column] += power
                # the cap of decode_cost.decode_terms
                if self.law == "decode" and ("eta", -1) in named:
                    capped[i, j] = 1.0
                    size = dict(named).get("size", 0.0)
                    for name, power in (("eta", 1.0), ("quant", -1.0), ("size", -size)):
                        for column in self._columns(row, name):
                            shares[i, j, column] += power
        return values, powers, shares, capped

    def _columns(self, row: Row, name: str) -> list[int]:
        return [c for key in ("", *row.all_keys) if (c := self.index.get((key, name))) is not None]

    def part(self, which: NDArray[np.int64]) -> Matrices:
        """Return the matrices of some rows."""
        values, powers, shares, capped = self.matrices
        return values[which], powers[which], shares[which], capped[which]


def seconds(matrices: Matrices, theta: Floats) -> tuple[Floats, Floats]:
    """Return the seconds of each row [n], and their gradient in ln [n, parameters]."""
    values, powers, shares, capped = matrices
    logs = (
        values
        + powers @ theta.astype(np.float32)
        + capped * np.maximum(0.0, shares @ theta.astype(np.float32) - _PEAK)
    )
    parts = np.exp(logs)
    total = parts.sum(axis=1)
    gradient = ((parts / total[:, None]).astype(np.float32)[:, None, :] @ powers)[:, 0, :]
    return total, gradient.astype(np.float64)


class Fit:
    """The coefficients of one law from the rows `which` of `design`: natural logs of the base and
    of every effect."""

    def __init__(
        self,
        design: Design,
        which: Sequence[int] | None = None,
        *,
        near: Floats | None = None,
        passes: int = 25,
    ) -> None:
        self.design, self.law = design, design.law
        chosen = np.arange(len(design.data)) if which is None else np.array(which, dtype=np.int64)
        rows = [design.data[i] for i in chosen]
        start = np.zeros(len(design.index))
        for name, value in BASE[self.law].items():
            start[design.index["", name]] = math.log(value)
        self.theta = (start if near is None else near).copy()
        normal = np.array([prior_sd(self.law, key, name) for key, name in design.index]) ** -2.0
        penalty, freedom, sigma = normal, PART_FREEDOM.get(self.law), SIGMA[self.law]
        own = _spoken_for(design, rows)
        target = np.log([row.seconds for row in rows])
        # Rows of one series (the same file at several depths) are not independent.
        series = Counter((r.device, r.engine, r.model, r.quant) for r in rows)
        alike = SERIES.get(self.law, 0.0)
        weight = np.array([series[r.device, r.engine, r.model, r.quant] ** -alike for r in rows])
        machines = Counter((r.device, r.engine, r.source) for r in rows)
        weight *= [
            machines[r.device, r.engine, r.source] ** -ONE_MACHINE.get(self.law, 0.0) for r in rows
        ]
        matrices = design.part(chosen)
        for _ in range(passes):
            # the normal prior that is tangent to the Student-t prior at the current effects
            if freedom is not None:
                scaled = (self.theta - start) ** 2 * normal
                penalty = np.where(own, normal * (freedom + 1) / (freedom + scaled), normal)
            predicted, jacobian = seconds(matrices, self.theta)
            residual = target - np.log(predicted)
            w = weight / np.maximum(1.0, np.abs(residual) / (HUBER * sigma)) / sigma**2
            thin = jacobian.astype(np.float32)
            hessian = (thin.T @ (thin * w.astype(np.float32)[:, None])).astype(
                np.float64
            ) + np.diag(penalty)
            step = np.linalg.solve(
                hessian, jacobian.T @ (w * residual) - penalty * (self.theta - start)
            )
            largest = float(np.max(np.abs(step)))
            self.theta += step * min(1.0, 1.0 / largest)
            if largest < 4e-3:
                break

    def errors(self, which: Sequence[int]) -> Floats:
        """Return predicted ÷ measured speed − 1 for rows of the design."""
        chosen = np.array(which, dtype=np.int64)
        measured = np.array([self.design.data[i].seconds for i in chosen])
        return np.asarray(measured / seconds(self.design.part(chosen), self.theta)[0] - 1)


def _spoken_for(design: Design, rows: Sequence[Row]) -> NDArray[np.bool_]:
    """Return the effects of parts with at least two similar ones. With fewer than three, the
    unusual one can't be identified."""
    kin: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        kin[family(row.device)].add(row.device)
    alike = {
        key
        for r in rows
        if len(kin[family(r.device)]) >= 3
        for key in r.keys
        if key.startswith("part:")
    }
    return np.array([key in alike for key, _ in design.index])


def leave_out(design: Design, unit: Callable[[Row], object]) -> Floats:
    """Return the error of every row, predicted by a fit without the rows of its `unit`. Suspect
    rows are never used for a fit."""
    learn = [i for i, row in enumerate(design.data) if not row.suspect]
    whole = Fit(design, learn).theta
    groups: dict[object, list[int]] = defaultdict(list)
    for i, row in enumerate(design.data):
        groups[unit(row)].append(i)
    found = np.zeros(len(design.data))
    for members in groups.values():
        held = set(members)
        rest = [i for i in learn if i not in held]
        found[members] = Fit(
            design, rest, near=whole, passes=8 if len(members) >= _MANY else 3
        ).errors(members)
    return found
