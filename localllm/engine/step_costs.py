"""What is learnt from a stream of measurements: a ratio that forgets, and what the engine's steps
cost here."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

import numpy as np


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


# Row counts whose cost is kept; between them it is interpolated.
KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Until it is measured, a further row is taken to cost this part of a whole step: a compute-bound
# machine.
_UNMEASURED_ROW = 0.7
_LEAST_ROW = 0.01
_SCALE_RATE = 0.15
_SHAPE_RATE = 0.15
# One slow step (somebody else's burst) must not turn drafting off: a step counts as at most this
# far off.
_MOST_SURPRISE = math.log(1.5)
# Two steps with drafts on end that are this far off in the same direction are no accident: the
# machine was busy while the shape was probed, or is now. They count more and further, also for the
# numbers of rows beside theirs.
_SURPRISE = math.log(1.2)
_SURPRISED_RATE = 0.5
_MOST_SURPRISE_TWICE = math.log(2.0)
_BESIDE = 0.7
# This far from what was probed it is time to probe again.
_DRIFTED = math.log(1.3)


# By rows: the numbers of the knots on both sides and how far it is from the first to the second
# (0 … 1). Looked up some dozens of times per step.
_AROUND = [
    (math.floor(at), math.ceil(at), at % 1.0)
    for at in np.interp(range(KNOTS[-1] + 1), KNOTS, range(len(KNOTS))).tolist()
]


class StepCost:
    """Seconds of a decode step by the rows (tokens, over all sequences) it verifies.

    cost(n) = scale × shape(n), shape(1) = 1. The scale follows the machine (depth of the KV, other
    load), the shape is what decides: it is probed once and refined by every step.
    """

    def __init__(self) -> None:
        self._scale_s = 0.0
        self._shape = [1.0 + _UNMEASURED_ROW * (n - 1) for n in KNOTS]
        self._probed = list(self._shape)
        self._last_off = 0.0

    @property
    def drifted(self) -> bool:
        """True where what was learnt since the last probe is far from it."""
        return any(
            abs(math.log(now / then)) > _DRIFTED
            for now, then in zip(self._shape, self._probed, strict=True)
        )

    @property
    def known(self) -> bool:
        """True once any step was measured."""
        return self._scale_s > 0

    def set(self, seconds_by_rows: dict[int, float]) -> None:
        """Take a probe's result: seconds for some of the KNOTS, 1 among them. Others are scaled
        between them."""
        self._scale_s = seconds_by_rows[1]
        measured = sorted(seconds_by_rows)
        last = measured[-1]
        before = measured[-2:][0]
        slope = (seconds_by_rows[last] - seconds_by_rows[before]) / max(last - before, 1)
        seconds = np.interp(KNOTS, measured, [seconds_by_rows[n] for n in measured])
        beyond = max(slope, 0.0) * np.maximum(np.subtract(KNOTS, last), 0)
        # A further row is never free, whatever a noisy probe says.
        least = _LEAST_ROW * np.subtract(KNOTS, 1)
        shape = (seconds + beyond) / self._scale_s - least
        self._shape = [float(s) for s in np.maximum.accumulate(shape) + least]
        self._probed = list(self._shape)

    def seconds(self, rows: int) -> float:
        """Expected seconds of a step over `rows` tokens (1.0 × rows' shape while nothing is
        measured)."""
        return (self._scale_s or 1.0) * self._shape_of(rows)

    def _shape_of(self, rows: int) -> float:
        if rows > KNOTS[-1]:
            return self._shape[-1] * rows / KNOTS[-1]
        low, high, part = _AROUND[rows]
        return self._shape[low] * (1 - part) + self._shape[high] * part

    def observe(self, rows: int, seconds: float) -> None:
        """A pure decode step over `rows` tokens took `seconds`."""
        if seconds <= 0:
            return
        if not self._scale_s:
            self._scale_s = seconds / self._shape_of(rows)
            return
        off = math.log(seconds / self.seconds(rows))
        near = max(-_MOST_SURPRISE, min(_MOST_SURPRISE, off))
        self._scale_s *= math.exp(_SCALE_RATE * near)
        if rows == 1:
            return
        if off * self._last_off > 0 and min(abs(off), abs(self._last_off)) > _SURPRISE:
            self._reshape(
                rows,
                max(-_MOST_SURPRISE_TWICE, min(_MOST_SURPRISE_TWICE, off)) * _SURPRISED_RATE,
                _BESIDE,
            )
        else:
            self._reshape(rows, near * _SHAPE_RATE)
        self._last_off = off

    def _reshape(self, rows: int, by: float, beside: float = 0.0) -> None:
        """Move (the log of) the shape at `rows` by so much, and by `beside`, `beside`² … of that at
        the knots around."""
        low, high, part = _AROUND[min(rows, KNOTS[-1])]
        for i in range(1, len(KNOTS)):
            weight = (1 - part) * (i == low) + part * (i == high)
            if beside and low != i != high:
                weight = beside ** (low - i if i < low else i - high)
            if weight:
                self._shape[i] *= math.exp(by * weight)


STALL_RATIO = 7.0
# A slice of time ends where it should, a chunk where it was guessed to: with the step behind it it
# may take longer than a step with a chunk. Where the steps themselves are slow it is still worth
# its while.
_SLICE_RATIO = 8.0
_LEAST_SLICE = 5.0
_MIN_CHUNK = 16
# Nobody decodes, but others read their prompts or wait, or a cancel has to wait for the end of the
# step: no step takes longer than this, once speed is known.
PROMPT_STEP_S = 0.35
# One prompt, nobody else, and its cancel ends the step in the middle: only who comes now waits for
# it. Each step costs its threads' waits for each other (on two busy cores 740 sleeps with SmolLM2
# and 540 with gemma-3-270m, however many tokens are in it): 3,000 tokens took 5 to 10 % longer in
# steps of 128 than of 512, which is what llama.cpp's own server takes.
SINGLE_STEP_S = 4.0
_PROMPT_CHUNK = 128
_DEVICE_CHUNK = 512
# llama.cpp's attention on a CPU computes tiles of so many tokens, full or not; on a device some
# sizes are enough, each with kernels of its own.
_TILE = 64
_DEVICE_TILE = 8
# A decode step costs the median of so many with as many sequences: a few slow ones (a buffer that
# grew, another program, a long prompt that is tokenised) are no measure of the next, and in an
# average they made everybody wait a quarter longer.
_STEPS = 31
_FEWEST_STEPS = 5
# A step's time is believed to this part of it, more closely where it is dearer than thought: a
# chunk too large is a stall while one too small costs little. What takes more than so many times
# as long as was thought (kernels are loaded, another program runs) counts as that.
_DEARER = 0.05
_CHEAPER = 0.15
_MOST_DEARER = 2.0
# A step later the costs may be others by so much: a token's grows with the depth it is read at (5 %
# a chunk, early in a long prompt), what is fixed by as much as so many tokens may cost.
_DRIFT = 0.05
_FIXED_TOKENS = 64
# Before steps of two sizes were seen, about this part of the first is taken to be fixed.
_FIXED = 0.3
# The curve bends: on a device as much of the time of a step beside streams may be beyond what the
# line says, and is thought to be before any was made.
_MOST_BENT = 0.25


class PrefillCost:
    """What steps that read prompts cost here: a fixed part, and one for each of their tokens, those
    of streams beside them included. Learnt from every such step (a Kalman filter over both
    parts)."""

    def __init__(self, token_s: float = 0.0) -> None:
        # What each token of a prompt takes, 0 until any was measured; and what is fixed.
        self.token_s = token_s
        self._fixed_s = 0.0
        # how unsure both are, and of each other's share
        self._unsure = np.zeros((2, 2))

    def seconds(self, n_tokens: int, steps: int = 1) -> float:
        """What so many `steps` of `n_tokens` together take, as far as is known."""
        return steps * self._fixed_s + n_tokens * self.token_s

    def tokens_in(self, seconds: float) -> int:
        """How many tokens a step of so long has at most; 0 where nothing is known."""
        if self.token_s:
            return int((seconds - self._fixed_s) / self.token_s)
        return 0

    def learn(self, n_tokens: int, seconds: float, steps: int = 1) -> None:
        """So many `steps` of `n_tokens` together took so long."""
        thought_s = self.seconds(n_tokens, steps)
        if thought_s:
            seconds = min(seconds, _MOST_DEARER * thought_s)
        else:
            self._unsure = np.diag([_FIXED, 1 / n_tokens]) ** 2 * seconds**2
        had = np.array([steps, n_tokens])
        difference = seconds - thought_s
        noise_s = (_DEARER if difference > 0 else _CHEAPER) * seconds
        covariance = self._unsure @ had
        gain = covariance / (had @ covariance + noise_s**2)
        fixed_s = self._fixed_s + float(gain[0]) * difference
        # What can't be less than nothing leaves its part of the difference to the tokens.
        token_s = self.token_s + float(gain[1]) * difference + min(fixed_s, 0.0) * steps / n_tokens
        self._fixed_s = max(fixed_s, 0.0)
        self.token_s = max(token_s, self.token_s / 2, 1e-9)
        drift = _DRIFT * np.array([self.seconds(_FIXED_TOKENS), self.token_s])
        self._unsure += np.diag(drift**2) - np.outer(gain, covariance)


class ChunkSizer(PrefillCost):
    """Learns what a decode step and a prompt's tokens cost here, beside decoding and alone, and
    says how large a chunk may be. `gap_s`: on a device, what a chunk may add to a step, or as much
    as a plain step takes if that is longer."""

    def __init__(self, n_batch: int, *, on_device: bool = False, gap_s: float = 0.0) -> None:
        super().__init__()
        self._n_batch = n_batch
        self._on_device = on_device
        self._gap_s = gap_s
        # (streams, seconds) of the last plain decode steps
        self._decodes: deque[tuple[int, float]] = deque(maxlen=_STEPS)
        # streams in the last step; about how many tokens of prompts such steps had lately
        self._streams = self._reach = 0
        # on a device the part of such a step's time that is beyond the line
        self._bent = _MOST_BENT if on_device else 0.0
        # steps that nobody waited for: how many, their tokens, what ordering them took
        self._unread = (0, 0, 0.0)

    @property
    def plain_s(self) -> float:
        """Seconds of a decode step of as many streams as there are, or about as many; 0 where none
        was made."""
        alike = [s for n, s in self._decodes if n == self._streams]
        if len(alike) < _FEWEST_STEPS:
            near = [s for n, s in self._decodes if n <= 2 * self._streams <= 4 * n]
            alike = near or [s for _, s in self._decodes]
        if alike:
            return statistics.median(alike)
        return 0.0

    @property
    def chunk(self) -> int:
        """Prefill tokens allowed in a step that also decodes: no more than twice as many as the
        last had, for what is beyond is tried, not guessed."""
        streams = self._streams
        plain_s = self.plain_s
        step_s = STALL_RATIO * plain_s
        tile = 1
        if self._on_device:
            plain_s = plain_s or self.seconds(streams)
            step_s = plain_s + max(plain_s, self._gap_s)
            tile = _DEVICE_TILE
        if not self.token_s or not step_s:
            return min(self._n_batch, 2 * _MIN_CHUNK)
        tokens = self.tokens_in((1 - self._bent) * step_s - self._depth_s)
        tokens = min(tokens - streams, 2 * self._reach)
        tokens -= tokens % tile if tokens > _TILE else 0
        return max(_MIN_CHUNK, min(self._n_batch, tokens))

    @property
    def _depth_s(self) -> float:
        """What a step of the streams takes beyond what one of as many tokens of a prompt does: they
        are deep."""
        return max(0.0, self.plain_s - self.seconds(self._streams))

    def slice_s(self, last_step_s: float) -> float:
        """Seconds of other work that may come before the next decode step, which will take about as
        long as the last."""
        plain_s = self.plain_s or PROMPT_STEP_S / _SLICE_RATIO**2
        return max(_SLICE_RATIO * plain_s - last_step_s, _LEAST_SLICE * plain_s)

    def prompt_tokens(self, step_s: float) -> int:
        """Prefill tokens allowed in a step that decodes nothing and may take `step_s`; on a device,
        which gains by large ones, longer."""
        least = _PROMPT_CHUNK
        if self._on_device:
            least = _DEVICE_CHUNK
            step_s = max(step_s, SINGLE_STEP_S)
        return min(self._n_batch, max(least, self.tokens_in(step_s) // _TILE * _TILE))

    def observe(self, *, decoded: int, prefilled: int, seconds: float, waited: bool = True) -> None:
        """Learn from a finished step. `waited`: False where it was only ordered, and nobody waited
        for what it computes: the next ones' time is that of all of them."""
        self._streams = decoded
        if decoded and not prefilled:
            self._decodes.append((decoded, seconds))
        elif prefilled >= _MIN_CHUNK:
            steps, tokens, before_s = self._unread
            steps += 1
            tokens += decoded + prefilled
            seconds += before_s
            if waited:
                self._unread = (0, 0, 0.0)
            else:
                self._unread = (steps, tokens, seconds)
            if waited and seconds > 0.0:
                depth_s = self._depth_s if decoded else 0.0
                self.learn(tokens, max(seconds - depth_s, seconds / 2), steps)
                if decoded and self._on_device:
                    thought_s = self.seconds(tokens, steps) + steps * depth_s
                    self._bent = min(max(1 - thought_s / seconds, 0.0), _MOST_BENT)
            self._reach = max(self._reach // 2 if decoded else self._reach, prefilled)
