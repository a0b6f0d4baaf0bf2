"""The file format of the disk tier, and a thread that reads files ahead of time.

A file has these parts:

    magic, start of the KV, whether it is a state, number of tokens, number of KV bytes
    the sequence's tokens, int32
    the exported KV
    CRC-32 of each piece of everything before

The file's name is a hash of the identity, the start and the tokens.

Each file contains all the tokens of the sequence, not only those of the block: a block is usable
only after exactly these tokens. A restarted engine can add the block to its tree although the
files before it may be gone.

The checksum protects against disk errors, not against attackers: anyone who can write here could
also write a valid checksum of any kind. A file is hashed when it is written and when it is read,
while other threads compute, so speed matters. CRC-32 takes 0.56 ns a byte, and SHA-256 without
processor support 4.1 ns. One damaged file in 4 billion goes undetected. Each piece has its own
checksum, so several threads can read one file.
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
from localllm.engine.cache.identity import FILE_FORMAT
from localllm.engine.cache.part_files import part_of
from localllm.engine.cache.tree import as_tokens
from localllm.engine.step_costs import DecayedRatio
from localllm.engine.tokens import Tokens

_MAGIC = f"localllm-kv-{FILE_FORMAT}\n".encode()
_HEAD = struct.Struct(f"<{len(_MAGIC)}sI?QQ")
_CHECKSUM = struct.Struct("<I")
# The open file to read from.
Readable = io.RawIOBase | io.BufferedIOBase
# Called for each piece with its bytes, and the seconds that reading and checking it took.
Progress = Callable[[int, float], object]


@dataclass(frozen=True, slots=True, eq=False)
class KvEntry:
    """The contents of a file: KV of the sequence `tokens` from `start` on, or the `state` at its
    end.

    `identity` names everything that gives the bytes their meaning.
    """

    identity: str
    tokens: Tokens
    start: int
    state: bool = False

    @property
    def file_name(self) -> str:
        """A hash of the identity, start and tokens."""
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
        """The contents of the file, in order. A piece is hashed only when it is requested, so each
        is quick.
        """
        head = self._head(len(data))
        data = memoryview(data)
        checksums = []
        size = tunables.FILE_PIECE_BYTES
        for at in range(0, len(head) + len(data), size):
            data_at = at - len(head)
            piece = b"".join([head[at : at + size], data[max(data_at, 0) : max(data_at + size, 0)]])
            checksums.append(_CHECKSUM.pack(zlib.crc32(piece)))
            yield piece
        yield b"".join(checksums)

    def checked_data(self, contents: memoryview) -> memoryview | None:
        """The exported KV in `contents`, the contents of this entry's file; None if it is another
        file or a checksum is wrong.
        """
        body_bytes = _body_bytes(len(contents))
        head = self._head(body_bytes - _HEAD.size - self.tokens.nbytes)
        if contents[: len(head)] != head:
            return None
        checksums = []
        for at in range(0, body_bytes, tunables.FILE_PIECE_BYTES):
            piece = contents[at : min(at + tunables.FILE_PIECE_BYTES, body_bytes)]
            checksums.append(_CHECKSUM.pack(zlib.crc32(piece)))
        if b"".join(checksums) != contents[body_bytes:]:
            return None
        return contents[len(head) : body_bytes].toreadonly()

    def _head(self, n_data: int) -> bytes:
        """The part before `n_data` bytes of KV."""
        fixed = _HEAD.pack(_MAGIC, self.start, self.state, len(self.tokens), max(n_data, 0))
        return fixed + self.tokens.tobytes()


def _body_bytes(file_bytes: int) -> int:
    """Bytes of a file before its checksums."""
    n_pieces = -(-file_bytes // (tunables.FILE_PIECE_BYTES + _CHECKSUM.size))
    return file_bytes - _CHECKSUM.size * n_pieces


def _entry(f: Readable, body_bytes: int, identity: str, name: str) -> KvEntry | None:
    """The entry of a file with `body_bytes` before its checksums; None if it is not a file of that
    name.
    """
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
    """Read the header of a file: its entry, the size of its data in bytes, and its time stamp in
    ns.

    Returns None if it is not a valid file of that name.
    """
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
    """The exported KV in the file called `name`, read and checked in small pieces by `n_threads`.

    Calls `progress` for each piece. Returns None if a checksum or the name is wrong. Raises
    OSError.
    """
    with open_file() as f:
        contents = np.empty(f.seek(0, os.SEEK_END), dtype=np.uint8).data
        body_bytes = _body_bytes(len(contents))
        f.seek(0)
        entry = _entry(f, body_bytes, identity, name)
        if entry is None:
            return None
        f.seek(body_bytes)
        f.readinto(contents[body_bytes:])
    starts = range(0, body_bytes, tunables.FILE_PIECE_BYTES)
    checksums = [b""] * len(starts)
    share = max(1, -(-len(starts) // n_threads))

    def read_share(first: int) -> None:
        with contextlib.suppress(OSError), open_file() as f:
            f.seek(starts[first])
            for i in range(len(starts))[first : first + share]:
                piece = contents[starts[i] : min(starts[i] + tunables.FILE_PIECE_BYTES, body_bytes)]
                started = time.perf_counter()
                f.readinto(piece)
                checksums[i] = _CHECKSUM.pack(zlib.crc32(piece))
                progress(len(piece), (time.perf_counter() - started) / len(threads))

    # Daemon threads: a disk that hangs must not keep the process from ending.
    threads = [
        threading.Thread(target=read_share, args=(first,), name="kv-reader", daemon=True)
        for first in range(0, len(starts), share)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if b"".join(checksums) != contents[body_bytes:]:
        return None
    return contents[_HEAD.size + entry.tokens.nbytes : body_bytes].toreadonly()


def write_pieces(
    path: Path, pieces: Iterable[bytes | memoryview], pause: Callable[[float], object]
) -> None:
    """Write a temporary file and rename it, so that an incomplete file is never used. The temporary
    name is this process's own, because another process may write the same file.

    Calls `pause` after each piece with the seconds that it took. Raises OSError.
    """
    part = part_of(path)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as f:
            started = time.perf_counter()
            for piece in pieces:
                f.write(piece)
                pause(time.perf_counter() - started)
                started = time.perf_counter()
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


# --- reading ahead --------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class PendingRead:
    """The read of a block for `users` restorations.

    `left_bytes` of it are still to be read. `data` is the result once it is `done`.
    """

    block: Block
    left_bytes: float
    users: int = 1
    done: bool = False
    data: memoryview | None = None


class ReadAhead:
    """Reads and checks files in a thread of its own before they are needed.

    `read` returns a block's data, or None if its file is gone or damaged. It runs in that thread.

    The engine's thread requests blocks, and never waits for them while it has other work. A block
    of a large model has 64 MB, which takes a hard disk half a second. The data stays here until it
    is released. At most `ahead_bytes` are requested at a time, in addition to blocks that are due.
    A disk that hangs blocks only this thread.
    """

    def __init__(
        self,
        read: Callable[[Block, Progress], memoryview | None],
        clock: Callable[[], float] = time.monotonic,
        ahead_bytes: int = tunables.READ_AHEAD_BYTES,
    ) -> None:
        self._read = read
        self._clock = clock
        self._ahead_bytes = ahead_bytes
        # Only the engine's thread changes this dict.
        self._pending: dict[Block, PendingRead] = {}
        self.jobs: queue.SimpleQueue[PendingRead | None] = queue.SimpleQueue()
        # Set after each read, and by other threads after anything else that the engine waits for.
        self.wake = threading.Event()
        self._awaited = threading.Event()
        self._since_s: float | None = None
        self._thread: threading.Thread | None = None
        self.wanted_bytes = 0
        # Seconds per byte of the last pieces; 0 before the first piece.
        self._speed = DecayedRatio(tunables.READ_SPEED_DECAY, total=1e-9)

    # --- the engine's thread ----------------------------------------------------------------------

    def want(self, block: Block, *, due: bool) -> bool:
        """Request the read of a block. Each True must be followed by one `release`.

        Returns False, with no effect, if enough is requested already and the block is not `due`.
        """
        pending = self._pending.get(block)
        if pending is not None:
            pending.users += 1
            return True
        if not due and self.wanted_bytes + block.size_bytes > self._ahead_bytes:
            return False
        pending = self._pending[block] = PendingRead(block, block.size_bytes)
        self.wanted_bytes += block.size_bytes
        self.start()
        self.jobs.put(pending)
        return True

    def ready(self, block: Block) -> bool:
        """Is the read finished, successfully or not?"""
        pending = self._pending.get(block)
        return pending is not None and pending.done

    def get(self, block: Block) -> memoryview | None:
        """The data of a block that is `ready`; None if the read failed."""
        return self._pending[block].data

    def release(self, block: Block) -> None:
        """Withdraw one request for the block."""
        pending = self._pending.get(block)
        if pending is None:
            return
        pending.users -= 1
        if not pending.users:
            del self._pending[block]
            self.wanted_bytes -= block.size_bytes

    def wait(self, seconds: float) -> None:
        """Wait until `wake` is set, at most `seconds`."""
        self._awaited.set()
        self.wake.wait(seconds)
        self.wake.clear()
        self._awaited.clear()

    def learn(self, n_bytes: float, seconds: float) -> None:
        """Record that `n_bytes` were read and checked in `seconds`."""
        self._speed.add(seconds, n_bytes)

    def is_worth_reading(self, blocks: Iterable[Block], compute_s: float) -> bool:
        """True if the rest of `blocks` is read in less than `compute_s`, the time to compute their
        tokens.

        Both times are measured on this machine. If neither is measured yet, reading is tried.
        """
        # A read that has given no data for this long is expected to take as long again.
        stalled_s = 0.0
        if self.stalled_s > tunables.READ_STALLED_S:
            stalled_s = self.stalled_s
        left_bytes = 0.0
        for block in blocks:
            pending = self._pending.get(block)
            left_bytes += block.size_bytes if pending is None else pending.left_bytes
        read_s = max(left_bytes * self._speed.rate(0.0, 0.0), stalled_s)
        return read_s < (compute_s or tunables.READ_TIMEOUT_S)

    @property
    def stalled_s(self) -> float:
        """Seconds since the current file gave its last piece; 0 if no file is being read."""
        since_s = self._since_s
        if since_s is None:
            return 0.0
        return max(0.0, self._clock() - since_s)

    def close(self) -> None:
        """Stop reading."""
        if self._thread is not None:
            for pending in self._pending.values():
                pending.users = 0
            self.jobs.put(None)
            self._thread.join(tunables.READ_CLOSE_S)
            self._thread = None
            self.wanted_bytes = 0
            self._pending.clear()

    # --- the reader's thread ----------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread that works on `jobs`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_all, name="kv-reader", daemon=True)
            self._thread.start()

    def rest(self, took_s: float) -> None:
        """Rest after a piece that took `took_s`, unless the engine waits for it.

        The rest is as long as the piece took, within a limit, so a thread displaced by this one
        can run.
        """
        self._awaited.wait(min(took_s, tunables.READ_REST_S))

    def _read_all(self) -> None:
        for pending in iter(self.jobs.get, None):
            if pending.users:
                self.read(pending)

    def read(self, pending: PendingRead) -> None:
        """Read an entire file."""
        self._since_s = self._clock()
        try:
            pending.data = self._read(pending.block, partial(self.on_piece_read, pending))
        except (OSError, MemoryError):
            pending.data = None
        self._since_s = None
        pending.left_bytes = 0
        pending.done = True
        self.wake.set()

    def on_piece_read(self, pending: PendingRead, n_bytes: int, took_s: float) -> None:
        """Account for a piece of a file. Each of its reader threads reports its own pieces."""
        self.learn(n_bytes, took_s)
        pending.left_bytes -= n_bytes
        self.rest(took_s)
        self._since_s = self._clock()
