"""How many tokens to draft: what verifying n tokens costs here (probed while nobody asks, refined
by every step), how often drafts are right, when a drafter that lost tries again, and the lengths
that pay."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from localllm import json_store
from localllm.engine.averages import DecayedRatio
from localllm.engine.host.contention import MOST_SHARE, CpuContention, Mark
from localllm_backends.contract import Backend, BackendFailure, Chunk, NoCellsError

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
_SURPRISED_RATE, _MOST_SURPRISE_TWICE, _BESIDE = 0.5, math.log(2.0), 0.7
# This far from what was probed it is time to probe again.
_DRIFTED = math.log(1.3)
# Drafting must promise this much before it is tried, and may cost no stream more than this.
_WORTH = 1.03
_FLOOR = 0.99


def _around(rows: int) -> tuple[int, int, float]:
    """The knots on both sides of `rows` and how far it is from the first to the second (0 … 1)."""
    high = bisect_left(KNOTS, max(rows, 1))
    if KNOTS[high] == max(rows, 1):
        return high, high, 0.0
    return high - 1, high, (rows - KNOTS[high - 1]) / (KNOTS[high] - KNOTS[high - 1])


# Looked up some dozens of times per step.
_AROUND = [_around(rows) for rows in range(KNOTS[-1] + 1)]


class StepCost:
    """Seconds of a decode step by the rows (tokens, over all sequences) it verifies.

    cost(n) = scale × shape(n), shape(1) = 1. The scale follows the machine (depth of the KV, other
    load), the shape is what decides: it is probed once and refined by every step.
    """

    def __init__(self) -> None:
        self._scale_s = 0.0
        self._shape = [0.0] * len(KNOTS)
        for i, n in enumerate(KNOTS):
            self._shape[i] = 1.0 + _UNMEASURED_ROW * (n - 1)
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
        for i, n in enumerate(KNOTS):
            high = bisect_left(measured, n)
            if high < len(measured) and measured[high] == n:
                seconds = seconds_by_rows[n]
            elif high == len(measured):
                last, before = measured[-1], measured[-2] if len(measured) > 1 else measured[-1]
                slope = (seconds_by_rows[last] - seconds_by_rows[before]) / max(last - before, 1)
                seconds = seconds_by_rows[last] + max(slope, 0.0) * (n - last)
            else:
                a, b = measured[high - 1], measured[high]
                part = (n - a) / (b - a)
                seconds = seconds_by_rows[a] * (1 - part) + seconds_by_rows[b] * part
            # A further row is never free, whatever a noisy probe says.
            least = self._shape[i - 1] + _LEAST_ROW * (n - KNOTS[i - 1]) if i else 1.0
            self._shape[i] = max(seconds / self._scale_s, least)
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


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """What one sequence could draft: `survival[k]` = P(its first k + 1 tokens are accepted),
    non-increasing, and the seconds every drafted token costs before it is verified (0 for lookups),
    or a whole draft that is made `at_once`."""

    survival: Seq[float]
    token_s: float = 0.0
    at_once: bool = False

    def drafting_s(self, length: int) -> float:
        """Seconds that a draft of so many tokens costs before it is verified."""
        return self.token_s * (min(length, 1) if self.at_once else length)

    def speed(self, length: int, cost: Callable[[int], float]) -> float:
        """Tokens per second of one sequence that drafts so many tokens like this; `cost(rows)` in
        seconds."""
        seconds = cost(1 + length) + self.drafting_s(length)
        return (1.0 + sum(self.survival[:length])) / seconds


def choose_lengths(
    candidates: Seq[DraftCandidate], cost: Callable[[int], float], most_steps: float = math.inf
) -> list[int]:
    """Draft length of every decoding sequence for the next step; `cost(rows)` in seconds. With
    drafts it may take `most_steps` times as long as without.

    A sequence that drafts g tokens with survival s gets 1 + s1 + … + sg tokens from the step; for
    constant acceptance a that is (1 − a^(g+1))/(1 − a). Tokens join in order of their chance to
    survive, and of all the prefixes of that order the one with the highest mean log speed wins, if
    it promises `_WORTH` and slows no sequence below `_FLOOR` of what it has without drafts: one
    stream's copy is not paid for by its neighbour.
    """
    n = len(candidates)
    none = [0] * n
    if not n:
        return none
    ranked: list[tuple[float, int]] = []
    for i, candidate in enumerate(candidates):
        ranked += [(s, i) for s in candidate.survival if s > 0.0]
    ranked.sort(key=lambda chance: -chance[0])
    lengths, expected = list(none), [1.0] * n
    plain = cost(n)
    best, best_score = none, n * math.log(_WORTH)
    gain = 0.0
    dear = any(c.token_s for c in candidates)
    for k, (s, i) in enumerate(ranked, start=1):
        gain += math.log1p(s / expected[i])
        expected[i] += s
        lengths[i] += 1
        drafting = (
            max(c.drafting_s(g) for c, g in zip(candidates, lengths, strict=True)) if dear else 0.0
        )
        slower = (cost(n + k) + drafting) / plain
        if slower > most_steps:
            break
        score = gain - n * math.log(slower)
        if score > best_score and min(expected) >= _FLOOR * slower:
            best, best_score = list(lengths), score
    return best


def promises(
    candidates: Seq[DraftCandidate], lengths: Seq[int], cost: Callable[[int], float], gain: float
) -> bool:
    """Whether the streams that draft are expected to be faster by so much in a step with these
    drafts."""
    steps = cost(len(lengths) + sum(lengths)) / cost(len(lengths))
    return all(
        1.0 + sum(c.survival[:n]) >= gain * steps
        for c, n in zip(candidates, lengths, strict=True)
        if n
    )


_EDGES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_PRIOR_WEIGHT = 4.0
# Memory of about 200 guesses engine-wide, and of about 12 within one request.
_SLOW_DECAY = 0.995
_FAST_DECAY = 0.92
_LEAST_SURVIVAL = 0.05
# An earlier process's is recalled as so many guesses at most.
_MOST_RECALLED = 16.0
# What drafting brought is remembered for some 30 steps: three good drafts show that a copy has
# begun.
_GAIN_DECAY = 0.97


def _prior(match: int) -> float:
    """How far a match of n tokens is trusted before anything is measured: 0.44 for 2, 0.80 for 8,
    0.97 for 32, as SmolLM2's own chats, stories, code, JSON and copies followed them at
    temperatures 0 and 0.8 (0.42, 0.82, 0.97; 10,000 guesses)."""
    return 1.0 - 1.0 / (1.0 + 0.35 * match + 0.02 * match**2)


class HitRates:
    """Hit rate of the next token by match length, of one request on top of what all requests of
    this engine saw."""

    def __init__(self, shared: HitRates | None = None) -> None:
        self._shared = shared
        decay = _SLOW_DECAY if shared is None else _FAST_DECAY
        self._averages = [DecayedRatio(decay) for _ in range(len(_EDGES) + 1)]

    def observe(self, match: int, *, hit: bool) -> None:
        """A guess resting on a match of `match` tokens was right or wrong."""
        self._averages[bisect_right(_EDGES, match)].add(hit)
        if self._shared is not None:
            self._shared.observe(match, hit=hit)

    def rate(self, match: int) -> float:
        """Probability that a guess resting on `match` tokens is right."""
        prior = self._shared.rate(match) if self._shared is not None else _prior(match)
        return self._averages[bisect_right(_EDGES, match)].rate(prior, _PRIOR_WEIGHT)

    def survival(self, match: int, length: int) -> list[float]:
        """P(the first k of `length` drafted tokens are all right), k = 1 …: the match grows as they
        are. Ends where a token is too unlikely to be worth a row."""
        alive, out = 1.0, []
        for k in range(length):
            alive *= self.rate(match + k)
            if alive < _LEAST_SURVIVAL:
                break
            out.append(alive)
        return out


class Acceptance:
    """Acceptance rate of one drafter in one request (a draft model's tokens), with the engine-wide
    one as prior. Its `average` is of guesses that were right among those seen, those long ago for
    less."""

    def __init__(self, shared: Acceptance | None = None, prior: float = 0.6) -> None:
        self._shared, self._prior = shared, prior
        self.average = DecayedRatio(_SLOW_DECAY if shared is None else _FAST_DECAY)

    def observe(self, accepted: int, drafted: int) -> None:
        """Of `drafted` tokens the first `accepted` were right; what comes behind the first wrong
        one says nothing."""
        for hit in [True] * accepted + [False] * (accepted < drafted):
            self.average.add(hit)
        if self._shared is not None:
            self._shared.observe(accepted, drafted)

    @property
    def rate(self) -> float:
        """Probability that the next drafted token is accepted."""
        return self.average.rate(
            self._shared.rate if self._shared is not None else self._prior, _PRIOR_WEIGHT
        )

    def survival(self, length: int) -> list[float]:
        """P(the first k are all accepted) = a^k, k = 1 … length; their sum is (1 − a^(g+1))/(1 − a)
        − 1."""
        return [self.rate**k for k in range(1, length + 1)]

    def recall(self, file: Path | None) -> None:
        """Take in how it fared in an earlier process, as kept in `file`."""
        body = json_store.read(file) if file is not None else {}
        with suppress(ValueError, TypeError, KeyError):
            right, seen = float(body["right"]), float(body["seen"])
            # No more of it than some new guesses outweigh: what is asked may have changed.
            weight = min(1.0, _MOST_RECALLED / max(seen, 1.0))
            if 0 <= right <= seen and weight:
                self.average.part, self.average.total = right * weight, seen * weight

    def keep(self, file: Path) -> None:
        """Say in `file` how it fared so far."""
        json_store.keep(file, {"right": self.average.part, "seen": self.average.total})


# A draft model (or the model's own heads) that lost is tried again after this many tokens, then
# twice as many, and so on.
RETRY_TOKENS, _MOST_RETRIES = 24, 6


@dataclass
class BackOff:
    """How one drafter fares in one request, and when it may try again after losing."""

    acceptance: Acceptance
    retry_at: int = 0
    retries: int = 0

    def learn(self, accepted: int, drafted: int, n_generated: int) -> None:
        """Of `drafted` tokens the first `accepted` were right."""
        self.acceptance.observe(accepted, drafted)
        self.retries = min(self.retries + 1, _MOST_RETRIES) if accepted < drafted else 0
        self.retry_at = n_generated + RETRY_TOKENS * 2**self.retries


def gain_lately() -> DecayedRatio:
    """How much quicker one stream is with its drafts than without, in tokens and the plain steps
    that they took: over its last steps, as if it had decoded plainly before. (Over all of its own
    steps it is a ratio without decay.)"""
    before = 1.0 / (1.0 - _GAIN_DECAY)
    return DecayedRatio(_GAIN_DECAY, before, before)


# 64 is where llama.cpp's attention on a CPU begins to read the KV cache once for all rows: at depth
# 2,500 a token of 64 took 9.4 ms, one of 47 took 14.3, and what was extrapolated from 32 kept them
# from being tried.
_ROWS = (1, 2, 4, 8, 16, 32, 64)
_ROUNDS = 3
_BUDGET_S = 1.0
# Again only behind so long a rest, which others have spent at rest too; and ever more rarely: deep
# in a long conversation rows are dearer than in a probe's empty one, each time.
_REST_S = 1.0
_PAUSE_S = 5.0


class CostProbe:
    """Fills in `cost` while nobody asks for anything. `failed`: why nothing can be verified (empty:
    it can).

    Beside other programs a plain step suffers more than one over many rows, and drafts look cheaper
    than they are: a measurement made then is only taken for want of a better, and made again when
    the machine is quiet."""

    def __init__(
        self, backend: Backend, cost: StepCost, others: CpuContention, clock: Callable[[], float]
    ) -> None:
        self._backend, self._cost, self._others, self._clock = backend, cost, others, clock
        self.failed = ""
        self._all: dict[int, float] = {}
        self._quiet: dict[int, float] = {}
        self._round: dict[int, float] = {}
        self._round_began: Mark | None = None
        self._left: list[int] = []
        self._spent_s = 0.0
        self._again_at, self._pause_s = 0.0, _PAUSE_S
        self._resting: Mark | None = None
        self._begin()

    def _begin(self) -> None:
        most = min(self._backend.info.n_batch, self._backend.info.n_outputs)
        self._left = [n for n in _ROWS if n <= most] * _ROUNDS
        self._all, self._quiet, self._round, self._spent_s = {}, {}, {}, 0.0

    def tick(self, rested_s: float) -> bool:
        """Time one verification of the next size on a sequence of its own; True while there are
        more. Nobody has asked for anything for `rested_s`."""
        if self.failed or not (self._left or self._due(rested_s)):
            return False
        if self._backend.cells_free() < max(self._left):
            return False
        if not self._round:
            self._round_began = self._others.mark()
        rows = self._left[0]
        try:
            seconds = self._verification_s(rows)
        except NoCellsError:
            return False
        except BackendFailure as e:
            # What can't be verified must not be drafted: a step that fails costs every request in
            # it.
            self.failed = f"a trial step with {rows} rows failed: {e}"
            return False
        del self._left[0]
        self._spent_s += seconds
        if self._spent_s > _BUDGET_S:
            self._left.clear()
        self._round[rows] = seconds
        if not self._left or self._left[0] <= rows:
            self._end_round()
        if not self._left:
            self._conclude()
        return bool(self._left)

    def _due(self, rested_s: float) -> bool:
        """Begin again, where it is worth it and the machine has been quiet since the last look."""
        if (
            rested_s < _REST_S
            or not (self._cost.drifted or not self._quiet)
            or self._clock() < self._again_at
        ):
            self._resting = None
            return False
        since, self._resting = self._resting, self._others.mark()
        if since is None or self._others.share(since) > MOST_SHARE:
            return False
        self._resting = None
        self._begin()
        return True

    def _end_round(self) -> None:
        assert self._round_began is not None
        kept = [self._all]
        if self._others.share(self._round_began) <= MOST_SHARE:
            kept.append(self._quiet)
        for rows, seconds in self._round.items():
            for into in kept:
                into[rows] = min(into.get(rows, seconds), seconds)
        self._round = {}

    def _conclude(self) -> None:
        if self._quiet or not self._cost.known:
            self._cost.set(self._quiet or self._all)
        self._again_at = self._clock() + self._pause_s
        self._pause_s *= 2

    def _verification_s(self, rows: int) -> float:
        # Different tokens: equal ones go to the same experts of a mixture, which then reads less
        # than it does for a draft.
        first, n_vocab = self._backend.info.bos_token or 0, self._backend.info.n_vocab
        tokens = [(first + i * max(n_vocab // rows, 1)) % n_vocab for i in range(rows)]
        sequence = self._backend.new_sequence()
        started = self._clock()
        try:
            self._backend.step([Chunk(sequence, tokens, rows)]).argmax(0)
            return self._clock() - started
        finally:
            self._backend.drop(sequence)
