"""How often a guess was right, by what it rested on: running averages that react within a few tokens."""

from __future__ import annotations

from bisect import bisect_right

_EDGES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_PRIOR_WEIGHT = 4.0
# Memory of about 200 guesses engine-wide, and of about 12 within one request.
_SLOW_DECAY = 0.995
_FAST_DECAY = 0.92
_LEAST_SURVIVAL = 0.05
# What drafting brought is remembered for some 30 steps: three good drafts show that a copy has begun.
_GAIN_DECAY = 0.97


def _prior(match: int) -> float:
    """How far a match of n tokens is trusted before anything is measured: 0.44 for 2, 0.80 for 8, 0.97 for 32, as SmolLM2's own
    chats, stories, code, JSON and copies followed them at temperatures 0 and 0.8 (0.42, 0.82, 0.97; 10,000 guesses)."""
    return 1.0 - 1.0 / (1.0 + 0.35 * match + 0.02 * match**2)


class _Average:
    """A decayed hit rate with a prior."""

    __slots__ = ("_decay", "hits", "seen")

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.hits = self.seen = 0.0

    def add(self, hit: bool) -> None:
        self.hits = self.hits * self._decay + hit
        self.seen = self.seen * self._decay + 1.0

    def rate(self, prior: float) -> float:
        return (self.hits + prior * _PRIOR_WEIGHT) / (self.seen + _PRIOR_WEIGHT)


class HitRates:
    """Hit rate of the next token by match length, of one request on top of what all requests of this engine saw."""

    def __init__(self, shared: HitRates | None = None) -> None:
        self._shared = shared
        decay = _SLOW_DECAY if shared is None else _FAST_DECAY
        self._averages = [_Average(decay) for _ in range(len(_EDGES) + 1)]

    def observe(self, match: int, *, hit: bool) -> None:
        """A guess resting on a match of `match` tokens was right or wrong."""
        self._averages[bisect_right(_EDGES, match)].add(hit)
        if self._shared is not None:
            self._shared.observe(match, hit=hit)

    def rate(self, match: int) -> float:
        """Probability that a guess resting on `match` tokens is right."""
        prior = self._shared.rate(match) if self._shared is not None else _prior(match)
        return self._averages[bisect_right(_EDGES, match)].rate(prior)

    def survival(self, match: int, length: int) -> list[float]:
        """P(the first k of `length` drafted tokens are all right), k = 1 …: the match grows as they are. Ends where
        a token is too unlikely to be worth a row."""
        alive, out = 1.0, []
        for k in range(length):
            alive *= self.rate(match + k)
            if alive < _LEAST_SURVIVAL:
                break
            out.append(alive)
        return out


class Acceptance:
    """Acceptance rate of one drafter in one request (a draft model's tokens), with the engine-wide one as prior."""

    def __init__(self, shared: Acceptance | None = None, prior: float = 0.6) -> None:
        self._shared, self._prior = shared, prior
        self._average = _Average(_SLOW_DECAY if shared is None else _FAST_DECAY)

    def observe(self, accepted: int, drafted: int) -> None:
        """Of `drafted` tokens the first `accepted` were right; what comes behind the first wrong one says nothing."""
        for hit in [True] * accepted + [False] * (accepted < drafted):
            self._average.add(hit)
        if self._shared is not None:
            self._shared.observe(accepted, drafted)

    @property
    def rate(self) -> float:
        """Probability that the next drafted token is accepted."""
        return self._average.rate(self._shared.rate if self._shared is not None else self._prior)

    def survival(self, length: int) -> list[float]:
        """P(the first k are all accepted) = a^k, k = 1 … length; their sum is (1 − a^(g+1))/(1 − a) − 1."""
        return [self.rate**k for k in range(1, length + 1)]


class Gain:
    """How much quicker one stream is with its drafts than without: over its last steps, as if it had decoded plainly before, or
    (`whole`) over all of its own."""

    def __init__(self, *, whole: bool = False) -> None:
        self._decay = 1.0 if whole else _GAIN_DECAY
        # Tokens, and the plain steps that they took.
        self._plain = self._spent = 0.0 if whole else 1.0 / (1.0 - _GAIN_DECAY)

    def observe(self, tokens: int, steps: float) -> None:
        """A step brought `tokens` and took as long as so many plain ones."""
        self._plain = self._plain * self._decay + tokens
        self._spent = self._spent * self._decay + steps

    def affords(self, least: float, tokens: int) -> float:
        """How many plain steps the next one may take, if it brings `tokens`, for the gain to stay at `least`."""
        return (self._plain + tokens) / least - self._spent
