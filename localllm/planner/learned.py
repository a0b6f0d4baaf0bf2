"""What a machine's own runs teach about it: how much longer than the table says each cause of a
step takes there.

One figure of one model can't say which cause is off, so each may be off by as much as is usual (a
prior), all together more than one alone: what the figure leaves open is shared out by how unsure
each was and how much of the step it took. Figures at two depths, or of two models, tell the causes
apart. (Bayesian linearised regression on ln seconds, solved one figure at a time as an iterated
extended Kalman filter does: Bell and Cathey 1993, doi:10.1109/9.250476.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Parts = tuple[float, float, float]
"""Seconds of one decode step by cause: weights from memory; what every layer costs anyway;
attention over the cache."""

_PASSES = 8
_LARGEST_MOVE = 0.7  # of ln factor in one pass: a wild figure is approached, not jumped at


@dataclass(frozen=True, slots=True)
class Prior:
    """How far a machine may be from the table, as standard deviations of ln seconds: all causes
    together, and each."""

    common: float
    own: Parts


# A graphics card's clocks, driver and cooling move everything alike; its kernels are those of the
# table. Of a CPU neither the memory (busy: half), nor the time per layer (threads meeting), nor
# attention's kernels are known that well.
ACCELERATOR = Prior(0.5, (0.10, 0.20, 0.20))
CPU = Prior(0.4, (0.35, 0.30, 0.40))


@dataclass(frozen=True, slots=True)
class Observation:
    """A step the table says takes `parts` took `seconds`, give or take `noise` (of ln seconds)."""

    parts: Parts
    seconds: float
    noise: float


@dataclass(frozen=True, slots=True)
class Learnt:
    """Natural logs of each cause's factor, and their covariance."""

    logs: Parts
    covariance: tuple[Parts, Parts, Parts]

    def seconds(self, parts: Parts) -> float:
        """How long a step of `parts` takes here."""
        return _total(parts, self.logs)

    def uncertainty(self, parts: Parts) -> float:
        """Standard deviation of ln `seconds`, as far as the factors are its cause."""
        share = _shares(parts, self.logs)
        return math.sqrt(max(0.0, _dot(share, _times(self.covariance, share))))


def learn(observations: Sequence[Observation], prior: Prior) -> Learnt:
    """The most plausible factors given `observations` (none: the table as it is, as unsure as
    `prior`)."""
    logs: Parts = (0.0, 0.0, 0.0)
    c = prior.common**2
    a, b, d = (own**2 for own in prior.own)
    start = (c + a, c, c), (c, c + b, c), (c, c, c + d)
    covariance = start
    for _ in range(_PASSES):
        around, estimate, covariance = logs, (0.0, 0.0, 0.0), start
        for o in observations:
            share = _shares(o.parts, around)
            foreseen = math.log(_total(o.parts, around)) + _dot(share, _minus(estimate, around))
            towards = _times(covariance, share)
            scale = 1 / (_dot(share, towards) + o.noise**2)
            surprise = math.log(o.seconds) - foreseen
            estimate = _plus(estimate, towards, scale * surprise)
            covariance = _narrowed(covariance, towards, scale)
        logs = _plus(around, _bounded(_minus(estimate, around)), 1.0)
    return Learnt(logs, covariance)


def _total(parts: Parts, logs: Parts) -> float:
    return sum(p * math.exp(log) for p, log in zip(parts, logs, strict=True))


def _shares(parts: Parts, logs: Parts) -> Parts:
    total = _total(parts, logs)
    a, b, c = (p * math.exp(log) / total for p, log in zip(parts, logs, strict=True))
    return a, b, c


def _dot(a: Parts, b: Parts) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _plus(a: Parts, b: Parts, scale: float) -> Parts:
    return a[0] + scale * b[0], a[1] + scale * b[1], a[2] + scale * b[2]


def _minus(a: Parts, b: Parts) -> Parts:
    return _plus(a, b, -1.0)


def _times(matrix: tuple[Parts, Parts, Parts], v: Parts) -> Parts:
    return _dot(matrix[0], v), _dot(matrix[1], v), _dot(matrix[2], v)


def _narrowed(
    matrix: tuple[Parts, Parts, Parts], v: Parts, scale: float
) -> tuple[Parts, Parts, Parts]:
    """matrix − scale · v vᵀ."""
    a, b, c = (_plus(row, v, -scale * x) for row, x in zip(matrix, v, strict=True))
    return a, b, c


def _bounded(move: Parts) -> Parts:
    a, b, c = (max(-_LARGEST_MOVE, min(_LARGEST_MOVE, x)) for x in move)
    return a, b, c
