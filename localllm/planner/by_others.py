"""Speeds that others measured with the same file on a machine of the same kind, joined with the
prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# A larger factor between a figure and its prediction shows another file or another setup.
_MAX_FACTOR = 5.0


def is_plausible(rows: Sequence[tuple[float, float]]) -> bool:
    """Return whether the (measured, predicted) tokens/s of a run are near each other."""
    return all(1 / _MAX_FACTOR < now / was < _MAX_FACTOR for now, was in rows)


def joined(logs: Mapping[str, Sequence[float]], spread: float) -> tuple[float, float]:
    """Return (ln of the factor for the predicted seconds, spread) after the figures of some sources.

    `logs`: for each source, ln(measured ÷ predicted seconds) of its figures. `spread`: the
    prediction's standard deviation in ln.

    Half of the prediction's variance is taken for the cost model's error, and half for differences
    between machines of one kind. The sources share the second half with this machine. By Bayes'
    rule for two normal distributions, n sources then have n times the weight of the prediction,
    however many figures each has. So one source never outweighs the rest.
    """
    from statistics import median

    n_sources = len(logs)
    median_log = median(median(source_logs) for source_logs in logs.values())
    return median_log * n_sources / (n_sources + 1), spread * math.sqrt(
        (1 + 1 / (n_sources + 1)) / 2
    )
