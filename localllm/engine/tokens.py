"""Tokens of prompts with media (images and sounds). Each is a run of numbers outside the vocabulary,
equal for equal pixels or samples and projector.

So a sequence with media is an ordinary token sequence in the prefix cache, in memory and on disk.
The numbers of media are negative. Each one encodes 29 bits of a hash of the run, and two flags: the
last and the first token of the run. A sequence must never be cut within a run;
`media_boundary` returns the allowed positions. Sequences of users who do not share KV begin with
other numbers, above every vocabulary (`salted`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import Backend, MediaRun
from localllm_backends.control_text import LiteralText, control_texts

# A sequence of token ids, those of media included.
Tokens = NDArray[np.int32]
_FIRST = 1
_LAST = 2
# Size of the token cache. A piece of the maximum length takes at most 2 MiB, a usual one 20 KB.
_KNOWN_PIECES = 64
_KNOWN_CHARS = 2**17
# With this many hashes of 30 bits at the start of a sequence, it is infeasible to find two salts
# whose sequences match.
_SALTED_TOKENS = 4
_ABOVE_VOCABULARIES = 2**30


def salted(tokens: Sequence[int] | Tokens, salt: str, start: int = 0) -> Tokens:
    """`tokens` as the cache stores them. The first one has position `start` in its sequence.

    Sequences with different `salt`s ("" is no salt) have no common prefix. Tokens of media stay as
    they are, because their hash is salted already.
    """
    stored = np.array(tokens, dtype=np.int32)
    if not salt:
        return stored
    for i in range(start, min(start + len(stored), _SALTED_TOKENS)):
        token = int(stored[i - start])
        if token >= 0:
            digest = hashlib.blake2b(f"{i} {token} {salt}".encode(), digest_size=4).digest()
            stored[i - start] = _ABOVE_VOCABULARIES | int.from_bytes(digest) >> 2
    return stored


def split(text: str, marks: Collection[str]) -> list[tuple[str, bool]]:
    """Split `text` into parts, in order: (text, False) or (one of the `marks`, True)."""
    if not marks:
        return [(text, False)]
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", text)
    return [(part, i % 2 == 1) for i, part in enumerate(parts) if part]


class Tokenizer:
    """Tokenises texts with a backend's vocabulary, from any thread. It caches tokens piece by
    piece, because a conversation comes back with every turn."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._known = lru_cache(_KNOWN_PIECES, typed=True)(self._read)

    def tokens(
        self, text: str, *, special: bool = True, add_bos: bool = False, salt: str | None = None
    ) -> list[int]:
        """The tokens of `text`. In marked parts (control_text.py), control tokens are read as text,
        whatever `special` is.

        Each `salt` has its own cache entries (None: no cache). With common entries, the time of a
        guess would reveal other users' texts.
        """
        tokens: list[int] = []
        for run in control_texts(self._backend.info.control_texts).runs(text):
            parsed = special and not isinstance(run, LiteralText)
            for piece in self._backend.text_pieces(run, special=parsed, add_bos=add_bos):
                read = self._read
                if salt is not None and len(piece) <= _KNOWN_CHARS:
                    read = self._known
                tokens += read(piece, parsed, add_bos, salt).tolist()
                add_bos = False
        return tokens

    def _read(self, piece: str, special: bool, add_bos: bool, salt: str | None) -> Tokens:
        return np.array(
            self._backend.tokenize(piece, special=special, add_bos=add_bos), dtype=np.int32
        )


@dataclass(frozen=True, slots=True, eq=False)
class MediaSpan:
    """A run of media, and the position of its first token in a prompt."""

    start: int
    run: MediaRun

    @property
    def stop(self) -> int:
        return self.start + self.run.n_tokens


def numbers(key: bytes, n_tokens: int) -> list[int]:
    """The numbers that represent the `n_tokens` tokens of the run with hash `key`."""
    bits = np.frombuffer(hashlib.shake_128(key).digest(4 * n_tokens), dtype="<u4") >> 3 << 2
    bits[0] |= _FIRST
    bits[-1] |= _LAST
    return [-1 - b for b in bits.tolist()]


def lay_out_media(
    runs: Sequence[list[int] | MediaRun], salt: str = ""
) -> tuple[list[int], tuple[MediaSpan, ...]]:
    """The tokens of a prompt, and the positions of its media."""
    tokens: list[int] = []
    placed: list[MediaSpan] = []
    for run in runs:
        if isinstance(run, list):
            tokens += run
        else:
            placed.append(MediaSpan(len(tokens), run))
            tokens += numbers(run.key + salt.encode(), run.n_tokens)
    return tokens, tuple(placed)


def media_boundary(tokens: Sequence[int] | Tokens, n: int) -> int:
    """The largest number of tokens, at most `n`, after which `tokens` may be cut."""
    if n <= 0 or tokens[n - 1] >= 0 or (-1 - int(tokens[n - 1])) & _LAST:
        return n
    while n > 0 and tokens[n - 1] < 0:
        n -= 1
        if (-1 - int(tokens[n])) & _FIRST:
            break
    return n


def next_media_boundary(tokens: Sequence[int] | Tokens, n: int) -> int:
    """The smallest number of tokens, at least `n`, after which `tokens` may be cut; its full length
    if there is no other."""
    while 0 < n < len(tokens) and tokens[n - 1] < 0 and not (-1 - int(tokens[n - 1])) & _LAST:
        n += 1
    return n


class TokenBuffer:
    """A growing sequence of token ids in one numpy array."""

    def __init__(self, tokens: Sequence[int] | Tokens = ()) -> None:
        self._data: Tokens = np.empty(256, dtype=np.int32)
        self._n = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return self._n

    @property
    def view(self) -> Tokens:
        """The tokens (int32 [n]); valid until the next `extend`."""
        return self._data[: self._n]

    def extend(self, tokens: Sequence[int] | Tokens) -> None:
        n = self._n + len(tokens)
        if n > len(self._data):
            grown = np.empty(2 * n, dtype=np.int32)
            grown[: self._n] = self._data[: self._n]
            self._data = grown
        self._data[self._n : n] = tokens
        self._n = n

    def follow(self, tokens: Sequence[int]) -> Tokens:
        """Update to `tokens`, which continues the one of the last call, and return all of it.
        Copies only the new tokens."""
        self._n = min(self._n, len(tokens))
        self.extend(tokens[self._n :])
        return self.view
