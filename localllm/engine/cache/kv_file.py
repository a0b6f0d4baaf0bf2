"""One file of the disk tier: what it says of its block, the block's bytes, and a checksum over all
of it; and reading files before they are needed.

    magic | lengths | header (JSON) | the sequence's tokens, int32 | the exported KV | CRC-32 of
    everything before

The whole sequence's tokens are in each file, not only the block's own: a block is of use only
behind exactly those tokens, and a restarted engine enters it into its tree although the files
before it may be gone.

The checksum is for a disk that errs, not for an enemy: whoever can write here could write a right
one of any kind. A file is hashed when it is written and when it is read, beside those who compute,
so what the hash costs is what counts: 0.56 ns a byte, where SHA-256 without the processor's help
takes 4.1. One damaged file of 4 billion passes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import queue
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localllm.engine.cache import tunables
from localllm.engine.cache.eviction import Block
from localllm.engine.cache.tree import as_tokens
from localllm.engine.tokens import Tokens

_MAGIC = b"localllm-kv-4\n"
_LENGTHS = struct.Struct("<IQQ")
_CHECKSUM = struct.Struct("<I")
# What a file is read from.
Readable = io.RawIOBase | io.BufferedIOBase
_MAX_HEADER_BYTES = 2**16
_FIXED_BYTES = len(_MAGIC) + _LENGTHS.size


@dataclass(frozen=True, slots=True, eq=False)
class KvEntry:
    """What a file holds: KV of the last tokens of the sequence `tokens`, from `start` on, or the
    `state` behind the sequence. `identity` names all that gives the bytes their meaning."""

    identity: str
    tokens: Tokens
    start: int
    state: bool = False

    @property
    def file_name(self) -> str:
        """A hash of what it is."""
        digest = hashlib.blake2b(
            self.identity.encode(), digest_size=20, person=b"state" if self.state else b""
        )
        digest.update(struct.pack("<I", self.start))
        digest.update(self.tokens.tobytes())
        return f"{digest.hexdigest()}.kv"

    def head(self, n_data: int) -> bytes:
        """The file's bytes before its `n_data` of KV."""
        about = {
            "identity": self.identity,
            "start": self.start,
            "stop": len(self.tokens),
            "state": self.state,
        }
        header, prefix = json.dumps(about).encode(), self.tokens.tobytes()
        return b"".join([_MAGIC, _LENGTHS.pack(len(header), len(prefix), n_data), header, prefix])

    def size_bytes(self, n_data: int) -> int:
        return len(self.head(n_data)) + n_data + _CHECKSUM.size

    def pieces(self, data: bytes | memoryview) -> Iterator[bytes | memoryview]:
        """The file's content, in order and in pieces that each take a moment: one is hashed when it
        is asked for."""
        checksum = 0
        for content in (memoryview(self.head(len(data))), memoryview(data)):
            for at in range(0, len(content), tunables.FILE_PIECE_BYTES):
                piece = content[at : at + tunables.FILE_PIECE_BYTES]
                checksum = zlib.crc32(piece, checksum)
                yield piece
        yield _CHECKSUM.pack(checksum)


def read_entry(path: Path, identity: str) -> tuple[KvEntry, int, int] | None:
    """What the file says it holds, in how many bytes and since when (ns), its data not read; None
    for anything that is not a file of ours under that name."""
    try:
        with path.open("rb") as f:
            stat = path.stat()
            lengths = _lengths(f.read(_FIXED_BYTES), stat.st_size - _CHECKSUM.size)
            if lengths is None:
                return None
            n_header, n_line, n_data = lengths
            header = _header(f.read(n_header), identity)
            tokens = as_tokens(np.frombuffer(f.read(n_line), dtype=np.int32))
    except (OSError, ValueError):
        return None
    # A flipped bit leaves valid JSON often enough: any key may be missing, any value of another
    # type.
    start, state = header.get("start"), header.get("state", False)
    if (
        not isinstance(start, int)
        or header.get("stop") != len(tokens)
        or not 0 <= start < len(tokens)
    ):
        return None
    entry = KvEntry(identity, tokens, start, state) if isinstance(state, bool) else None
    return (
        (entry, n_data, stat.st_mtime_ns)
        if entry is not None and path.name == entry.file_name
        else None
    )


def read_data(f: Readable, identity: str, rest: Callable[[float], object]) -> memoryview | None:
    """The exported KV in a file's bytes, read and hashed in pieces that each take a moment, with a
    `rest` after each, which is told how long that took, in seconds; None where the checksum or the
    identity is not right. Raises OSError."""
    raw = np.empty(f.seek(0, os.SEEK_END), dtype=np.uint8)
    f.seek(0)
    whole, read_bytes, checksum = raw.data, 0, 0
    body_bytes = max(0, len(whole) - _CHECKSUM.size)
    while read_bytes < len(whole):
        started = time.perf_counter()
        n_bytes = f.readinto(whole[read_bytes : read_bytes + tunables.FILE_PIECE_BYTES])
        if not n_bytes:
            return None
        checksum = zlib.crc32(whole[read_bytes : min(read_bytes + n_bytes, body_bytes)], checksum)
        read_bytes += n_bytes
        rest(time.perf_counter() - started)
    if whole[body_bytes:] != _CHECKSUM.pack(checksum):
        return None
    lengths = _lengths(bytes(whole[:_FIXED_BYTES]), body_bytes)
    if lengths is None:
        return None
    n_header, n_line, _ = lengths
    try:
        _header(bytes(whole[_FIXED_BYTES : _FIXED_BYTES + n_header]), identity)
    except ValueError:
        return None
    return whole[_FIXED_BYTES + n_header + n_line : body_bytes].toreadonly()


