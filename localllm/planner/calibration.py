"""Learn from a machine's own runs how much longer each cause of a decode step takes there than the
table predicts.

One figure of one model does not show which cause is off. So each cause may deviate by a usual
amount (a prior), and all together more than one alone. The unexplained part of a figure is divided
among the causes. Each gets more if it was less certain or took more of the step. Figures at two
depths, or of two models, tell the causes apart.

The method is Bayesian linearised regression on ln seconds. It is solved one figure at a time, like
an iterated extended Kalman filter (Bell and Cathey 1993, doi:10.1109/9.250476).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Parts = tuple[float, ...]
"""Seconds of one decode step by cause: weights from memory; what every layer costs anyway;
attention over the cache."""

_PASSES = 8
_MAX_STEP = 0.7  # of ln factor in one pass, so that an outlier is approached in steps


class Prior(NamedTuple):
    """How far a machine may deviate from the table, as standard deviations of ln seconds: all
    causes together, and each alone."""

    common: float
    own: Parts


# A graphics card's clocks, driver and cooling affect all causes alike; its kernels are those of the
# table. A CPU's figures are less certain: its memory (half the rate if busy), its time per layer
# (threads synchronise), and its attention kernels.
ACCELERATOR = Prior(0.5, (0.10, 0.20, 0.20))
CPU = Prior(0.4, (0.35, 0.30, 0.40))


class Observation(NamedTuple):
    """A measured step: predicted `parts`, measured `seconds`, and its `noise` (in ln seconds)."""

    parts: Parts
    seconds: float
    noise: float


class Learnt(NamedTuple):
    """Natural logs of each cause's factor, and their covariance."""

    logs: Parts
    covariance: tuple[Parts, ...]

    def seconds(self, parts: Parts) -> float:
        """Return the seconds of a step with these `parts` on this machine."""
        return _total(parts, self.logs)

    def uncertainty(self, parts: Parts) -> float:
        """Return the standard deviation of ln `seconds` due to the factors."""
        share = _shares(parts, self.logs)
        return math.sqrt(max(0.0, _dot(share, [_dot(row, share) for row in self.covariance])))


def learn(observations: Sequence[Observation], prior: Prior) -> Learnt:
    """Return the most plausible factors given `observations`. Without observations the table is
    unchanged, with the uncertainty of `prior`."""
    logs: Parts = (0.0, 0.0, 0.0)
    common_variance = prior.common**2
    a, b, d = (own**2 for own in prior.own)
    prior_covariance: tuple[Parts, ...] = (
        (common_variance + a, common_variance, common_variance),
        (common_variance, common_variance + b, common_variance),
        (common_variance, common_variance, common_variance + d),
    )
    covariance = prior_covariance
    for _ in range(_PASSES):
        deviation = tuple(-value for value in logs)
        covariance = prior_covariance
        for observation in observations:
            share = _shares(observation.parts, logs)
            predicted_log = math.log(_total(observation.parts, logs)) + _dot(share, deviation)
            gain_direction = [_dot(row, share) for row in covariance]
            gain = 1 / (_dot(share, gain_direction) + observation.noise**2)
            deviation = _plus(
                deviation, gain_direction, gain * (math.log(observation.seconds) - predicted_log)
            )
            rows = zip(covariance, gain_direction, strict=True)
            covariance = tuple(_plus(row, gain_direction, -gain * value) for row, value in rows)
        bounded = [max(-_MAX_STEP, min(_MAX_STEP, value)) for value in deviation]
        logs = _plus(logs, bounded, 1.0)
    return Learnt(logs, covariance)


def _total(parts: Parts, logs: Parts) -> float:
    return sum(p * math.exp(log) for p, log in zip(parts, logs, strict=True))


def _shares(parts: Parts, logs: Parts) -> Parts:
    total = _total(parts, logs)
    return tuple(p * math.exp(log) / total for p, log in zip(parts, logs, strict=True))


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _plus(a: Sequence[float], b: Sequence[float], scale: float) -> Parts:
    return tuple(x + scale * y for x, y in zip(a, b, strict=True))
