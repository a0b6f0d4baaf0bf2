"""What is learnt from a stream of measurements: averages that forget."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Average:
    """An exponential average: each new measurement moves `value` by its part `rate` of the
    difference; by `rising` where that is given and the new one is greater. The first is taken as it
    is (`value` 0: none yet)."""

    rate: float
    value: float = 0.0
    rising: float | None = None

    def add(self, new: float) -> None:
        rate = self.rising if self.rising is not None and new > self.value else self.rate
        self.value = self.value + rate * (new - self.value) if self.value else new


@dataclass
class DecayedRatio:
    """Two sums of which each step keeps the part `decay`: what came of so much."""

    decay: float
    part: float = 0.0
    total: float = 0.0

    def add(self, part: float, total: float = 1.0) -> None:
        self.part = self.part * self.decay + part
        self.total = self.total * self.decay + total

    def rate(self, prior: float, weight: float) -> float:
        """The ratio, where `prior` counts as much as a total of `weight`."""
        return (self.part + prior * weight) / (self.total + weight)

    def total_for(self, ratio: float, part: float) -> float:
        """How much may be added to the total, where `part` is added too, for the ratio to be
        `ratio` at least."""
        return (self.part + part) / ratio - self.total


class PrefillSpeed:
    """How fast prompts are read here. As it is, nobody knows; the engine's ChunkSizer measures
    it."""

    @property
    def prefill_tok_s(self) -> float | None:
        """Tokens/s, once measured."""
        return None
