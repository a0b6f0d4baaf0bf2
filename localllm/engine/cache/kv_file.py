"""One file of the disk tier: what it says of its block, the block's bytes, and a checksum over all
of it; and reading files before they are needed.

    magic | lengths | header (JSON) | the sequence's tokens, int32 | the exported KV | CRC-32 of
    each piece of everything before

The whole sequence's tokens are in each file, not only the block's own: a block is of use only
behind exactly those tokens, and a restarted engine enters it into its tree although the files
before it may be gone.

The checksum is for a disk that errs, not for an enemy: whoever can write here could write a right
one of any kind. A file is hashed when it is written and when it is read, beside those who compute,
so what the hash costs is what counts: 0.56 ns a byte, where SHA-256 without the processor's help
takes 4.1. One damaged file of 4 billion passes. Pieces have their own, so that several threads can
read one file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import queue
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from localllm.engine.cache import tunables
from localllm.engine.cache.eviction import Block
from localllm.engine.cache.tree import as_tokens
from localllm.engine.step_costs import DecayedRatio
from localllm.engine.tokens import Tokens

_MAGIC = b"localllm-kv-5\n"
_LENGTHS = struct.Struct("<IQQ")
_CHECKSUM = struct.Struct("<I")
# What a file is read from.
Readable = io.RawIOBase | io.BufferedIOBase
# Told of each piece: its bytes, and the seconds that reading and checking it took.
Progress = Callable[[int, float], object]
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
        body_bytes = len(self.head(n_data)) + n_data
        return body_bytes + _CHECKSUM.size * -(-body_bytes // tunables.FILE_PIECE_BYTES)

    def pieces(self, data: bytes | memoryview) -> Iterator[bytes]:
        """The file's content, in order and in pieces that each take a moment: one is hashed when it
        is asked for."""
        head, data, checksums = self.head(len(data)), memoryview(data), []
        size = tunables.FILE_PIECE_BYTES
        for at in range(0, len(head) + len(data), size):
            behind = at - len(head)
            piece = b"".join([head[at : at + size], data[max(behind, 0) : max(behind + size, 0)]])
            checksums.append(_CHECKSUM.pack(zlib.crc32(piece)))
            yield piece
        yield b"".join(checksums)


def _body_bytes(whole_bytes: int) -> int:
    """Bytes of a file before its checksums."""
    n_pieces = -(-whole_bytes // (tunables.FILE_PIECE_BYTES + _CHECKSUM.size))
    return whole_bytes - _CHECKSUM.size * n_pieces


def read_entry(path: Path, identity: str) -> tuple[KvEntry, int, int] | None:
    """What the file says it holds, in how many bytes and since when (ns), its data not read; None
    for anything that is not a file of ours under that name."""
    try:
        with path.open("rb") as f:
            stat = path.stat()
            lengths = _lengths(f.read(_FIXED_BYTES), _body_bytes(stat.st_size))
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


def read_data(
    open_file: Callable[[], Readable], identity: str, progress: Progress, n_threads: int
) -> memoryview | None:
    """The exported KV in a file, read and hashed by `n_threads` in pieces that each take a moment,
    with `progress` told of each; None where a checksum or the identity is not right. Raises
    OSError."""
    with open_file() as f:
        whole = np.empty(f.seek(0, os.SEEK_END), dtype=np.uint8).data
        body_bytes = _body_bytes(len(whole))
        f.seek(body_bytes)
        f.readinto(whole[body_bytes:])
    starts = range(0, body_bytes, tunables.FILE_PIECE_BYTES)
    checksums = [b""] * len(starts)
    share = max(1, -(-len(starts) // n_threads))

    def read_share(first: int) -> None:
        with contextlib.suppress(OSError), open_file() as f:
            f.seek(starts[first])
            for i in range(len(starts))[first : first + share]:
                piece = whole[starts[i] : min(starts[i] + tunables.FILE_PIECE_BYTES, body_bytes)]
                started = time.perf_counter()
                f.readinto(piece)
                checksums[i] = _CHECKSUM.pack(zlib.crc32(piece))
                progress(len(piece), (time.perf_counter() - started) / len(threads))

    # Daemons: a disk that hangs holds up no process that ends.
    threads = [
        threading.Thread(target=read_share, args=(first,), name="kv-reader", daemon=True)
        for first in range(0, len(starts), share)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lengths = _lengths(bytes(whole[:_FIXED_BYTES]), body_bytes)
    if lengths is None or b"".join(checksums) != whole[body_bytes:]:
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
    its checksums."""
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
class PendingRead:
    """A block that `users` restorations want, `left_bytes` of it not read yet, and what its file
    had, once it is `done`."""

    block: Block
    left_bytes: float
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
        read: Callable[[Block, Progress], memoryview | None],
        clock: Callable[[], float] = time.monotonic,
        ahead_bytes: int = tunables.READ_AHEAD_BYTES,
    ) -> None:
        self._read, self._clock, self._ahead_bytes = read, clock, ahead_bytes
        # The engine's thread alone adds to it and takes from it.
        self._wanted: dict[Block, PendingRead] = {}
        self.jobs: queue.SimpleQueue[PendingRead | None] = queue.SimpleQueue()
        self._told = threading.Event()
        self._awaited = threading.Event()
        self._since_s: float | None = None
        self._thread: threading.Thread | None = None
        self.wanted_bytes = 0
        # Seconds a byte of the last pieces: 0 until any came.
        self._speed = DecayedRatio(tunables.READ_SPEED_DECAY, total=1e-9)

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
        wanted = self._wanted[block] = PendingRead(block, block.size_bytes)
        self.wanted_bytes += block.size_bytes
        self.start()
        self.jobs.put(wanted)
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

    def learn(self, n_bytes: float, seconds: float) -> None:
        """So much was read and checked in so long."""
        self._speed.add(seconds, n_bytes)

    def is_worth(self, blocks: Iterable[Block], compute_s: float) -> bool:
        """True when what is left to read of `blocks` comes in less than the `compute_s` that the
        tokens wanted of them take, both as measured here. What was measured of neither is found out
        by reading."""
        # What gave nothing for so long already is expected to take as long again.
        late_s = self.stalled_s if self.stalled_s > tunables.READ_LATE_S else 0.0
        left_bytes = 0.0
        for block in blocks:
            wanted = self._wanted.get(block)
            left_bytes += block.size_bytes if wanted is None else wanted.left_bytes
        read_s = max(left_bytes * self._speed.rate(0.0, 0.0), late_s)
        return read_s < (compute_s or tunables.READ_STUCK_S)

    @property
    def pace(self) -> tuple[int, int]:
        """How often the speed doubled that is measured, in halves and wholes, and the time since
        which a read has given nothing: what changes less changes no plan."""
        late = max(0, math.frexp(self.stalled_s / tunables.READ_LATE_S)[1])
        return round(2 * math.log2(self._speed.rate(0.0, 0.0) or 1.0)), late

    @property
    def stalled_s(self) -> float:
        """For how long the file that is being read has given no piece; 0 where none is read."""
        since_s = self._since_s
        return 0.0 if since_s is None else max(0.0, self._clock() - since_s)

    def close(self) -> None:
        """Read nothing more."""
        if self._thread is not None:
            for wanted in self._wanted.values():
                wanted.users = 0
            self.jobs.put(None)
            self._thread.join(tunables.READ_CLOSE_S)
            self._thread, self.wanted_bytes = None, 0
            self._wanted.clear()

    # --- the reader's thread ----------------------------------------------------------------------

    def start(self) -> None:
        """Have `jobs` done from now on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_all, name="kv-reader", daemon=True)
            self._thread.start()

    def rest(self, took_s: float) -> None:
        """After a piece that took so long: unless the engine waits for it, rest as long, so that a
        thread that was displaced by this one computes again."""
        self._awaited.wait(min(took_s, tunables.READ_REST_S))

    def _read_all(self) -> None:
        for wanted in iter(self.jobs.get, None):
            if wanted.users:
                self.read(wanted)

    def read(self, wanted: PendingRead) -> None:
        """Read all of a file."""
        self._since_s = self._clock()
        try:
            wanted.data = self._read(wanted.block, partial(self.came, wanted))
        except (OSError, MemoryError):
            wanted.data = None
        self._since_s, wanted.left_bytes = None, 0
        wanted.done = True
        self._told.set()

    def came(self, wanted: PendingRead, n_bytes: int, took_s: float) -> None:
        """A piece of it came. (Of a file's several threads, each tells of its own.)"""
        self.learn(n_bytes, took_s)
        wanted.left_bytes -= n_bytes
        self.rest(took_s)
        self._since_s = self._clock()
