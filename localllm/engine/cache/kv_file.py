"""One file of the disk tier: what it says of its block, the block's bytes, and a checksum over all
of it; and reading files before they are needed.

    magic, where the KV begins, whether it is a state, how many tokens and bytes of KV | the
    sequence's tokens, int32 | the exported KV | CRC-32 of each piece of everything before

What it is KV of says its name: a hash of the identity, the start and the tokens.

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

import numpy as np

from localllm.engine.cache import tunables
from localllm.engine.cache.eviction import Block
from localllm.engine.cache.tree import as_tokens
from localllm.engine.step_costs import DecayedRatio
from localllm.engine.tokens import Tokens

_MAGIC = b"localllm-kv-6\n"
_HEAD = struct.Struct(f"<{len(_MAGIC)}sI?QQ")
_CHECKSUM = struct.Struct("<I")
# What a file is read from.
Readable = io.RawIOBase | io.BufferedIOBase
# Told of each piece: its bytes, and the seconds that reading and checking it took.
Progress = Callable[[int, float], object]


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

    def size_bytes(self, n_data: int) -> int:
        body_bytes = _HEAD.size + self.tokens.nbytes + n_data
        return body_bytes + _CHECKSUM.size * -(-body_bytes // tunables.FILE_PIECE_BYTES)

    def pieces(self, data: bytes | memoryview) -> Iterator[bytes]:
        """The file's content, in order and in pieces that each take a moment: one is hashed when it
        is asked for."""
        fixed = _HEAD.pack(_MAGIC, self.start, self.state, len(self.tokens), len(data))
        head = fixed + self.tokens.tobytes()
        data = memoryview(data)
        checksums = []
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


def _entry(f: Readable, body_bytes: int, identity: str, name: str) -> KvEntry | None:
    """What the file says it holds, of so many bytes before its checksums; None for anything that is
    not a file of ours under that name."""
    head = f.read(_HEAD.size) or b""
    if len(head) < _HEAD.size:
        return None
    magic, start, state, n_tokens, n_data = _HEAD.unpack(head)
    if magic != _MAGIC or _HEAD.size + 4 * n_tokens + n_data != body_bytes:
        return None
    tokens = as_tokens(np.frombuffer(f.read(4 * n_tokens) or b"", dtype=np.int32))
    entry = KvEntry(identity, tokens, start, state)
    if entry.file_name == name:
        return entry
    return None


def read_entry(path: Path, identity: str) -> tuple[KvEntry, int, int] | None:
    """What a file holds, in how many bytes and since when (ns), its data not read; None for
    anything that is not a file of ours under that name."""
    try:
        with path.open("rb") as f:
            stat = path.stat()
            body_bytes = _body_bytes(stat.st_size)
            entry = _entry(f, body_bytes, identity, path.name)
    except OSError:
        return None
    if entry is None:
        return None
    return entry, body_bytes - _HEAD.size - entry.tokens.nbytes, stat.st_mtime_ns


def read_data(
    open_file: Callable[[], Readable],
    identity: str,
    name: str,
    progress: Progress,
    n_threads: int,
) -> memoryview | None:
    """The exported KV in the file of that `name`, read and hashed by `n_threads` in pieces that
    each take a moment, with `progress` told of each; None where a checksum or the name is not
    right. Raises OSError."""
    with open_file() as f:
        whole = np.empty(f.seek(0, os.SEEK_END), dtype=np.uint8).data
        body_bytes = _body_bytes(len(whole))
        f.seek(0)
        entry = _entry(f, body_bytes, identity, name)
        if entry is None:
            return None
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
    if b"".join(checksums) != whole[body_bytes:]:
        return None
    return whole[_HEAD.size + entry.tokens.nbytes : body_bytes].toreadonly()


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
        self._read = read
        self._clock = clock
        self._ahead_bytes = ahead_bytes
        # The engine's thread alone adds to it and takes from it.
        self._wanted: dict[Block, PendingRead] = {}
        self.jobs: queue.SimpleQueue[PendingRead | None] = queue.SimpleQueue()
        # set when something was read, and by whoever else has made what the engine waits for
        self.news = threading.Event()
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
        """Wait for news, at most so long."""
        self._awaited.set()
        self.news.wait(seconds)
        self.news.clear()
        self._awaited.clear()

    def learn(self, n_bytes: float, seconds: float) -> None:
        """So much was read and checked in so long."""
        self._speed.add(seconds, n_bytes)

    def is_worth(self, blocks: Iterable[Block], compute_s: float) -> bool:
        """True when what is left to read of `blocks` comes in less than the `compute_s` that the
        tokens wanted of them take, both as measured here. What was measured of neither is found out
        by reading."""
        # What gave nothing for so long already is expected to take as long again.
        late_s = 0.0
        if self.stalled_s > tunables.READ_LATE_S:
            late_s = self.stalled_s
        left_bytes = 0.0
        for block in blocks:
            wanted = self._wanted.get(block)
            left_bytes += block.size_bytes if wanted is None else wanted.left_bytes
        read_s = max(left_bytes * self._speed.rate(0.0, 0.0), late_s)
        return read_s < (compute_s or tunables.READ_STUCK_S)

    @property
    def stalled_s(self) -> float:
        """For how long the file that is being read has given no piece; 0 where none is read."""
        since_s = self._since_s
        if since_s is None:
            return 0.0
        return max(0.0, self._clock() - since_s)

    def close(self) -> None:
        """Read nothing more."""
        if self._thread is not None:
            for wanted in self._wanted.values():
                wanted.users = 0
            self.jobs.put(None)
            self._thread.join(tunables.READ_CLOSE_S)
            self._thread = None
            self.wanted_bytes = 0
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
        self._since_s = None
        wanted.left_bytes = 0
        wanted.done = True
        self.news.set()

    def came(self, wanted: PendingRead, n_bytes: int, took_s: float) -> None:
        """A piece of it came. (Of a file's several threads, each tells of its own.)"""
        self.learn(n_bytes, took_s)
        wanted.left_bytes -= n_bytes
        self.rest(took_s)
        self._since_s = self._clock()
