"""DRY ("don't repeat yourself"): tokens that would lengthen a repetition lose logits, the more the longer it is.

If the last n tokens stand earlier in the window as well, the token that followed there loses
dry_multiplier · dry_base^(n − dry_allowed_length), for the longest such n ≥ dry_allowed_length. A repetition does not
reach back over a sequence breaker, and a token that contains one loses nothing. The definition is llama.cpp's
(llama_sampler_dry_apply), after https://github.com/oobabooga/text-generation-webui/pull/5677.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from localllm.engine.messages import Sampling

TokenBytes = Callable[[int], bytes]
Tokens = NDArray[np.int32]
# Beyond this exponent the penalty leaves the range of a float32, so no repetition need be measured further.
_MOST_LOG = 88.7228391


def penalty(sampling: Sampling, length: int) -> float:
    """What a token loses that would go on with a repetition of `length` tokens."""
    exponent = min(length - sampling.dry_allowed_length, _most_exponent(sampling.dry_base))
    return min(sampling.dry_multiplier * sampling.dry_base**exponent, 3e38)


class Recent:
    """The tokens of one growing line as an array: only what is new is read."""

    def __init__(self) -> None:
        self._tokens = np.empty(256, dtype=np.int32)
        self._n = 0

    def follow(self, line: Seq[int]) -> Tokens:
        """All of `line`, which goes on from that of the last call."""
        n = len(line)
        if n > len(self._tokens):
            self._tokens = np.concatenate([self._tokens[: self._n], np.empty(2 * n - self._n, dtype=np.int32)])
        if n > self._n:
            self._tokens[self._n : n] = line[self._n :]
        self._n = n
        return self._tokens[:n]


def repetitions(
    sampling: Sampling, history: Seq[int], text: TokenBytes, recent: Recent | None = None
) -> dict[int, int]:
    """The tokens that would go on with a repetition, each with the longest one's length (counted as far as it matters)."""
    allowed = sampling.dry_allowed_length
    n = len(history) if sampling.dry_penalty_last_n < 0 else min(len(history), sampling.dry_penalty_last_n)
    if n <= allowed:
        return {}
    tokens = (recent or Recent()).follow(history)[len(history) - n :]
    most = min(n - 1, allowed + _most_exponent(sampling.dry_base))
    # Where a repetition may end: everywhere but at the window's own end. Each round keeps those one token longer.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) if most else np.arange(n - 1)
    if allowed and not len(_longer(tokens, ends, 1, allowed)):
        return {}
    breakers = [b.encode() for b in sampling.dry_sequence_breakers if b]
    reach = min(most, _since_breaker(tokens, breakers, text, most))
    if reach < allowed:
        return {}
    found: dict[int, int] = {}
    if not allowed:
        found = dict.fromkeys(tokens[1:].tolist(), 0)
    for length in range(1, reach + 1):
        ends = ends if length == 1 else _longer(tokens, ends, length - 1, length)
        if not len(ends):
            break
        if length >= allowed:
            found.update(dict.fromkeys(tokens[ends + 1].tolist(), length))
    return {t: longest for t, longest in found.items() if t >= 0 and not any(b in text(t) for b in breakers)}


def _longer(tokens: Tokens, ends: NDArray[np.int64], length: int, wanted: int) -> NDArray[np.int64]:
    """Which of `ends`, where repetitions of `length` tokens end, end ones of `wanted`."""
    for at in range(length, wanted):
        ends = ends[ends >= at]
        ends = ends[tokens[ends - at] == tokens[len(tokens) - 1 - at]]
    return ends


def _most_exponent(base: float) -> int:
    return int(_MOST_LOG / math.log(base)) if base > 1.000001 else 0


def _since_breaker(window: Tokens, breakers: Seq[bytes], text: TokenBytes, most: int) -> int:
    """How many whole tokens stand behind the last breaker in the window; all of them where there is none. It is not looked
    for where the answer would be more than `most`."""
    longest = max((len(b) for b in breakers), default=0)
    if not longest:
        return len(window)
    tail = b""
    spelled = 0
    for behind in range(len(window)):
        # A breaker that begins here ends at most so many tokens on, but for those that spell nothing.
        if spelled > most + longest:
            break
        piece = text(int(window[-1 - behind]))
        spelled += bool(piece)
        # A breaker that begins in this token; one that begins later was found before.
        tail = piece + tail[: longest - 1]
        ends = [at + len(b) for b in breakers if (at := tail.rfind(b, 0, len(piece) + len(b) - 1)) >= 0]
        if ends:
            return _whole_behind(window, len(window) - 1 - behind, max(ends), text)
    return len(window)


def _whole_behind(window: Tokens, first: int, n_bytes: int, text: TokenBytes) -> int:
    """How many tokens stand behind the one in which `n_bytes` from the beginning of token `first` end."""
    at, end = first, len(text(int(window[first])))
    while end < n_bytes and at + 1 < len(window):
        at += 1
        end += len(text(int(window[at])))
    return len(window) - 1 - at
