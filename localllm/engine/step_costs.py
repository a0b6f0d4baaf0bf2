"""Models learnt from measurements: a decaying ratio, and the cost of the engine's steps on this
machine."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

import numpy as np


@dataclass
class DecayedRatio:
    """The ratio of two sums. Each new value first multiplies both by `decay`."""

    decay: float
    part: float = 0.0
    total: float = 0.0

    def add(self, part: float, total: float = 1.0) -> None:
        self.part = self.part * self.decay + part
        self.total = self.total * self.decay + total

    def add_ones(self, n: int) -> None:
        """Add 1 to both sums, `n` times."""
        kept = self.decay**n
        added = float(n)
        if self.decay < 1.0:
            added = (1.0 - kept) / (1.0 - self.decay)
        self.part = self.part * kept + added
        self.total = self.total * kept + added

    def rate(self, prior: float, weight: float) -> float:
        """The ratio, with `prior` weighted like a total of `weight`."""
        return (self.part + prior * weight) / (self.total + weight)

    def total_for(self, ratio: float, part: float) -> float:
        """How much may be added to the total, together with `part`, so that the ratio stays at
        least `ratio`."""
        return (self.part + part) / ratio - self.total


# Row counts with a stored cost; costs between them are interpolated.
KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Assumed cost of one more row until it is measured, as a share of a one-row step: that of a
# compute-bound machine.
_UNMEASURED_ROW = 0.7
_MIN_ROW = 0.01
_SCALE_RATE = 0.15
_DRAFTED_SCALE_RATE = 0.08
_SHAPE_RATE = 0.15
# One slow step (a burst of another program) must not turn drafting off, so a step's deviation is
# limited to this.
_MAX_SURPRISE = math.log(1.5)
# Two steps with drafts in a row that deviate this far in the same direction are no accident: the
# machine was busy while the shape was probed, or is busy now. They get more weight and a higher
# limit, and also move the costs of neighbouring row counts.
_SURPRISE = math.log(1.2)
_SURPRISED_RATE = 0.5
_MAX_SURPRISE_TWICE = math.log(2.0)
_NEIGHBOUR_SHARE = 0.7
# Probe again if the shape has moved this far since the last probe.
_DRIFTED = math.log(1.3)


# For each number of rows: the indices of the knots below and above, and the position between them
# (0 … 1). A table, because it is read dozens of times per step.
_AROUND = [
    (math.floor(at), math.ceil(at), at % 1.0)
    for at in np.interp(range(KNOTS[-1] + 1), KNOTS, range(len(KNOTS))).tolist()
]


class StepCost:
    """Seconds of a decode step as a function of the rows it verifies (tokens, over all sequences).

    cost(n) = scale × shape(n), shape(1) = 1. The scale follows the machine's state (KV depth, other
    load). The shape decides how much to draft: it is probed once and refined by every step.
    """

    def __init__(self) -> None:
        self._scale_s = 0.0
        self._shape = [1.0 + _UNMEASURED_ROW * (n - 1) for n in KNOTS]
        self._probed = list(self._shape)
        self._last_log_error = 0.0

    @property
    def drifted(self) -> bool:
        """True if the learnt shape is far from the last probe."""
        return any(
            abs(math.log(now / then)) > _DRIFTED
            for now, then in zip(self._shape, self._probed, strict=True)
        )

    @property
    def known(self) -> bool:
        """True after any step was measured."""
        return self._scale_s > 0

    def set(self, seconds_by_rows: dict[int, float]) -> None:
        """Set the cost from a probe: seconds for some of the KNOTS, which must include 1. The other
        knots are interpolated or extrapolated."""
        self._scale_s = seconds_by_rows[1]
        measured = sorted(seconds_by_rows)
        last = measured[-1]
        before = measured[-2:][0]
        slope = (seconds_by_rows[last] - seconds_by_rows[before]) / max(last - before, 1)
        seconds = np.interp(KNOTS, measured, [seconds_by_rows[n] for n in measured])
        beyond = max(slope, 0.0) * np.maximum(np.subtract(KNOTS, last), 0)
        # One more row is never free, even if a noisy probe measured that.
        floor = _MIN_ROW * np.subtract(KNOTS, 1)
        shape = (seconds + beyond) / self._scale_s - floor
        self._shape = [float(s) for s in np.maximum.accumulate(shape) + floor]
        self._probed = list(self._shape)

    def seconds(self, rows: int) -> float:
        """Expected seconds of a step over `rows` tokens (shape only, with scale 1.0, before any
        measurement)."""
        return (self._scale_s or 1.0) * self._shape_of(rows)

    def _shape_of(self, rows: int) -> float:
        if rows > KNOTS[-1]:
            return self._shape[-1] * rows / KNOTS[-1]
        low, high, part = _AROUND[rows]
        return self._shape[low] * (1 - part) + self._shape[high] * part

    def observe(self, rows: int, seconds: float, plain_rows: int = 0) -> None:
        """Learn from a decode step without prefill: `rows` tokens took `seconds`. A step with drafts
        does not change the shape up to `plain_rows`, which a step without drafts would have."""
        if seconds <= 0:
            return
        if not self._scale_s:
            self._scale_s = seconds / self._shape_of(rows)
            return
        log_error = math.log(seconds / self.seconds(rows))
        limited_error = max(-_MAX_SURPRISE, min(_MAX_SURPRISE, log_error))
        # A step with drafts that is slow must not make steps without drafts look slow, too.
        self._scale_s *= math.exp(
            (_DRAFTED_SCALE_RATE if plain_rows else _SCALE_RATE) * limited_error
        )
        if rows == 1:
            return
        if (
            log_error * self._last_log_error > 0
            and min(abs(log_error), abs(self._last_log_error)) > _SURPRISE
        ):
            self._reshape(
                rows,
                max(-_MAX_SURPRISE_TWICE, min(_MAX_SURPRISE_TWICE, log_error)) * _SURPRISED_RATE,
                plain_rows,
                _NEIGHBOUR_SHARE,
            )
        else:
            self._reshape(rows, limited_error * _SHAPE_RATE, plain_rows)
        self._last_log_error = log_error

    def _reshape(
        self, rows: int, log_change: float, plain_rows: int, neighbour_share: float = 0.0
    ) -> None:
        """Change the logarithm of the shape at `rows` by `log_change`. The knots around it, above
        `plain_rows`, change by `neighbour_share`, then `neighbour_share`² … times that."""
        low, high, part = _AROUND[min(rows, KNOTS[-1])]
        for i in range(1, len(KNOTS)):
            weight = (1 - part) * (i == low) + part * (i == high)
            if neighbour_share and low != i != high:
                weight = neighbour_share ** (low - i if i < low else i - high)
            if weight and KNOTS[i] > plain_rows:
                self._shape[i] *= math.exp(log_change * weight)


STALL_RATIO = 7.0
# A slice of prefill ends on time, but the end of a chunk is only estimated. So a slice and the step
# after it may take longer than a step with a chunk. Even if the last step was slow, a slice may
# take `_MIN_SLICE` times as long as a decode step without drafts.
_SLICE_RATIO = 8.0
_MIN_SLICE = 5.0
_MIN_CHUNK = 16
# Longest step, as soon as the speed is known, while no request decodes. It applies if other
# requests read their prompts or wait, or if a cancel must wait for the end of the step.
PROMPT_STEP_S = 0.35
# Longest step if a single request reads its prompt and a cancel can interrupt the step. Only a
# request that arrives now waits for it. Each step has synchronisation costs: on two busy cores 740
# sleeps of threads with SmolLM2 and 540 with gemma-3-270m, however many tokens it has. 3,000 tokens
# took 5 to 10 % longer in steps of 128 than of 512, the step size of llama.cpp's own server. With
# 4 s, a new request waited for 6 to 9 s on a busy machine.
SINGLE_STEP_S = 1.5
_PROMPT_CHUNK = 128
_DEVICE_CHUNK = 512
_DEVICE_STEP_S = 4.0
# llama.cpp's attention on a CPU computes tiles of this many tokens, full or not. On a device each
# size has its own kernels, so only multiples of `_DEVICE_TILE` are used.
_TILE = 64
_DEVICE_TILE = 8
# The cost of a decode step is the median of this many steps with the same number of sequences. A
# few slow steps (a buffer grew, another program ran, a long prompt was tokenised) do not predict
# the next one. With an average, they made every request wait a quarter longer.
_STEPS = 31
_MIN_STEPS = 5
# Assumed noise as a share of a step's time. It is smaller if the step was slower than expected: a
# chunk that is too large stalls streams, while one too small costs little. A step slower than
# `_MAX_SLOWDOWN` times the expected time (kernels are loaded, another program runs) counts as that
# much.
_SLOWER_NOISE = 0.05
_FASTER_NOISE = 0.15
_MAX_SLOWDOWN = 2.0
# By the next step the costs may change by this share. The cost of a token grows with its depth (5 %
# per chunk, early in a long prompt). The fixed part changes by this share of the cost of
# `_FIXED_TOKENS` tokens.
_DRIFT = 0.05
_FIXED_TOKENS = 64
# Until steps of two sizes were measured, this share of the first measured time is assumed to be the
# fixed part.
_FIXED = 0.3
# Cost is not exactly linear. On a device, up to this share of the time of a mixed step may exceed
# the linear estimate. It is assumed until such a step was measured.
_MAX_NONLINEAR = 0.25


class PrefillCost:
    """The cost of steps that read prompts: a fixed part, and a part per token. Tokens of streams in
    the same step count too.

    Learnt from every such step with a Kalman filter over both parts.
    """

    def __init__(self, token_s: float = 0.0) -> None:
        # seconds per prompt token (0 before the first measurement), and per step
        self.token_s = token_s
        self._fixed_s = 0.0
        # covariance of both parts
        self._covariance = np.zeros((2, 2))

    def seconds(self, n_tokens: int, steps: int = 1) -> float:
        """Expected seconds of `steps` steps with `n_tokens` tokens together."""
        return steps * self._fixed_s + n_tokens * self.token_s

    @property
    def cheap_tokens(self) -> int:
        """The tokens that take as long as the fixed part of a step; 0 before the first
        measurement."""
        if self.token_s:
            return int(self._fixed_s / self.token_s)
        return 0

    def tokens_in(self, seconds: float) -> int:
        """The most tokens that a step of `seconds` can have; 0 before the first measurement."""
        if self.token_s:
            return int((seconds - self._fixed_s) / self.token_s)
        return 0

    def learn(self, n_tokens: int, seconds: float, steps: int = 1) -> None:
        """Learn that `steps` steps with `n_tokens` tokens together took `seconds`."""
        expected_s = self.seconds(n_tokens, steps)
        if expected_s:
            seconds = min(seconds, _MAX_SLOWDOWN * expected_s)
        else:
            self._covariance = np.diag([_FIXED, 1 / n_tokens]) ** 2 * seconds**2
        regressors = np.array([steps, n_tokens])
        difference = seconds - expected_s
        noise_s = (_SLOWER_NOISE if difference > 0 else _FASTER_NOISE) * seconds
        covariance = self._covariance @ regressors
        gain = covariance / (regressors @ covariance + noise_s**2)
        fixed_s = self._fixed_s + float(gain[0]) * difference
        # The fixed part can't be negative: the tokens take the rest of the correction.
        token_s = self.token_s + float(gain[1]) * difference + min(fixed_s, 0.0) * steps / n_tokens
        self._fixed_s = max(fixed_s, 0.0)
        self.token_s = max(token_s, self.token_s / 2, 1e-9)
        drift = _DRIFT * np.array([self.seconds(_FIXED_TOKENS), self.token_s])
        self._covariance += np.diag(drift**2) - np.outer(gain, covariance)


class ChunkSizer(PrefillCost):
    """Learns the cost of decode steps and of prompt tokens, with and without decoding, and returns
    how large a prefill chunk may be.

    `gap_s`: on a device, the time that a chunk may add to a step. If a decode step without drafts
    takes longer, that time applies instead.
    """

    def __init__(self, n_batch: int, *, on_device: bool = False, gap_s: float = 0.0) -> None:
        super().__init__()
        self._n_batch = n_batch
        self._on_device = on_device
        self._gap_s = gap_s
        # (streams, seconds) of the last decode steps without drafts
        self._decodes: deque[tuple[int, float]] = deque(maxlen=_STEPS)
        # Streams in the last step. About how many prompt tokens recent mixed steps had.
        self._streams = self._recent_prefill = 0
        # on a device, the share of a mixed step's time above the linear estimate
        self._nonlinear_share = _MAX_NONLINEAR if on_device else 0.0
        # Submitted steps whose results are not awaited yet: their number, their tokens, and the
        # seconds to submit them.
        self._unsynced = (0, 0, 0.0)

    @property
    def decode_s(self) -> float:
        """Seconds of a decode step without drafts for the current number of streams, or about as
        many; 0 if not measured yet."""
        samples = [s for n, s in self._decodes if n == self._streams]
        if len(samples) < _MIN_STEPS:
            similar = [s for n, s in self._decodes if n <= 2 * self._streams <= 4 * n]
            samples = similar or [s for _, s in self._decodes]
        if samples:
            return statistics.median(samples)
        return 0.0

    @property
    def chunk(self) -> int:
        """Prefill tokens allowed in a step that also decodes. At most twice as many as in recent
        steps: larger chunks are measured before they are used."""
        streams = self._streams
        decode_s = self.decode_s
        step_s = STALL_RATIO * decode_s
        tile = 1
        if self._on_device:
            decode_s = decode_s or self.seconds(streams)
            step_s = decode_s + max(decode_s, self._gap_s)
            tile = _DEVICE_TILE
        if not self.token_s or not step_s:
            return min(self._n_batch, 2 * _MIN_CHUNK)
        tokens = self.tokens_in((1 - self._nonlinear_share) * step_s - self._depth_s)
        tokens = min(tokens - streams, 2 * self._recent_prefill)
        tokens -= tokens % tile if tokens > _TILE else 0
        return max(_MIN_CHUNK, min(self._n_batch, tokens))

    @property
    def _depth_s(self) -> float:
        """Extra seconds of a decode step compared with a prefill of as many tokens, because the
        streams are deep in their contexts."""
        return max(0.0, self.decode_s - self.seconds(self._streams))

    def slice_s(self, last_step_s: float) -> float:
        """Seconds of other work allowed before the next decode step, which will take about as long
        as the last."""
        decode_s = self.decode_s or PROMPT_STEP_S / _SLICE_RATIO**2
        return max(_SLICE_RATIO * decode_s - last_step_s, _MIN_SLICE * decode_s)

    def prompt_tokens(self, step_s: float, *, several_keys: bool = False) -> int:
        """Prefill tokens allowed in a step without decoding that may take `step_s` (0: the speed
        does not matter). A device gains from large steps, so its steps may take longer.

        If there are `several_keys`, a request of another key may arrive and wait for the step, so
        a step that takes longer has one tile."""
        min_tokens = _PROMPT_CHUNK
        if self._on_device:
            min_tokens = _DEVICE_CHUNK
            step_s = max(step_s, _DEVICE_STEP_S)
        elif step_s and self.seconds(min_tokens) > (step_s if several_keys else SINGLE_STEP_S):
            min_tokens = _TILE
        return min(self._n_batch, max(min_tokens, self.tokens_in(step_s) // _TILE * _TILE))

    def observe(self, *, decoded: int, prefilled: int, seconds: float, waited: bool = True) -> None:
        """Learn from a finished step. `waited`: False if the step was only submitted. Its computing
        time is then part of a later step's time."""
        self._streams = decoded
        if decoded and not prefilled:
            self._decodes.append((decoded, seconds))
        elif prefilled >= _MIN_CHUNK:
            steps, tokens, before_s = self._unsynced
            steps += 1
            tokens += decoded + prefilled
            seconds += before_s
            if waited:
                self._unsynced = (0, 0, 0.0)
            else:
                self._unsynced = (steps, tokens, seconds)
            if waited and seconds > 0.0:
                depth_s = self._depth_s if decoded else 0.0
                self.learn(tokens, max(seconds - depth_s, seconds / 2), steps)
                if decoded and self._on_device:
                    expected_s = self.seconds(tokens, steps) + steps * depth_s
                    self._nonlinear_share = min(max(1 - expected_s / seconds, 0.0), _MAX_NONLINEAR)
            self._recent_prefill = max(
                self._recent_prefill // 2 if decoded else self._recent_prefill, prefilled
            )