def write_pieces(
    path: Path, pieces: Iterable[bytes | memoryview], rest: Callable[[float], object]
) -> None:
    """Write a file beside its name and rename it, so that half a file never counts; with a `rest`
    after each piece, which is told how long that took, in seconds. Raises OSError."""
    part = path.with_suffix(".part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as f:
        started = time.perf_counter()
        for piece in pieces:
            f.write(piece)
            rest(time.perf_counter() - started)
            started = time.perf_counter()
    part.replace(path)


def _lengths(fixed: bytes, body_bytes: int) -> tuple[int, int, int] | None:
    """(bytes of header, prefix, data) by the file's first bytes, which must add up to all before
    its checksum."""
    if len(fixed) < _FIXED_BYTES or not fixed.startswith(_MAGIC):
        return None
    n_header, n_line, n_data = _LENGTHS.unpack_from(fixed, len(_MAGIC))
    right = (
        n_header <= _MAX_HEADER_BYTES and _FIXED_BYTES + n_header + n_line + n_data == body_bytes
    )
    return (n_header, n_line, n_data) if right else None


def _header(raw: bytes, identity: str) -> dict[str, Any]:
    """The JSON of a file of that identity; ValueError where it is not."""
    header = json.loads(raw)
    if not isinstance(header, dict) or header.get("identity") != identity:
        raise ValueError("a file of something else")
    return header


# --- reading ahead --------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Read:
    """A block that `users` restorations want, and what its file had, once it is `done`."""

    block: Block
    users: int = 1
    done: bool = False
    data: memoryview | None = None


class ReadAhead:
    """Reads and checks files before they are needed, in a thread of its own. `read` gives a block's
    data, or None where its file is gone or damaged; it is called in that thread.

    The engine's thread says what it will want, and never waits for it while it has anything else to
    do: a block of a large model has 64 MB, which a hard disk takes half a second for. What was read
    stays here until it is released, and no more than `ahead_bytes` are wanted at a time, besides
    what somebody needs next. A disk that hangs stops this thread alone."""

    def __init__(
        self,
        read: Callable[[Block], memoryview | None],
        clock: Callable[[], float] = time.monotonic,
        ahead_bytes: int = tunables.READ_AHEAD_BYTES,
    ) -> None:
        self._read, self._clock, self._ahead_bytes = read, clock, ahead_bytes
        # The engine's thread alone adds to it and takes from it.
        self._wanted: dict[Block, _Read] = {}
        self._jobs: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._told = threading.Event()
        self._awaited = threading.Event()
        self._since_s: float | None = None
        self._thread: threading.Thread | None = None
        self.wanted_bytes = 0

    # --- the engine's thread ----------------------------------------------------------------------

    def want(self, block: Block, *, due: bool) -> bool:
        """Have a block read; False, doing nothing, where enough is wanted already and it is not
        `due`. Every True is answered with one `release`."""
        wanted = self._wanted.get(block)
        if wanted is not None:
            wanted.users += 1
            return True
        if not due and self.wanted_bytes + block.size_bytes > self._ahead_bytes:
            return False
        wanted = self._wanted[block] = _Read(block)
        self.wanted_bytes += block.size_bytes
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_all, name="kv-reader", daemon=True)
            self._thread.start()
        self._jobs.put(wanted)
        return True

    def ready(self, block: Block) -> bool:
        """Was it read, whatever came of that?"""
        wanted = self._wanted.get(block)
        return wanted is not None and wanted.done

    def get(self, block: Block) -> memoryview | None:
        """What was read of a block that is `ready`."""
        return self._wanted[block].data

    def release(self, block: Block) -> None:
        """One of those who wanted it does so no more."""
        wanted = self._wanted.get(block)
        if wanted is None:
            return
        wanted.users -= 1
        if not wanted.users:
            del self._wanted[block]
            self.wanted_bytes -= block.size_bytes

    def wait(self, seconds: float) -> None:
        """Wait until something was read, at most so long."""
        self._awaited.set()
        self._told.wait(seconds)
        self._told.clear()
        self._awaited.clear()

    @property
    def under_way_s(self) -> float:
        """How long the file that is being read has been; 0 between files."""
        since_s = self._since_s
        return 0.0 if since_s is None else max(0.0, self._clock() - since_s)

    def close(self) -> None:
        """Read nothing more."""
        if self._thread is not None:
            for wanted in self._wanted.values():
                wanted.users = 0
            self._jobs.put(None)
            self._thread.join(tunables.READ_CLOSE_S)
            self._thread, self.wanted_bytes = None, 0
            self._wanted.clear()

    # --- the reader's thread ----------------------------------------------------------------------

    def rest(self, took_s: float) -> None:
        """After a piece that took so long: unless the engine waits for it, rest as long, so that a
        thread that was displaced by this one computes again."""
        self._awaited.wait(min(took_s, tunables.READ_REST_S))

    def _read_all(self) -> None:
        for wanted in iter(self._jobs.get, None):
            if not wanted.users:
                continue
            self._since_s = self._clock()
            try:
                wanted.data = self._read(wanted.block)
            except (OSError, MemoryError):
                wanted.data = None
            self._since_s = None
            wanted.done = True
            self._told.set()
