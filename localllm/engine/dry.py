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
# Beyond this exponent the penalty leaves the range of a float32, so no repetition need be measured further.
_MOST_LOG = 88.7228391


def penalise_repetitions(logits: NDArray[np.float32], sampling: Sampling, history: Seq[int], text: TokenBytes) -> None:
    """Take what repetitions cost off `logits`, in place. `text` spells a token."""
    for token, length in repetitions(sampling, history, text).items():
        if token < len(logits):
            logits[token] -= penalty(sampling, length)


def penalty(sampling: Sampling, length: int) -> float:
    """What a token loses that would go on with a repetition of `length` tokens."""
    exponent = min(length - sampling.dry_allowed_length, _most_exponent(sampling.dry_base))
    return min(sampling.dry_multiplier * sampling.dry_base**exponent, 3e38)


def repetitions(sampling: Sampling, history: Seq[int], text: TokenBytes) -> dict[int, int]:
    """The tokens that would go on with a repetition, each with the longest one's length (counted as far as it matters)."""
    allowed = sampling.dry_allowed_length
    n = len(history) if sampling.dry_penalty_last_n < 0 else min(len(history), sampling.dry_penalty_last_n)
    if n <= allowed:
        return {}
    window = history[len(history) - n :]
    breakers = [b.encode() for b in sampling.dry_sequence_breakers if b]
    reach = _since_breaker(window, breakers, text)
    if reach < allowed:
        return {}
    reach = min(reach, n - 1, allowed + _most_exponent(sampling.dry_base))
    tokens = np.asarray(window)
    # Where a repetition may end: everywhere but at the window's own end. Each round keeps those one token longer.
    ends = np.arange(n - 1)
    found: dict[int, int] = {}
    length = 0
    while True:
        if length >= allowed:
            found.update(dict.fromkeys(tokens[ends + 1].tolist(), length))
        if length == reach:
            break
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[n - 1 - length]]
        if not len(ends):
            break
        length += 1
    return {t: longest for t, longest in found.items() if not any(b in text(t) for b in breakers)}


def _most_exponent(base: float) -> int:
    return int(_MOST_LOG / math.log(base)) if base > 1.000001 else 0


def _since_breaker(window: Seq[int], breakers: Seq[bytes], text: TokenBytes) -> int:
    """How many whole tokens stand behind the last breaker in the window; all of them where there is none."""
    longest = max((len(b) for b in breakers), default=0)
    if not longest:
        return len(window)
    tail = b""
    for behind, token in enumerate(reversed(window)):
        piece = text(token)
        # A breaker that begins in this token; one that begins later was found before.
        tail = piece + tail[: longest - 1]
        ends = [at + len(b) for b in breakers if (at := tail.rfind(b, 0, len(piece) + len(b) - 1)) >= 0]
        if ends:
            return _whole_behind(window, len(window) - 1 - behind, max(ends), text)
    return len(window)


def _whole_behind(window: Seq[int], first: int, n_bytes: int, text: TokenBytes) -> int:
    """How many tokens stand behind the one in which `n_bytes` from the beginning of token `first` end."""
    at, end = first, len(text(window[first]))
    while end < n_bytes and at + 1 < len(window):
        at += 1
        end += len(text(window[at]))
    return len(window) - 1 - at
