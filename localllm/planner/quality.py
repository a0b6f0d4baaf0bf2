"""Rate how good a model is, on one scale, from dated evidence. Also the quality lost to a format or
a KV type.

The scale is the Artificial Analysis Intelligence Index v4 (2026). Other benchmarks are mapped onto
it by straight lines, fitted over the catalog's models that have both (r and count are next to
each). A model without evidence is rated by size and date, and called unrated. For coding, coding
benchmarks count more than general ones. For autocomplete, only fill-in-the-middle benchmarks count.
Each figure carries its basis and an uncertainty in points.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter

from localllm_catalog import quants
from localllm_catalog.types import Model, Purpose, Quality, Variant


@dataclass(frozen=True, slots=True)
class Rating:
    """Points on the index, their uncertainty (one standard deviation), and their basis.

    `makers_own` is True if all evidence is from the model's maker. `is_evidence` is False if only
    size and date are known, or a guess by hand.
    """

    points: float
    spread: float
    basis: str
    is_evidence: bool
    makers_own: bool


_INDEX = "Artificial Analysis Intelligence Index v4"
# The index changes from time to time under the same name. Scores copied before this date are of
# another version, and their points are not comparable with later ones. Such a score counts only if
# the model has no newer one, with a much larger uncertainty.
_INDEX_SINCE = "2026-09"
_OTHER_VERSION_SPREAD = 4.0
# (slope, intercept, standard deviation of the result in points) by benchmark. Fitted over the
# catalog, November 2026.
_LIVE_CODE = (0.461, -8.7, 5.0)  # r 0.85, n 5
_HUMAN_EVAL = (0.716, -54.91, 7.0)  # r 0.82, n 7
_INDEX_LINES: dict[str, tuple[float, float, float]] = {
    _INDEX: (1.0, 0.0, 1.5),
    "Artificial Analysis scale, estimated": (1.0, 0.0, 4.0),
    "LMArena text": (0.118, -144.59, 4.0),  # r 0.83, n 13
    "LiveBench global average": (0.427, 0.64, 5.0),  # r 0.69, n 7
    "MMLU-Pro": (0.586, -27.34, 4.5),  # r 0.85, n 13
    "GPQA": (0.443, -15.28, 6.0),  # r 0.78, n 16
    "LiveCodeBench v6": _LIVE_CODE,
    "HumanEval": _HUMAN_EVAL,
}
# The same for coding only. The general index and repository repair do not correlate (r 0.04), so a
# slope would mean almost nothing. Instead, these lines keep the mean and standard deviation of the
# index over the models that have both. The deviation states how far a result is trusted for coding.
# SWE-bench Pro (two models of the catalog) and Terminal-Bench 2.1 (one) have too few models for a
# line.
_CODING_LINES: dict[str, tuple[float, float, float]] = {
    "SWE-bench Verified": (0.28, 5.8, 2.0),  # n 10
    "Terminal-Bench 2.0": (0.28, 13.5, 3.5),  # through SWE-bench Verified, n 3
    "Aider polyglot pass@2": (0.40, 3.2, 4.0),  # r 0.59, n 4
    "LiveCodeBench v6": _LIVE_CODE,
    "HumanEval": _HUMAN_EVAL,
}
# A general benchmark says less about coding: its standard deviation is this many times larger
# there.
_GENERAL_FOR_CODING = 3.0
# Share of code lines that a model fills in exactly, with content of other files (CrossCodeEval) and
# without. These lines are not fitted, since the index does not cover the skill. They map one table
# of ten models (arXiv 2409.12186) onto the scale. Its best model gets about the points of the best
# coders of that age, and both benchmarks have the same mean.
_FIM_LINES: dict[str, tuple[float, float, float]] = {
    "CrossCodeEval EM": (0.3, -4.0, 2.0),
    "HumanEval-FIM EM": (1.3, -102.5, 3.0),
}
# Lines onto the index for these purposes; other purposes use `_INDEX_LINES`.
_LINES_BY_PURPOSE: dict[str, dict[str, tuple[float, float, float]]] = {
    "autocomplete": _FIM_LINES,
    "coding": {
        **{name: (a, b, s * _GENERAL_FOR_CODING) for name, (a, b, s) in _INDEX_LINES.items()},
        **_CODING_LINES,
    },
}
# Standard deviation of a maker's score for its own model, as a multiple of that of others' scores.
# The maker chose benchmark, harness and settings.
_SELF_REPORTED_FACTOR = 2.0
_SIZE_AND_DATE = "size and date"
# points = a + b·log10(total billions) + c·log10(active billions) + d·years since 2024. Least
# squares over the 42 rated models of the catalog; the residual is 4.7 points.
_PRIOR = (-25.3, 8.9, 6.0, 12.0)
_PRIOR_SPREAD = 7.0
# The prior does not rise further after this many years.
_PRIOR_LAST_YEARS = 2.7
_UNDATED = (2024, 6)
_DATE = re.compile(r"(\d{4})(?:-(\d\d))?")


@lru_cache(4096)
def rate(model: Model, purpose: Purpose = "chat") -> Rating:
    """Return the precision-weighted mean of all evidence on `model`'s quality for `purpose`."""
    evidence = _evidence(model, purpose)
    prior_precision = 1 / _PRIOR_SPREAD**2
    if purpose == "autocomplete" and any(score.benchmark in _FIM_LINES for score in model.quality):
        # Size and date predict it poorly: models of 3 billion weights fill in 10 % or 45 %
        # correctly.
        prior_precision = 0.0
    weighted_points = prior_precision * _prior_points(model)
    total_precision = prior_precision
    for points, spread, _ in evidence:
        precision = 1 / spread**2
        weighted_points += points * precision
        total_precision += precision
    rating = Rating(
        weighted_points / total_precision,
        math.sqrt(1 / total_precision),
        _SIZE_AND_DATE,
        is_evidence=any(score.kind != "estimate" for _, _, score in evidence),
        makers_own=all(_is_makers_own(score) for _, _, score in evidence),
    )
    if not evidence:
        return replace(rating, makers_own=False)
    _, _, best = min(evidence, key=itemgetter(1))
    version = ", an older version" if _is_older(best) else ""
    return replace(rating, basis=f"{best.benchmark} {best.score:g} ({best.date}{version})")


