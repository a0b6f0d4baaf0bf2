"""Changes to the logits: logit bias, then penalties on earlier tokens, then DRY.

The count of each token is updated as tokens enter and leave the window, so the cost per token does
not grow with the window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from localllm.engine.messages import Sampling
from localllm.engine.sampling.row import Row
from localllm.engine.tokens import TokenBuffer, Tokens
from localllm_backends.contract import SeenTokens


class Tallies:
    """Counts of each token in the last `window` tokens of one growing sequence (< 0: all of it).

    Tokens below zero, which belong to images, are not counted.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._seen = 0
        self._ids = np.zeros(0, dtype=np.int64)
        # By token. It has room for the greatest token that came, and is never longer than the
        # vocabulary.
        self._counts = np.zeros(0, dtype=np.int32)

    def follow(self, tokens: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The ids, in any order, and their counts in the window at the end of `tokens`.

        `tokens` must continue the one of the last call.
        """
        first = self._first(len(tokens))
        before = self._first(self._seen)
        left = _vocabulary_tokens(tokens[before : min(first, self._seen)])
        entered = _vocabulary_tokens(tokens[max(first, self._seen) :])
        self._seen = len(tokens)
        np.subtract.at(self._counts, left, 1)
        self._ids = self._ids[self._counts[self._ids] > 0]
        missing = int(entered.max(initial=-1)) + 1 - len(self._counts)
        if missing > 0:
            self._counts = np.pad(self._counts, (0, max(missing, 0)))
        new = np.unique(entered[self._counts[entered] == 0])
        np.add.at(self._counts, entered, 1)
        self._ids = np.append(self._ids, new)
        return self._ids, self._counts[self._ids]

    def _first(self, length: int) -> int:
        if self._window < 0:
            return 0
        return max(0, length - self._window)


def _vocabulary_tokens(tokens: Sequence[int]) -> NDArray[np.int64]:
    return np.array([t for t in tokens if t >= 0], dtype=np.int64)


def uses_counts(sampling: Sampling) -> bool:
    """True if earlier tokens change the logits."""
    return sampling.repeat_penalty != 1.0 or bool(
        sampling.presence_penalty or sampling.frequency_penalty
    )


def penalised(values: Row, counts: NDArray[np.int32], sampling: Sampling) -> Row:
    """The logits of tokens that came `counts` (> 0) times, after repeat, presence and frequency
    penalties.

    repeat_penalty divides positive logits and multiplies negative ones (llama.cpp, after CTRL:
    arXiv 1909.05858). presence_penalty and frequency_penalty are subtracted as OpenAI documents
    them.
    """
    if sampling.repeat_penalty != 1.0:
        # Of the divided and the multiplied logit, the smaller one is right, or the larger one if
        # the penalty is below 1. This avoids branches in the processor.
        divided = values / sampling.repeat_penalty
        multiplied = values * sampling.repeat_penalty
        if sampling.repeat_penalty > 1.0:
            values = np.minimum(divided, multiplied)
        else:
            values = np.maximum(divided, multiplied)
    if sampling.presence_penalty:
        values = values - sampling.presence_penalty
    if sampling.frequency_penalty:
        values = values - counts.astype(np.float32) * np.float32(sampling.frequency_penalty)
    return values


class Penalties:
    """The bias, penalties and DRY of one request, along one growing sequence of tokens.

    `text`: spells a token (None: no DRY).
    `bias`: ids, and the value added to each (None: no bias).
    """

    def __init__(self, sampling: Sampling, text: TokenBytes | None) -> None:
        self._sampling = sampling
        self._tallies = Tallies(sampling.repeat_last_n)
        self._recent = TokenBuffer()
        ids = np.array(list(sampling.logit_bias), dtype=np.int64)
        bias = np.array(list(sampling.logit_bias.values()), dtype=np.float32)
        self.bias = None
        if len(ids):
            self.bias = (ids, np.where(bias > -100, bias, np.float32(-np.inf)))
        self._dry = text if sampling.dry_multiplier else None
        self.active = uses_counts(sampling) or self.bias is not None or self._dry is not None

    def seen(self, history: Sequence[int]) -> SeenTokens | None:
        """The data that penalties need for the token after `history`; None if there are no such
        penalties.
        """
        s = self._sampling
        if not uses_counts(s) or not s.repeat_last_n:
            return None
        ids, counts = self._tallies.follow(history)
        leaving = -1
        if 0 < s.repeat_last_n <= len(history):
            leaving = history[-s.repeat_last_n]
        return SeenTokens(
            ids, counts, leaving, s.repeat_penalty, s.presence_penalty, s.frequency_penalty
        )

    def repetitions(self, history: Sequence[int]) -> tuple[NDArray[np.int64], Row] | None:
        """The tokens that would continue a repetition, and the value added to each; None without
        DRY.
        """
        if self._dry is None:
            return None
        found = dry_repetitions(self._sampling, history, self._dry, self._recent)
        amounts = [-dry_penalty(self._sampling, length) for length in found.values()]
        return np.array(list(found), dtype=np.int64), np.array(amounts, dtype=np.float32)

    def apply(self, row: Row, history: Sequence[int]) -> None:
        """Change `row` in place, for the token after `history`."""
        _add(row, self.bias)
        if uses_counts(self._sampling):
            ids, counts = self._tallies.follow(history)
            row[ids] = penalised(row[ids], counts, self._sampling)
        _add(row, self.repetitions(history))


def _add(row: Row, additions: tuple[NDArray[np.int64], Row] | None) -> None:
    if additions is not None:
        in_range = (additions[0] >= 0) & (additions[0] < len(row))
        at = additions[0][in_range]
        added = additions[1][in_range]
        # A forbidden token stays forbidden even if a broken row has an infinite logit.
        with np.errstate(invalid="ignore"):
            row[at] = np.where(added == -np.inf, added, row[at] + added)


TokenBytes = Callable[[int], bytes]
# Above this exponent the penalty exceeds the range of a float32, so longer repetitions need not be
# measured.
_MAX_LOG = 88.7228391
# A breaker is first searched for in this many last tokens, because most texts have one there.
_FIRST_SEARCH_TOKENS = 24


def dry_penalty(sampling: Sampling, length: int) -> float:
    """The amount that DRY subtracts from a token that would continue a repetition of `length`
    tokens.

    It follows llama.cpp (llama_sampler_dry_apply).
    """
    exponent = min(length - sampling.dry_allowed_length, _max_exponent(sampling.dry_base))
    return min(sampling.dry_multiplier * sampling.dry_base**exponent, 3e38)


def dry_repetitions(
    sampling: Sampling, history: Sequence[int], text: TokenBytes, recent: TokenBuffer | None = None
) -> dict[int, int]:
    """The tokens that would continue a repetition, each with the length of the longest repetition.

    Lengths are measured only as far as they change the penalty.
    """
    allowed = sampling.dry_allowed_length
    if sampling.dry_penalty_last_n < 0:
        n = len(history)
    else:
        n = min(len(history), sampling.dry_penalty_last_n)
    if n <= allowed:
        return {}
    tokens = (recent or TokenBuffer()).follow(history)[len(history) - n :]
    max_length = min(n - 1, allowed + _max_exponent(sampling.dry_base))
    # A repetition may end anywhere except at the window's own end. Each round keeps those that are
    # one token longer.
    if max_length:
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    else:
        ends = np.arange(n - 1)
    if allowed and not len(_longer(tokens, ends, 1, allowed)):
        return {}
    breakers = [b.encode() for b in sampling.dry_sequence_breakers if b]
    reach = min(max_length, _since_breaker(tokens, breakers, text, max_length))
    if reach < allowed:
        return {}
    found = _longest_by_token(tokens, ends, allowed, reach)
    return {
        t: longest
        for t, longest in found.items()
        if t >= 0 and not any(breaker in text(t) for breaker in breakers)
    }


def _longest_by_token(
    tokens: Tokens, ends: NDArray[np.int64], allowed: int, reach: int
) -> dict[int, int]:
    """The tokens after repetitions of at least `allowed` tokens that end at `ends`.

    Each has the length of the longest repetition, up to `reach`.
    """
    found: dict[int, int]
    found = {}
    if not allowed:
        found = dict.fromkeys(tokens[1:].tolist(), 0)
    for length in range(1, reach + 1):
        if length != 1:
            ends = _longer(tokens, ends, length - 1, length)
        if not len(ends):
            break
        if length >= allowed:
            found.update(dict.fromkeys(tokens[ends + 1].tolist(), length))
    return found


def _longer(tokens: Tokens, ends: NDArray[np.int64], length: int, target: int) -> NDArray[np.int64]:
    """Those of `ends` at which repetitions of `target` tokens end, given that `length` tokens
    match.
    """
    for at in range(length, target):
        ends = ends[ends >= at]
        ends = ends[tokens[ends - at] == tokens[len(tokens) - 1 - at]]
    return ends


def _max_exponent(base: float) -> int:
    if base > 1.000001:
        return int(_MAX_LOG / math.log(base))
    return 0


def _since_breaker(
    window: Tokens, breakers: Sequence[bytes], text: TokenBytes, max_tokens: int
) -> int:
    """The number of tokens after the last breaker in the window; all of them if there is no
    breaker.

    The search stops if the result would be more than `max_tokens`.
    """
    longest = max((len(b) for b in breakers), default=0)
    for n_last in (_FIRST_SEARCH_TOKENS, max_tokens + longest):
        pieces = [text(t) for t in window[-n_last:].tolist()]
        spelled = b"".join(pieces)
        ends = np.cumsum([len(piece) for piece in pieces])
        begins = {b: spelled.rfind(b) for b in breakers}
        found = [(at, at + len(b) - 1) for b, at in begins.items() if at >= 0]
        if found:
            # the tokens in which each breaker begins and ends
            tokens = np.searchsorted(ends, found, side="right").tolist()
            return len(pieces) - 1 - int(max(tokens)[1])
    return len(window)
