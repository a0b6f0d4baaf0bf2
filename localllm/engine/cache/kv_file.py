"""One file of the disk tier: what it says of its block, the block's bytes, and a checksum over all of it.

    magic | lengths | header (JSON) | the line's tokens, int32 | the exported KV | CRC-32 of everything before

The whole line's tokens are in each file, not only the block's own: a block is of use only behind exactly those tokens,
and a restarted engine enters it into its tree although the files before it may be gone.

The checksum is for a disk that errs, not for an enemy: whoever can write here could write a right one of any kind. A file is
hashed when it is written and when it is read, beside those who compute, so what the hash costs is what counts: 0.56 ns a byte,
where SHA-256 without the processor's help takes 4.1. One damaged file of 4 billion passes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from localllm.engine.cache.tree import as_tokens
from localllm.engine.tokens import Tokens

_MAGIC = b"localllm-kv-4\n"
_LENGTHS = struct.Struct("<IQQ")
_CHECKSUM = struct.Struct("<I")
# What a file is read from.
Readable = io.RawIOBase | io.BufferedIOBase
# So much is hashed and handed on at a time: half a millisecond's work.
_PIECE_BYTES = 2**19
_MAX_HEADER_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Entry:
    """What a file holds: KV of the last tokens of the line `tokens`, from `start` on, in `n_data` bytes, or the `state` behind
    the line."""

    tokens: Tokens
    start: int
    n_data: int
    stamp_ns: int
    state: bool

    @property
    def stop(self) -> int:
        """Where the block ends: at the line's end."""
        return len(self.tokens)


def name(identity: str, tokens: Tokens, start: int, *, state: bool = False) -> str:
    """The name of the block's file, without its suffix."""
    digest = hashlib.blake2b(identity.encode(), digest_size=20, person=b"state" if state else b"")
    digest.update(struct.pack("<I", start))
    digest.update(tokens.tobytes())
    return digest.hexdigest()


def size_bytes(identity: str, tokens: Tokens, start: int, data: bytes | memoryview, *, state: bool = False) -> int:
    """How large the block's file is."""
    return len(_before(identity, tokens, start, len(data), state)) + len(data) + _CHECKSUM.size


def pieces(
    identity: str, tokens: Tokens, start: int, data: bytes | memoryview, *, state: bool = False
) -> Iterator[bytes | memoryview]:
    """The file's content, in order and in pieces that each take a moment: one is hashed when it is asked for."""
    checksum = 0
    for content in (memoryview(_before(identity, tokens, start, len(data), state)), memoryview(data)):
        for at in range(0, len(content), _PIECE_BYTES):
            piece = content[at : at + _PIECE_BYTES]
            checksum = zlib.crc32(piece, checksum)
            yield piece
    yield _CHECKSUM.pack(checksum)


def _before(identity: str, tokens: Tokens, start: int, n_data: int, state: bool) -> bytes:
    header = json.dumps({"identity": identity, "start": start, "stop": len(tokens), "state": state}).encode()
    line = tokens.tobytes()
    return b"".join([_MAGIC, _LENGTHS.pack(len(header), len(line), n_data), header, line])


def read_index(path: Path, identity: str) -> Entry | None:
    """What the file says it holds, its data not read; None for anything that is not a file of ours under that name."""
    try:
        stat = path.stat()
        with path.open("rb") as f:
            fixed = f.read(len(_MAGIC) + _LENGTHS.size)
            if not fixed.startswith(_MAGIC) or len(fixed) < len(_MAGIC) + _LENGTHS.size:
                return None
            n_header, n_line, n_data = _LENGTHS.unpack_from(fixed, len(_MAGIC))
            if len(fixed) + n_header + n_line + n_data + _CHECKSUM.size != stat.st_size or n_header > _MAX_HEADER_BYTES:
                return None
            header = json.loads(f.read(n_header))
            tokens = as_tokens(np.frombuffer(f.read(n_line), dtype=np.int32))
    except (OSError, ValueError):
        return None
    if not isinstance(header, dict) or header.get("identity") != identity:
        return None
    # A flipped bit leaves valid JSON often enough: any key may be missing, any value of another type.
    start, stop = header.get("start"), header.get("stop")
    if not isinstance(start, int) or stop != len(tokens) or not 0 <= start < len(tokens):
        return None
    state = header.get("state", False)
    if not isinstance(state, bool) or path.stem != name(identity, tokens, start, state=state):
        return None
    return Entry(tokens, start, n_data, stat.st_mtime_ns, state)


def read(f: Readable, identity: str, rest: Callable[[float], object]) -> memoryview | None:
    """The exported KV in a file's bytes, read and hashed in pieces that each take a moment, with a `rest` after each, which is
    told how long that took, in seconds; None where the checksum or the identity is not right. Raises OSError."""
    raw = np.empty(f.seek(0, os.SEEK_END), dtype=np.uint8)
    f.seek(0)
    whole, read_bytes, checksum = raw.data, 0, 0
    body_bytes = max(0, len(whole) - _CHECKSUM.size)
    while read_bytes < len(whole):
        started = time.perf_counter()
        n_bytes = f.readinto(whole[read_bytes : read_bytes + _PIECE_BYTES])
        if not n_bytes:
            return None
        checksum = zlib.crc32(whole[read_bytes : min(read_bytes + n_bytes, body_bytes)], checksum)
        read_bytes += n_bytes
        rest(time.perf_counter() - started)
    return _kv_of(whole[:body_bytes], identity) if whole[body_bytes:] == _CHECKSUM.pack(checksum) else None


def _kv_of(body: memoryview, identity: str) -> memoryview | None:
    fixed = len(_MAGIC) + _LENGTHS.size
    if len(body) < fixed or body[: len(_MAGIC)] != _MAGIC:
        return None
    n_header, n_line, n_data = _LENGTHS.unpack_from(body, len(_MAGIC))
    if fixed + n_header + n_line + n_data != len(body):
        return None
    try:
        header = json.loads(bytes(body[fixed : fixed + n_header]))
    except ValueError:
        return None
    if not isinstance(header, dict) or header.get("identity") != identity:
        return None
    return body[fixed + n_header + n_line :].toreadonly()