def _evidence(model: Model, purpose: Purpose) -> list[tuple[float, float, Quality]]:
    """Return (points, their standard deviation, the score) for each benchmark score that counts."""
    lines = _LINES_BY_PURPOSE.get(purpose, _INDEX_LINES)
    counted_scores = [score for score in model.quality if score.benchmark in lines]
    if any(score.benchmark == _INDEX and not _is_older(score) for score in model.quality):
        counted_scores = [score for score in counted_scores if not _is_older(score)]
    evidence = []
    for score in counted_scores:
        slope, intercept, spread = lines[score.benchmark]
        # An older or self-reported score is less certain than its benchmark usually is.
        if _is_older(score):
            spread *= _OTHER_VERSION_SPREAD / 1.5
        if _is_makers_own(score):
            spread *= _SELF_REPORTED_FACTOR
        evidence.append((slope * score.score + intercept, spread, score))
    return evidence


def _is_older(score: Quality) -> bool:
    return score.benchmark == _INDEX and score.date < _INDEX_SINCE


def _is_makers_own(score: Quality) -> bool:
    """Return whether a score is from the model's own maker.

    The table of ten models does not count as such: one of their makers measured all of them alike.
    """
    return score.kind == "self-reported" and score.benchmark not in _FIM_LINES


def _prior_points(model: Model) -> float:
    a, b, c, d = _PRIOR
    year, month = _UNDATED
    date = _DATE.match(model.release_date)
    if date:
        year = int(date[1])
        month = int(date[2] or 6)
    years = year - 2024 + month / 12
    total = max(model.params_total, 10**7) / 1e9
    active = max(model.params_active, 10**7) / 1e9
    return a + b * math.log10(total) + c * math.log10(active) + d * min(years, _PRIOR_LAST_YEARS)


# Points lost per unit of ln(PPL / PPL of f16). An index difference of 1 point ≈ 2-3 % on hard
# benchmarks. On large models, Q4_K_M (0.031) loses 0.6 points, Q3_K_M (0.09) 1.8, and IQ2_M (0.34)
# 6.9. Small models lose more.
_POINTS_PER_LN_PPL = 20.0


# Points lost to formats that only models trained in them use. Qwen3.6 27B keeps 89.5 and 95 % of
# its mean over 15 benchmarks, by its maker's figures (https://huggingface.co/prism-ml, Bonsai 27B).
# The base is about 30 points.
_TRAINED_FORMAT_COST = {"Q1_0": 3.2, "Q2_0": 1.5}


@lru_cache(4096)
def format_cost(model: Model, variant: Variant) -> float:
    """Return the points that this variant's format loses against 16 bits (≥ 0). Small models lose
    more from the same format."""
    if variant.measured_ln_ratio is not None:
        return min(15.0, max(0.0, variant.measured_ln_ratio) * _POINTS_PER_LN_PPL)
    if variant.quant in _TRAINED_FORMAT_COST:
        return _TRAINED_FORMAT_COST[variant.quant]
    # trained or released in this format
    if variant.quant in ("BF16", "F16", "F32", "bf16", "MXFP4", "MXFP4-Q8"):
        return 0.0
    small_model_factor = max(1.0, math.pow(8e9 / max(model.params_total, 10**8), 0.35))
    return min(15.0, _ln_ppl_ratio(model, variant) * _POINTS_PER_LN_PPL * small_model_factor)


