"""Chooses how many tokens to draft.

It measures the cost of verifying n tokens (with probes while idle, refined by every step) and the
hit rate of drafts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from localllm.engine.contention import MAX_SHARE, CpuContention, Mark
from localllm.engine.step_costs import DecayedRatio, PrefillCost, StepCost
from localllm_backends.contract import Backend, BackendFailure, Chunk, NoCellsError

# Drafting is tried only if it promises at least this speedup. It may slow no stream below _FLOOR.
_WORTH = 1.03
_FLOOR = 0.99


def draft_time_s(length: int, token_s: float, *, at_once: bool) -> float:
    """Seconds to draft `length` tokens. `token_s`: of one token, or of a draft made `at_once`."""
    return token_s * (min(length, 1) if at_once else length)


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """The draft that one sequence could make.

    `survival[k]`: P(its first k + 1 tokens are accepted), non-increasing.
    `token_s`: seconds per drafted token before verification (0 for lookups), or per draft if it is
        made `at_once`.
    """

    survival: Sequence[float]
    token_s: float = 0.0
    at_once: bool = False

    def drafting_s(self, length: int) -> float:
        """Seconds that a draft of `length` tokens costs before it is verified."""
        return draft_time_s(length, self.token_s, at_once=self.at_once)

    def speed(self, length: int, cost: Callable[[int], float]) -> float:
        """Tokens per second of one sequence with drafts of this length. `cost(rows)` is in
        seconds.
        """
        seconds = cost(1 + length) + self.drafting_s(length)
        return (1.0 + sum(self.survival[:length])) / seconds


def rows_of(lengths: Sequence[int], *, padded: bool) -> int:
    """The rows that a step computes if its sequences draft so many tokens. If they are `padded`,
    each has as many rows as the longest one."""
    if padded:
        return len(lengths) * (1 + max(lengths))
    return len(lengths) + sum(lengths)


def choose_lengths(
    candidates: Sequence[DraftCandidate],
    cost: Callable[[int], float],
    max_steps: float = math.inf,
    begin_s: float = 0.0,
    *,
    padded: bool = False,
) -> list[int]:
    """Choose the draft length of every decoding sequence for the next step.

    `cost(rows)` is in seconds. With drafts the step may take `max_steps` times as long as
    without. `begin_s` is a further cost of any draft in this step. `padded`: see `rows_of`.

    A sequence that drafts g tokens with survival s gets 1 + s1 + … + sg tokens from the step. With
    constant acceptance a that is (1 − a^(g+1))/(1 − a). Tokens are added in order of their chance
    to survive. Among all prefixes of that order, the one with the highest mean log speed wins. It
    must promise a gain of `_WORTH`, and every sequence must keep at least `_FLOOR` of its speed
    without drafts. So a stream that copies text does not slow down its neighbour.
    """
    n = len(candidates)
    none = [0] * n
    ranked: list[tuple[float, int]] = []
    for i, candidate in enumerate(candidates):
        ranked += [(s, i) for s in candidate.survival if s > 0.0]
    if not ranked:
        return none
    ranked.sort(key=lambda chance: -chance[0])
    lengths = list(none)
    expected = [1.0] * n
    plain = cost(n)
    best = none
    best_score = n * math.log(_WORTH)
    gain = 0.0
    longest = 0
    drafting_s = 0.0
    for n_drafted, (s, i) in enumerate(ranked, start=1):
        gain += math.log1p(s / expected[i])
        expected[i] += s
        lengths[i] += 1
        longest = max(longest, lengths[i])
        # The streams draft in lockstep.
        drafting_s = max(drafting_s, candidates[i].drafting_s(lengths[i]))
        rows = n * (1 + longest) if padded else n + n_drafted
        slower = (cost(rows) + begin_s + drafting_s) / plain
        if slower > max_steps:
            break
        score = gain - n * math.log(slower)
        if score > best_score and min(expected) >= _FLOOR * slower:
            best = list(lengths)
            best_score = score
    return best


def all_gain(
    candidates: Sequence[DraftCandidate],
    lengths: Sequence[int],
    cost: Callable[[int], float],
    gain: float,
    *,
    padded: bool = False,
) -> bool:
    """Return whether every stream that drafts should become faster by the factor `gain` in this
    step.
    """
    steps = cost(rows_of(lengths, padded=padded)) / cost(len(lengths))
    return all(
        1.0 + sum(c.survival[:n]) >= gain * steps
        for c, n in zip(candidates, lengths, strict=True)
        if n
    )


_EDGES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
PRIOR_WEIGHT = 4.0
# Averages over about 200 guesses for the engine, and about 12 within one request.
SLOW_DECAY = 0.995
FAST_DECAY = 0.92
_MIN_SURVIVAL = 0.05
# The gain of drafting is averaged over about 30 steps. Three good drafts show that a copy has
# begun.
_GAIN_DECAY = 0.97


def _prior(match: int) -> float:
    """The trust in a match of `match` tokens before any measurement.

    It is 0.44 for 2 tokens, 0.80 for 8 and 0.97 for 32. SmolLM2's own chats, stories, code, JSON
    and copies at temperatures 0 and 0.8 gave 0.42, 0.82 and 0.97 (10,000 guesses).
    """
    return 1.0 - 1.0 / (1.0 + 0.35 * match + 0.02 * match**2)


class HitRates:
    """Hit rate of the next token by match length: of one request, with the engine-wide rate as
    prior.
    """

    def __init__(self, shared: HitRates | None = None) -> None:
        self._shared = shared
        decay = SLOW_DECAY if shared is None else FAST_DECAY
        self._averages = [DecayedRatio(decay) for _ in range(len(_EDGES) + 1)]

    def observe(self, match: int, *, hit: bool) -> None:
        """Record whether a guess based on a match of `match` tokens was right."""
        self._averages[bisect_right(_EDGES, match)].add(hit)
        if self._shared is not None:
            self._shared.observe(match, hit=hit)

    def rate(self, match: int) -> float:
        """Probability that a guess based on a match of `match` tokens is right."""
        own, of_prior = self._line(bisect_right(_EDGES, match))
        return own + of_prior * _prior(match)

    def _line(self, band: int) -> tuple[float, float]:
        """Return (a, b): the rate of a match in this band of lengths is a + b × its prior."""
        average = self._averages[band]
        weight = average.total + PRIOR_WEIGHT
        own = average.part / weight
        of_prior = PRIOR_WEIGHT / weight
        if self._shared is None:
            return own, of_prior
        shared, of_shared_prior = self._shared._line(band)
        return own + of_prior * shared, of_prior * of_shared_prior

    def survival(self, match: int, length: int) -> list[float]:
        """P(the first k of `length` drafted tokens are all right), for k = 1, 2, …

        The match grows with each right token. The list ends at the first token that is too
        unlikely to be worth a row.
        """
        alive = 1.0
        out: list[float] = []
        edge = match
        own = of_prior = 0.0
        for at in range(match, match + length):
            if at >= edge:
                band = bisect_right(_EDGES, at)
                own, of_prior = self._line(band)
                edge = _EDGES[band] if band < len(_EDGES) else match + length
            alive *= own + of_prior * _prior(at)
            if alive < _MIN_SURVIVAL:
                break
            out.append(alive)
        return out


def recent_gain() -> DecayedRatio:
    """A new average of one stream's recent speedup by drafts.

    It is the ratio of tokens to the decode steps without drafts that would take the same time. It
    begins as if the stream had decoded without drafts before. (The overall ratio of a stream has
    no decay.)
    """
    before = 1.0 / (1.0 - _GAIN_DECAY)
    return DecayedRatio(_GAIN_DECAY, before, before)


# From 64 rows on, llama.cpp's CPU attention reads the KV cache once for all rows. At depth 2,500 a
# token took 9.4 ms with 64 rows and 14.3 ms with 47. The cost extrapolated from 32 rows was so
# high that 64 rows were never tried.
TRIAL_ROWS = (1, 2, 4, 8, 16, 32, 64)
_ROUNDS = 3
_BUDGET_S = 1.0
# A probe is repeated only after the engine and other programs were idle for this long. The pauses
# between probes grow: in a long conversation every row costs more than in the probe's empty
# sequence, so repeated probes would find the same difference.
_REST_S = 1.0
_PAUSE_S = 5.0


# If first uses are slow, prompts of this many tokens, twice as many, … are read as a trial. The
# trials end once a prompt takes longer than _LONGEST_READ_S, because a new request must wait for
# its end.
_MIN_READ = 16
_LONGEST_READ_S = 0.2


class CostProbe:
    """Fills in `cost` while there are no requests.

    `failed` is the reason why no draft can be verified (empty: drafts can be verified). If first
    uses are slow (`Capabilities.slow_first_steps`), prompts of all sizes are first read twice. The
    first pass loads the kernels, so no request has to wait for them. `reading` learns the times of
    the second pass.

    Other programs slow down a step without drafts more than a step over many rows. Drafts then
    look cheaper than they are. A measurement made under such load is used only if there is no
    better one, and is repeated when the machine is quiet.
    """

    def __init__(
        self,
        backend: Backend,
        cost: StepCost,
        others: CpuContention,
        clock: Callable[[], float],
        reading: PrefillCost,
    ) -> None:
        self._backend = backend
        self._cost = cost
        self._others = others
        self._clock = clock
        self._reading = reading
        self.failed = ""
        self._idle_s = 0.0
        self._ticks = self._measure()

    def tick(self, idle_s: float) -> bool:
        """Time one step of the next size on a sequence of its own. Returns True while there are
        more.

        There was no request for `idle_s` seconds.
        """
        self._idle_s = idle_s
        return next(self._ticks)

    def _measure(self) -> Iterator[bool]:
        """All measurements in order. Yields True before each.

        Yields False while there is no measurement to make.
        """
        if self._backend.capabilities.slow_first_steps:
            yield from self._read_prompts()
        pause_s = _PAUSE_S
        while True:
            seconds, quiet = yield from self._verify_rows()
            if quiet or not self._cost.known:
                self._cost.set(seconds)
            again_s = self._clock() + pause_s
            pause_s = 2 * pause_s
            yield from self._rest(again_s, quiet=quiet)

    def _read_prompts(self) -> Iterator[bool]:
        n_batch = self._backend.info.n_batch
        most = math.inf
        sizes = [_MIN_READ << k for k in range((n_batch // _MIN_READ).bit_length())]
        for again in (False, True):
            for n_tokens in [n for n in sizes if n < most]:
                seconds = math.inf
                with suppress(BackendFailure):
                    seconds = self._trial_s(n_tokens, 1)
                if again and seconds < math.inf:
                    self._reading.learn(n_tokens, seconds)
                yield True
                if seconds > _LONGEST_READ_S:
                    most = n_tokens
                    break

    def _verify_rows(self) -> Generator[bool, None, tuple[dict[int, float], bool]]:
        """The minimal seconds by number of rows, and whether other programs were quiet.

        If they were quiet in some rounds, only those rounds count.
        """
        most = min(self._backend.info.n_batch, self._backend.info.n_outputs)
        sizes = [n for n in TRIAL_ROWS if n <= most]
        every: dict[int, float] = {}
        quiet: dict[int, float] = {}
        spent_s = 0.0
        for _ in range(_ROUNDS):
            began = self._others.mark()
            times = {}
            for rows in sizes:
                if spent_s > _BUDGET_S:
                    break
                times[rows] = yield from self._verified_s(rows)
                spent_s += times[rows]
                yield True
            if self._others.share(began) <= MAX_SHARE:
                kept = [every, quiet]
            else:
                kept = [every]
            for least in kept:
                least |= {n: min(s, least.get(n, s)) for n, s in times.items()}
        return quiet or every, bool(quiet)

    def _verified_s(self, rows: int) -> Generator[bool, None, float]:
        """The seconds of a step with this many rows, measured once there is room for it."""
        while True:
            try:
                if not self.failed and self._backend.cells_free() >= rows:
                    return self._trial_s(rows, rows)
            except NoCellsError:
                pass
            except BackendFailure as e:
                # Drafts that can't be verified must not be made: a failing step fails every
                # request in it.
                self.failed = f"a trial step with {rows} rows failed: {e}"
            yield False

    def _rest(self, again_s: float, *, quiet: bool) -> Iterator[bool]:
        """Wait until a new measurement is useful and the machine was quiet since the last check."""
        resting: Mark | None = None
        while True:
            yield False
            drifted = self._cost.drifted or not quiet
            if self._idle_s < _REST_S or not drifted or self._clock() < again_s:
                resting = None
                continue
            since = resting
            resting = self._others.mark()
            if since is not None and self._others.share(since) <= MAX_SHARE:
                return

    def _trial_s(self, n_tokens: int, outputs: int) -> float:
        # Use different tokens. Equal tokens go to the same experts of a mixture, which then reads
        # fewer weights than it does for a draft.
        first = self._backend.info.bos_token or 0
        n_vocab = self._backend.info.n_vocab
        tokens = [(first + i * max(n_vocab // n_tokens, 1)) % n_vocab for i in range(n_tokens)]
        sequence = self._backend.new_sequence()
        started = self._clock()
        try:
            self._backend.step([Chunk(sequence, tokens, outputs)]).argmax(0)
            return self._clock() - started
        finally:
            self._backend.drop(sequence)
