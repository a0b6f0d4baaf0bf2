"""Prefixes on disk: exported KV that survives a restart, a crash and a change of model.

One file per block, named by a hash of what it is the KV of; written beside its name and renamed, so half a file never
counts; checksummed, so a corrupt or foreign one is a miss and never a wrong answer. A thread of its own writes, in the
pauses between requests if there are any; the engine never waits for it. The directory is bounded: least recently used
files go first. A block without the blocks before it can't be reached, so using or writing one touches all it hangs on:
children are always removed first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from localllm.engine.prefix_cache import PrefixCache, Tokens, as_tokens

_MAGIC = b"localllm-kv-2\n"
_LENGTHS = struct.Struct("<IQQ")
# SHA-256: every processor that this is for computes it in hardware, twice as fast as BLAKE2b.
_DIGEST_BYTES = 32
# Blocks waiting to be written hold their memory: rather skip one than let them pile up behind a slow disk.
_MAX_PENDING_BYTES = 512 * 2**20
# Hashing and writing takes a core from whoever computes (45 MB: 5 % of a warm turn on two cores). So it waits until
# nothing is computed and for this long nothing new has come, but no longer than its patience, nor with much in hand.
_PAUSE_S = 0.05
_PATIENCE_S = 3.0
_MAX_WAITING_BYTES = 128 * 2**20
_FIRST_GUESS_BYTES_S = 5e8
_MAX_HEADER_BYTES = 2**16
# Coarser than any current file system's time stamps (NTFS: 100 ns).
_TOUCH_STEP_NS = 1000


@dataclass(slots=True, eq=False)
class DiskBlock:
    """A block in memory, on disk, or both. `parent` is the block it hangs on; `queued`: it has, or will have, a file."""

    start: int
    stop: int
    path: Path
    tier: DiskTier
    data: bytes | None = None
    written: bool = False
    size_bytes: int = 0
    parent: DiskBlock | None = None
    queued: bool = True

    @property
    def held_bytes(self) -> int:
        """Bytes in memory."""
        return len(self.data) if self.data is not None else 0

    @property
    def only_on_disk(self) -> bool:
        """True when reading it costs a file."""
        return self.data is None

    def read(self) -> bytes | memoryview | None:
        """The exported bytes, from memory or the checked file; None when the file is gone or damaged."""
        return self.data if self.data is not None else self.tier.load(self)

    def demote(self) -> bool:
        """Keep only the file; False while there is none (any more)."""
        if not self.written or not self.path.exists():
            return False
        self.data = None
        return True


@dataclass
class DiskTier:
    """The directory of one model's prefixes: `identity` names weights, tokenizer and KV types together."""

    directory: Path
    identity: str
    capacity_bytes: int
    read_bytes_s: float = _FIRST_GUESS_BYTES_S
    written_bytes: int = 0
    read_blocks: int = 0
    bad_blocks: int = 0
    _jobs: queue.SimpleQueue[tuple[DiskBlock, Tokens, float] | None] = field(default_factory=queue.SimpleQueue)
    _working: threading.Event = field(default_factory=threading.Event)
    _quiet: threading.Event = field(default_factory=threading.Event)
    _closing: bool = False
    _pending_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _cache: PrefixCache | None = None

    def open(self, cache: PrefixCache) -> int:
        """Enter the directory's blocks into `cache` (without their data) and start the writer; returns their number."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        found: list[tuple[Tokens, DiskBlock]] = []
        for path in self.directory.glob("*.kv"):
            entry = self._index(path)
            if entry is not None:
                found.append(entry)
            else:
                # A damaged file would keep its name from being written again.
                path.unlink(missing_ok=True)
        for leftover in self.directory.glob("*.part"):
            leftover.unlink(missing_ok=True)
        # By where they begin: a branch may leave a block in its middle, and end before it does.
        found.sort(key=lambda e: (e[1].start, e[1].stop))
        self._cache = cache
        entered = 0
        for tokens, block in found:
            block.parent = self._parent(tokens, block.start)
            entered += cache.insert(tokens, block)
        self._start()
        return entered

    def make_block(self, tokens: Tokens, data: bytes, start: int, stop: int) -> DiskBlock:
        """A block for `cache.insert` that is also queued for writing."""
        block = DiskBlock(start, stop, self.directory / f"{self._name(tokens, start)}.kv", self, data)
        block.parent = self._parent(tokens, start)
        with self._lock:
            # However short: a longer line may hang on it, and would be lost without it. Nor has one whose own parent
            # is not written any use on disk.
            block.queued = self._pending_bytes + len(data) <= _MAX_PENDING_BYTES
            block.queued &= block.parent is None or block.parent.queued
            if block.queued:
                self._pending_bytes += len(data)
        if block.queued:
            self._jobs.put((block, tokens.copy(), time.monotonic()))
        return block

    def _parent(self, tokens: Tokens, start: int) -> DiskBlock | None:
        blocks = self._cache.chain(tokens[:start]) if self._cache is not None and start else []
        last = blocks[-1] if blocks else None
        return last if isinstance(last, DiskBlock) else None

    def worth_reading(self, block: object, n_tokens: int, prefill_tok_s: float | None) -> bool:
        """True when the file is read faster than the `n_tokens` wanted of it are computed, both as measured here."""
        if not isinstance(block, DiskBlock) or not block.only_on_disk or not prefill_tok_s:
            return True
        return block.size_bytes / self.read_bytes_s < n_tokens / prefill_tok_s

    def load(self, block: DiskBlock) -> memoryview | None:
        """The data of a block that is only on disk; the file is checked whole, and removed if it is not right."""
        started = time.monotonic()
        try:
            raw = block.path.read_bytes()
        except OSError:
            self.bad_blocks += 1
            return None
        whole = memoryview(raw)
        body, digest = whole[:-_DIGEST_BYTES], whole[-_DIGEST_BYTES:]
        parts = _parse(body)
        if parts is None or _digest(body) != digest or parts[0].get("identity") != self.identity:
            self.bad_blocks += 1
            block.path.unlink(missing_ok=True)
            return None
        self.read_blocks += 1
        seconds = max(time.monotonic() - started, 1e-6)
        self.read_bytes_s += 0.3 * (len(raw) / seconds - self.read_bytes_s)
        _touch(block)
        return body[parts[2] :]

    def working(self, busy: bool) -> None:
        """Told by the engine before each step (True) and between requests (False): when to write."""
        if busy == self._quiet.is_set():
            (self._quiet.clear if busy else self._working.clear)()
            (self._working.set if busy else self._quiet.set)()

    def flush(self) -> None:
        """Wait until everything queued so far is written."""
        self.close()
        self._start()

    def close(self) -> None:
        """Write what is queued, then stop the thread."""
        if self._thread is not None:
            self._closing = True
            self._jobs.put(None)
            self._quiet.set()
            self._thread.join()
            self._thread = None

    def _start(self) -> None:
        self._closing = False
        self._working.clear()
        self._quiet.set()
        self._thread = threading.Thread(target=self._write_all, name="kv-writer", daemon=True)
        self._thread.start()

    # --- the writer's thread -------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            block, tokens, queued_s = job
            self._wait_for_a_pause(queued_s + _PATIENCE_S)
            data = block.data
            try:
                if block.parent is not None:
                    # Before room is made, so that the block's own parents are the last to go.
                    _touch(block.parent)
                if data is not None and not block.path.exists():
                    self._write(block.path, tokens, block, data)
                _touch(block)
                block.size_bytes = len(data) if data is not None else 0
                block.written = block.path.exists()
            except OSError:
                # A full or read-only disk costs us the block, nothing more.
                block.path.with_suffix(".part").unlink(missing_ok=True)
            finally:
                with self._lock:
                    self._pending_bytes -= len(data) if data is not None else 0

    def _wait_for_a_pause(self, until_s: float) -> None:
        while not self._closing and self._pending_bytes <= _MAX_WAITING_BYTES:
            if not self._quiet.wait(max(0.0, until_s - time.monotonic())):
                return
            if self._closing or not self._working.wait(_PAUSE_S):
                return

    def _write(self, path: Path, tokens: Tokens, block: DiskBlock, data: bytes) -> None:
        header = json.dumps({"identity": self.identity, "start": block.start, "stop": block.stop}).encode()
        line = tokens.tobytes()
        self._make_room(len(data) + len(line) + len(header) + len(_MAGIC) + _LENGTHS.size + _DIGEST_BYTES)
        if block.parent is not None and not block.parent.path.exists():
            raise OSError("what this block hangs on is not on disk any more")
        digest = hashlib.sha256()
        part = path.with_suffix(".part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as f:
            for piece in (_MAGIC, _LENGTHS.pack(len(header), len(line), len(data)), header, line, data):
                digest.update(piece)
                f.write(piece)
            f.write(digest.digest())
        part.replace(path)
        self.written_bytes += len(data)

    def _make_room(self, need_bytes: int) -> None:
        """Remove the least recently used files (of every model) until `need_bytes` fit."""
        files = []
        for path in self.directory.parent.glob("*/*.kv"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                files.append((stat.st_mtime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total + need_bytes <= self.capacity_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size
        if total + need_bytes > self.capacity_bytes:
            raise OSError("larger than the whole tier")

    def _index(self, path: Path) -> tuple[Tokens, DiskBlock] | None:
        try:
            size = path.stat().st_size
            with path.open("rb") as f:
                fixed = f.read(len(_MAGIC) + _LENGTHS.size)
                if not fixed.startswith(_MAGIC) or len(fixed) < len(_MAGIC) + _LENGTHS.size:
                    return None
                n_header, n_line, n_data = _LENGTHS.unpack_from(fixed, len(_MAGIC))
                if len(fixed) + n_header + n_line + n_data + _DIGEST_BYTES != size or n_header > _MAX_HEADER_BYTES:
                    return None
                header = json.loads(f.read(n_header))
                tokens = np.frombuffer(f.read(n_line), dtype=np.int32)
        except (OSError, ValueError):
            return None
        if not isinstance(header, dict) or header.get("identity") != self.identity:
            return None
        # A flipped bit leaves valid JSON often enough: any key may be missing, any value of another type.
        start, stop = header.get("start"), header.get("stop")
        if not isinstance(start, int) or stop != len(tokens) or not 0 <= start < len(tokens):
            return None
        if path.stem != self._name(tokens, start):
            return None
        return as_tokens(tokens), DiskBlock(start, len(tokens), path, self, None, written=True, size_bytes=n_data)

    def _name(self, tokens: Tokens, start: int) -> str:
        digest = hashlib.blake2b(self.identity.encode(), digest_size=20)
        digest.update(struct.pack("<I", start))
        digest.update(tokens.tobytes())
        return digest.hexdigest()


def _touch(block: DiskBlock) -> None:
    """Mark a block and all it hangs on as just used, parents a little later, so that they are removed after it."""
    stamp_ns, step = time.time_ns(), block
    while True:
        with contextlib.suppress(OSError):
            os.utime(step.path, ns=(stamp_ns, stamp_ns))
        if step.parent is None:
            return
        step, stamp_ns = step.parent, stamp_ns + _TOUCH_STEP_NS


def _digest(body: memoryview) -> bytes:
    return hashlib.sha256(body).digest()


def _parse(body: memoryview) -> tuple[dict[str, object], int, int] | None:
    """(header, offset of the tokens, offset of the data), or None."""
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
    if not isinstance(header, dict):
        return None
    return header, fixed + n_header, fixed + n_header + n_line
