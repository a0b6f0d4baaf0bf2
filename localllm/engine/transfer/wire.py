"""Writes blocks of KV as frames (frames.py), and reads frames with limits on their size."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from localllm.engine.cache.kv_file import KvEntry
from localllm.engine.transfer.errors import BadFrameError
from localllm.engine.transfer.frames import (
    BLOCK,
    DONE,
    FAIL,
    FRAME,
    HEAD,
    MAX_PADS_BYTES,
    PADS,
    STATE,
)

# tokens of a block. Streams wait while a block is checked and imported, so it is far shorter than a
# block in the cache.
BLOCK_TOKENS = 64
# blocks that may be computed and not yet be read by the other server.
CREDITS = 12
# bytes. A frame that is not a block has at most this length.
_MAX_WORDS_BYTES = 64 * 2**10
_MAX_BYTES = {HEAD: _MAX_WORDS_BYTES, DONE: _MAX_WORDS_BYTES, FAIL: _MAX_WORDS_BYTES}


class Frame(NamedTuple):
    """A received frame."""

    kind: bytes
    body: memoryview

    def words(self) -> dict[str, Any]:
        """The body of a JSON frame. Raises BadFrameError for other bytes."""
        try:
            value = json.loads(bytes(self.body))
        except ValueError as e:
            raise BadFrameError("a frame is not JSON") from e
        if not isinstance(value, dict):
            raise BadFrameError("a frame is not a JSON object")
        return value


def block_frame(entry: KvEntry, data: bytes | memoryview) -> Iterator[bytes]:
    """Yield the frame of a block in pieces. A piece is hashed when it is requested."""
    kind = STATE if entry.state else BLOCK
    yield FRAME.pack(kind, entry.size_bytes(len(data)))
    yield from entry.pieces(data)


class FrameReader:
    """Collects frames from pieces of a response. A block may have up to `most_block_bytes`."""

    def __init__(self, most_block_bytes: int) -> None:
        self._limits = {
            **_MAX_BYTES,
            BLOCK: most_block_bytes,
            STATE: most_block_bytes,
            PADS: MAX_PADS_BYTES,
        }
        self._begun = b""
        self._kind = b""
        self._body = memoryview(b"")
        self._n = 0

    def feed(self, piece: bytes) -> Iterable[Frame]:
        """Yield the frames that `piece` completes. Raises BadFrameError."""
        left = memoryview(piece)
        while left or (self._kind and self._n == len(self._body)):
            if self._kind:
                n = min(len(left), len(self._body) - self._n)
                self._body[self._n : self._n + n] = left[:n]
                self._n += n
                left = left[n:]
                if self._n < len(self._body):
                    return
                frame = Frame(self._kind, self._body.toreadonly())
                self._kind = b""
                yield frame
            else:
                n = FRAME.size - len(self._begun)
                self._begun += bytes(left[:n])
                left = left[n:]
                if len(self._begun) == FRAME.size:
                    self._begin()

    def _begin(self) -> None:
        self._kind, n_bytes = FRAME.unpack(self._begun)
        self._begun = b""
        if n_bytes > self._limits.get(self._kind, -1):
            raise BadFrameError("a frame is unknown or over its limit")
        self._body = np.empty(n_bytes, dtype=np.uint8).data
        self._n = 0
