"""What goes into the next step: pure decisions over counts of tokens. Touches no tensor, no backend, no clock.

A step is one sweep over the weights. Every decoding sequence gets its next token (and its draft); what is left of the
batch goes to prefill. While somebody is decoding, prefill is cut into chunks small enough that a step takes no longer
than `STALL_RATIO` plain decode steps: a long prompt never freezes another stream.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

STALL_RATIO = 7.0
_MIN_CHUNK = 16
_SMOOTHING = 0.2
# Waiting this much longer outweighs this many more tokens to prefill: nobody starves behind short prompts.
_AGE_TOKENS_PER_S = 500.0


@dataclass(frozen=True, slots=True)
class Want:
    """What one admitted request could use: `prefill` tokens still to read, or `decode` tokens (1 + draft length)."""

    key: str
    prefill: int
    decode: int
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Grant:
    """Tokens of request `key` that go into the step."""

    key: str
    n_tokens: int
    prefill: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """Hard limits of one step: batch tokens, rows of logits, and the prefill chunk allowed beside decoding."""

    n_batch: int
    n_outputs: int
    chunk: int


def plan_step(wants: Seq[Want], limits: Limits) -> list[Grant]:
    """Grants for the next step, decodes first. Every decoding request gets at least its one token if the batch has
    room for all of them; drafts are shortened evenly before anybody is left out."""
    decoding = [w for w in wants if not w.prefill and w.decode]
    prefilling = sorted((w for w in wants if w.prefill), key=lambda w: w.prefill - w.waited_s * _AGE_TOKENS_PER_S)
    # A prefill that ends in this step needs one row of logits too.
    outputs = max(len(decoding), limits.n_outputs - min(len(prefilling), 1))
    grants = [
        Grant(w.key, n, prefill=False)
        for w, n in zip(decoding, _share([w.decode for w in decoding], min(limits.n_batch, outputs)), strict=True)
        if n
    ]
    used = sum(g.n_tokens for g in grants)
    rows = limits.n_outputs - used
    room = limits.n_batch - used
    shared = bool(grants)
    for want in prefilling:
        # A prompt with a few tokens left is as impatient as a decoding stream: it is not made to wait for a long one.
        if shared and want.prefill > _MIN_CHUNK:
            room = min(room, max(limits.chunk, 1))
        shared = True if want.prefill <= _MIN_CHUNK else shared
        n = min(want.prefill, room)
        if n <= 0:
            break
        if n == want.prefill:
            if rows <= 0:
                continue
            rows -= 1
        grants.append(Grant(want.key, n, prefill=True))
        room -= n
    return grants


def _share(wanted: Seq[int], budget: int) -> list[int]:
    """Give everybody one, then round by round one more, until `budget` is spent or nobody wants more."""
    given = [0] * len(wanted)
    while budget > 0:
        open_ = [i for i, n in enumerate(wanted) if given[i] < n]
        if not open_:
            break
        for i in open_[:budget]:
            given[i] += 1
        budget -= len(open_)
    return given


def admission_order(waiting: Seq[tuple[str, int, float]]) -> list[str]:
    """Keys of (key, uncached tokens, seconds waited), least work first, with age counted against work."""
    return [key for key, work, waited in sorted(waiting, key=lambda w: w[1] - w[2] * _AGE_TOKENS_PER_S)]


class ChunkSizer:
    """Learns what a decode step and a prefill token cost here, and says how large a chunk beside decoding may be."""

    def __init__(self, n_batch: int) -> None:
        self._n_batch = n_batch
        self._decode_s: float | None = None
        self._token_s: float | None = None

    @property
    def chunk(self) -> int:
        """Prefill tokens allowed in a step that also decodes."""
        if self._decode_s is None or self._token_s is None:
            return min(self._n_batch, 2 * _MIN_CHUNK)
        tokens = (STALL_RATIO - 1.0) * self._decode_s / max(self._token_s, 1e-9)
        return int(max(_MIN_CHUNK, min(self._n_batch, tokens)))

    def observe(self, *, decoded: int, prefilled: int, seconds: float) -> None:
        """Learn from a finished step."""
        if decoded and not prefilled:
            self._decode_s = _blend(self._decode_s, seconds)
        elif prefilled >= _MIN_CHUNK:
            base = self._decode_s if decoded and self._decode_s else 0.0
            self._token_s = _blend(self._token_s, max(seconds - base, 0.0) / prefilled)

    @property
    def prefill_tok_s(self) -> float | None:
        """Measured prefill speed in tokens/s, once known."""
        return 1.0 / self._token_s if self._token_s else None


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
