"""How good a model is, on one scale, from dated evidence; and what a format or a KV type takes away from it.

The scale is the Artificial Analysis Intelligence Index v4 (2026). Other benchmarks are moved onto it by straight lines
fitted over the catalog's models that have both (r and count beside each); a model with no evidence is placed by size
and date. Every figure carries its basis and an uncertainty in points.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from localllm_catalog import quants
from localllm_catalog.types import Model, Variant


@dataclass(frozen=True, slots=True)
class Rating:
    """Points on the index, their uncertainty (one standard deviation), and what they rest on."""

    points: float
    spread: float
    basis: str


# benchmark: (slope, intercept, standard deviation of the result in points). Fitted over the catalog, November 2026.
_ONTO_INDEX: dict[str, tuple[float, float, float]] = {
    "Artificial Analysis Intelligence Index v4": (1.0, 0.0, 1.5),
    "Artificial Analysis scale, estimated": (1.0, 0.0, 4.0),
    "LMArena text": (0.118, -144.59, 4.0),  # r 0.83, n 13
    "LiveBench global average": (0.427, 0.64, 5.0),  # r 0.69, n 7
    "MMLU-Pro": (0.586, -27.34, 4.5),  # r 0.85, n 13
    "GPQA": (0.443, -15.28, 6.0),  # r 0.78, n 16
    "LiveCodeBench v6": (0.461, -8.7, 5.0),  # r 0.85, n 5
    "HumanEval": (0.716, -54.91, 7.0),  # r 0.82, n 7
}
# points = a + b·log10(total billions) + c·log10(active billions) + d·years since 2024: least squares over the 42 rated
# models of the catalog, residual 4.7 points.
_PRIOR = (-25.3, 8.9, 6.0, 12.0)
_PRIOR_SPREAD = 7.0
# Beyond this date the line of the prior is not trusted to go on rising.
_PRIOR_LAST_YEARS = 2.7
_UNDATED = (2024, 6)
_DATE = re.compile(r"(\d{4})(?:-(\d\d))?")


def rate(model: Model) -> Rating:
    """The precision-weighted mean of everything known about `model`'s quality."""
    prior = _prior(model)
    weight: float = 1 / _PRIOR_SPREAD**2
    total = prior * weight
    best = ("size and date", _PRIOR_SPREAD)
    for score in model.quality:
        line = _ONTO_INDEX.get(score.benchmark)
        if line is None:
            continue
        slope, intercept, spread = line
        spread *= 1.0 if score.kind == "measured" or score.kind == "estimate" else 1.3
        total += (slope * score.score + intercept) / spread**2
        weight += 1 / spread**2
        if spread < best[1]:
            best = (f"{score.benchmark} {score.score:g} ({score.date})", spread)
    return Rating(total / weight, math.sqrt(1 / weight), best[0])


def _prior(model: Model) -> float:
    a, b, c, d = _PRIOR
    date = _DATE.match(model.release_date)
    year, month = (int(date[1]), int(date[2] or 6)) if date else _UNDATED
    years = year - 2024 + month / 12
    total, active = max(model.params_total, 10**7) / 1e9, max(model.params_active, 10**7) / 1e9
    return a + b * math.log10(total) + c * math.log10(active) + d * min(years, _PRIOR_LAST_YEARS)


# Points lost per unit of ln(PPL / PPL of f16). Index differences of 1 point ≈ 2-3 % on hard benchmarks; Q4_K_M
# (0.031) loses 0.6, Q3_K_M (0.09) 1.8, IQ2_M (0.34) 6.9 points on large models, more on small ones.
_POINTS_PER_LN_PPL = 20.0


def format_cost(model: Model, variant: Variant) -> float:
    """Points this variant's format loses against 16 bits (≥ 0). Small models lose more from the same format."""
    if variant.quant in ("BF16", "F16", "F32", "bf16", "MXFP4", "MXFP4-Q8"):  # trained or released so
        return 0.0
    mix = quants.MIXTURES.get(variant.quant)
    loss = mix.delta.ln_ppl_ratio if mix is not None else None
    if loss is None:
        bits = float(mix.file_bits) if mix is not None else 8 * variant.file_bytes / max(1, model.params_total)
        # ln of the published ratios falls by 1.22 a bit: 0.343 at 2.93 bits, 0.092 at 3.99, 0.031 at 4.89.
        loss = math.exp(-3.47 - 1.22 * (bits - 4.89))
    small = max(1.0, math.pow(8e9 / max(model.params_total, 10**8), 0.35))
    return min(15.0, loss * _POINTS_PER_LN_PPL * small)


def kv_cost(kv_type: str) -> float:
    """Points a KV cache type loses: from MMLU-Pro of Qwen3-4B-2507, UD-Q4_K_XL (66.53 f16, 66.26 q8_0, 63.70 q4_0:
    https://huggingface.co/adriabama06, the only published sweep known; other types have no figure)."""
    known = {"f32": 0.0, "f16": 0.0, "bf16": 0.0, "q8_0": 0.15, "q4_0": 1.6}
    return known.get(kv_type, 0.6)