def _ln_ppl_ratio(model: Model, variant: Variant) -> float:
    """Return ln (PPL / PPL of f16) of the format: published, else from its bits a weight."""
    mixture = quants.MIXTURES.get(variant.quant)
    if mixture is not None and mixture.ln_ppl_ratio is not None:
        return mixture.ln_ppl_ratio
    if mixture is not None and mixture.ppl_delta is not None:
        return math.log(1 + mixture.ppl_delta / quants.LLAMA_3_PPL)
    # ln of the published ratios falls by 1.22 a bit: 0.343 at 2.93 bits, 0.092 at 3.99, 0.031 at
    # 4.89.
    return math.exp(-3.47 - 1.22 * (bits(model, variant) - 4.89))


def format_basis(variant: Variant) -> str:
    """Return where the loss of this format is from, in a few words; "" for published losses."""
    if variant.measured_ln_ratio is None:
        return ""
    return f"loss of {variant.quant} measured here"


def bits(model: Model, variant: Variant) -> float:
    """Return the bits a weight of this format, or of these files if the format is unknown."""
    mixture = quants.MIXTURES.get(variant.quant)
    if mixture is not None:
        return float(mixture.file_bits)
    return 8 * variant.file_bytes / max(1, model.params_total)


def kv_cost(kv_type: str) -> float:
    """Return the points that a KV cache type loses.

    From MMLU-Pro of Qwen3-4B-2507, UD-Q4_K_XL: 66.53 with f16, 66.26 with q8_0, 63.70 with q4_0
    (https://huggingface.co/adriabama06). It is the only published sweep known; other types have no
    figure.
    """
    if "/" in kv_type:
        keys, values = kv_type.split("/")
        return (kv_cost(keys) + kv_cost(values)) / 2
    if kv_type in ("f32", "f16", "bf16"):
        return 0.0
    if kv_type == "q8_0":
        return 0.15
    if kv_type == "q4_0":
        return 1.6
    return 0.6


# Largest harmless values of mean KL(f16 || type) in nats, and of the share of changed top tokens.
# _EXACT_LOSS is for tool calls and code, _CHAT_LOSS for chat.
_EXACT_LIMITS = (0.01, 0.05)
_CHAT_LIMITS = (0.05, 0.1)
_EXACT_PURPOSES: tuple[Purpose, ...] = ("coding", "autocomplete")
# In the order of their bytes, f16 first. All CPU builds have a kernel for mixed pairs. For CUDA it
# is a build option. Most types exist only in MLX.
_LADDER = (
    "f16", "q8_0", "q6_0", "q8_0/q4_0", "q5_0", "q4_0", "turbo4", "q3_0", "turbo3", "q2_0", "turbo2",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KvPrecision:
    """Measured precision of a KV type (or "K/V" pair) on this very model: see
    `localllm_backends.contract.KvFidelity`."""

    kv_type: str
    mean_kl: float
    flips: float


@lru_cache(maxsize=256)
def ladder(purpose: Purpose, evidence: tuple[KvPrecision, ...], *, mixed: bool) -> tuple[str, ...]:
    """Return the KV types to try for `purpose`, in order. `mixed`: pairs of two types have a fast
    kernel here.

    No harm from an 8-bit cache is known. 4 bits are reported to break tool arguments in 3 to 10 of
    14 tasks. So an agent's model gets 4 bits only if measurements on it show about the quality of 8
    bits. A chat gets q4_0 unless measurements show harm. All other types need measurements.
    """
    types = [kv_type for kv_type in _LADDER if mixed or "/" not in kv_type]
    return tuple(kv_type for kv_type in types if _is_precise_enough(kv_type, purpose, evidence))


def _is_precise_enough(kv_type: str, purpose: Purpose, evidence: Sequence[KvPrecision]) -> bool:
    if kv_type == "f16":
        return True
    for measured in evidence:
        if measured.kv_type == kv_type:
            return passes(measured, purpose)
    if kv_type == "q8_0":
        return True
    return purpose not in _EXACT_PURPOSES and kv_type == "q4_0"


def passes(evidence: KvPrecision, purpose: Purpose) -> bool:
    """Return whether the measured loss is harmless for `purpose`."""
    max_kl, max_flips = _EXACT_LIMITS if purpose in _EXACT_PURPOSES else _CHAT_LIMITS
    return evidence.mean_kl <= max_kl and evidence.flips <= max_flips


def why(kv_type: str, purpose: Purpose, evidence: Sequence[KvPrecision]) -> str:
    """Return the reason for choosing `kv_type`, in a few words."""
    if kv_type in ("f16", "bf16", "f32"):
        return "exact"
    for measured in evidence:
        if measured.kv_type == kv_type:
            verdict = "harmless" if passes(measured, purpose) else "harmful"
            distance_text = (
                f"{measured.mean_kl:.4f} nats from f16, "
                f"{measured.flips:.1%} of the top tokens changed"
            )
            return f"{distance_text} here: {verdict} for {purpose}"
    return "not measured on this model yet"
