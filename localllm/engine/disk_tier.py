"""Prefixes on disk: exported KV that survives a restart, a crash and a change of model.

One file per block, named by a hash of what it is the KV of; written beside its name and renamed, so half a file never
counts; checksummed, so a corrupt or foreign one is a miss and never a wrong answer. A thread of its own writes, in the
pauses between requests if there are any; the engine never waits for it. What it did becomes true for the engine when the
engine reads its `news`, so that a block changes on one thread only.

The directory is bounded: least recently used files go first. Recency is that of the engine's cache while it runs, and is
kept in the files' time stamps (the ends of a line a little older than its beginning, so that they go before it).
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from localllm.engine import kv_file
from localllm.engine.prefix_cache import PrefixCache, Tokens

# Hashing and writing takes a core from whoever computes (45 MB: 5 % of a warm turn on two cores). So it waits until
# nothing is computed and for this long nothing new has come, but no longer than its patience, nor with much in hand.
_PAUSE_S = 0.05
_PATIENCE_S = 3.0
_MAX_WAITING_BYTES = 128 * 2**20
_FIRST_GUESS_BYTES_S = 5e8
# Coarser than any current file system's time stamps (NTFS: 100 ns).
_STEP_NS = 1000

News = Literal["written", "failed", "removed"]


@dataclass(slots=True, eq=False)
class DiskBlock:
    """A block in memory, on disk, or both. `pending`: it waits to be written, or is being written; `written`: it has a
    file. The engine's thread alone changes it."""

    start: int
    stop: int
    path: Path
    tier: DiskTier
    data: bytes | memoryview | None = None
    written: bool = False
    pending: bool = False
    size_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """Bytes in memory."""
        return len(self.data) if self.data is not None else 0

    def read(self) -> bytes | memoryview | None:
        """The exported bytes, from memory or the checked file; None when the file is gone or damaged."""
        return self.data if self.data is not None else self.tier.load(self)

    def demote(self) -> bool:
        """Keep only the file; False while there is none (any more)."""
        if not self.written or not self.path.exists():
            return False
        self.data = None
        return True

    def promote(self, data: bytes | memoryview) -> None:
        """Hold what the file says in memory too."""
        self.data = data

    def used(self) -> None:
        """Its file is as recent as this."""
        self.tier.used(self)

    def discard(self) -> None:
        """No line has it any more: if it waits to be written, it does so no longer."""
        self.data = None


@dataclass
class DiskTier:
    """The directory of one model's prefixes. `identity` names all that gives the bytes their meaning: weights, tokenizer,
    KV types, and what wrote them."""

    directory: Path
    identity: str
    capacity_bytes: int
    read_bytes_s: float = _FIRST_GUESS_BYTES_S
    written_bytes: int = 0
    read_blocks: int = 0
    bad_blocks: int = 0
    _hurry: bool = False
    _jobs: queue.SimpleQueue[tuple[DiskBlock, Tokens, float] | None] = field(default_factory=queue.SimpleQueue)
    _news: deque[tuple[DiskBlock, News]] = field(default_factory=deque)
    _told: threading.Event = field(default_factory=threading.Event)
    _working: threading.Event = field(default_factory=threading.Event)
    _quiet: threading.Event = field(default_factory=threading.Event)
    _closing: bool = False
    _pending_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    # Time stamps that a file is to have, by path; those that it does not have yet are also in `_stale`.
    _stamps_ns: dict[Path, int] = field(default_factory=dict)
    _stale: set[Path] = field(default_factory=set)
    _blocks: dict[Path, DiskBlock] = field(default_factory=dict)

    def open(self, cache: PrefixCache) -> int:
        """Enter the directory's blocks into `cache` (without their data) and start the writer; returns their number."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        found: list[tuple[int, Tokens, DiskBlock]] = []
        for path in self.directory.glob("*.kv"):
            entry = kv_file.read_index(path, self.identity)
            if entry is None:
                # A damaged file would keep its name from being written again.
                path.unlink(missing_ok=True)
                continue
            block = DiskBlock(entry.start, entry.stop, path, self, written=True, size_bytes=entry.n_data)
            stamp_ns = entry.stamp_ns + block.start * _STEP_NS
            found.append((stamp_ns, entry.tokens, block))
            self._blocks[path], self._stamps_ns[path] = block, stamp_ns
        for leftover in self.directory.glob("*.part"):
            leftover.unlink(missing_ok=True)
        # The oldest first, so that the cache knows their order; of a line, what begins first.
        found.sort(key=lambda e: (e[0], e[2].start, e[2].stop))
        stamps = dict(self._stamps_ns)
        entered = sum(cache.insert(tokens, block) for _, tokens, block in found)
        self._stamps_ns, self._stale = stamps, set()
        self._start()
        return entered

    def sweep(self, older: str) -> None:
        """Remove the directories beside this one whose names begin with `older`: what they hold has lost its meaning."""
        for path in self.directory.parent.glob(f"{older}*"):
            if path != self.directory and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)

    def make_block(self, tokens: Tokens, data: bytes, start: int, stop: int) -> DiskBlock:
        """A block for `cache.insert`; `keep` has it written."""
        path = self.directory / f"{kv_file.name(self.identity, tokens, start)}.kv"
        return DiskBlock(start, stop, path, self, data, pending=True, size_bytes=len(data))

    def keep(self, block: DiskBlock, tokens: Tokens) -> None:
        """Have a block of the cache written."""
        self._blocks[block.path] = block
        with self._lock:
            self._pending_bytes += block.held_bytes
        self._jobs.put((block, tokens.copy(), time.monotonic()))

    def news(self, cache: PrefixCache) -> None:
        """Make true what the writer did since: blocks that are written can be demoted, ones that were removed and are in
        memory no more are forgotten."""
        self._told.clear()
        while self._news:
            block, what = self._news.popleft()
            block.pending = block.pending and what == "removed"
            block.written = what == "written"
            cache.changes += 1
            if what == "removed" and block.data is None:
                cache.forget(block)
            if not block.written and not block.pending and self._blocks.get(block.path) is block:
                del self._blocks[block.path]
                with self._lock:
                    self._stamps_ns.pop(block.path, None)
                    self._stale.discard(block.path)

    def wait(self, seconds: float) -> bool:
        """Wait until there is news, at most so long; False if there was none."""
        return bool(self._news) or self._told.wait(seconds)

    def used(self, block: DiskBlock) -> None:
        """A block was used now."""
        stamp_ns = time.time_ns()
        with self._lock:
            self._stamps_ns[block.path] = stamp_ns
            self._stale.add(block.path)

    def worth_reading(self, block: object, n_tokens: int, prefill_tok_s: float | None) -> bool:
        """True when the file is read faster than the `n_tokens` wanted of it are computed, both as measured here."""
        if not isinstance(block, DiskBlock) or block.data is not None or not prefill_tok_s:
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
        data = kv_file.checked(raw, self.identity)
        if data is None:
            self.bad_blocks += 1
            block.path.unlink(missing_ok=True)
            return None
        self.read_blocks += 1
        seconds = max(time.monotonic() - started, 1e-6)
        self.read_bytes_s += 0.3 * (len(raw) / seconds - self.read_bytes_s)
        return data

    def working(self, busy: bool) -> None:
        """Told by the engine before each step (True) and between requests (False): when to write."""
        if busy == self._quiet.is_set():
            (self._quiet.clear if busy else self._working.clear)()
            (self._working.set if busy else self._quiet.set)()

    def hurry(self, wanted: bool) -> None:
        """Somebody waits for room in memory: write without waiting for a pause, or take that back."""
        if wanted and not self._hurry:
            self._hurry = True
            self._quiet.set()
        self._hurry = wanted

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
            what: News = "failed"
            try:
                # Without data it was evicted meanwhile: nobody waits for it.
                if data is not None:
                    if not block.path.exists():
                        self._write(tokens, block, data)
                    what = "written"
            except OSError:
                # A full or read-only disk costs us the block, nothing more.
                block.path.with_suffix(".part").unlink(missing_ok=True)
            with self._lock:
                self._pending_bytes -= block.size_bytes
            self._tell(block, what)
            if self._jobs.empty():
                self._stamp()
        self._stamp()

    def _tell(self, block: DiskBlock, what: News) -> None:
        self._news.append((block, what))
        self._told.set()

    def _wait_for_a_pause(self, until_s: float) -> None:
        while not self._closing and not self._hurry and self._pending_bytes <= _MAX_WAITING_BYTES:
            if not self._quiet.wait(max(0.0, until_s - time.monotonic())):
                return
            if self._closing or self._hurry or not self._working.wait(_PAUSE_S):
                return

    def _write(self, tokens: Tokens, block: DiskBlock, data: bytes | memoryview) -> None:
        pieces = kv_file.pieces(self.identity, tokens, block.start, data)
        self._make_room(sum(len(p) for p in pieces))
        part = block.path.with_suffix(".part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as f:
            for piece in pieces:
                f.write(piece)
        part.replace(block.path)
        self.written_bytes += len(data)

    def _stamp(self) -> None:
        """Let the files' time stamps say when they were last used."""
        with self._lock:
            stale, self._stale = self._stale, set()
            stamps = [(path, self._stamps_ns[path] - self._depth_ns(path)) for path in stale]
        for path, stamp_ns in stamps:
            with contextlib.suppress(OSError):
                os.utime(path, ns=(stamp_ns, stamp_ns))

    def _depth_ns(self, path: Path) -> int:
        block = self._blocks.get(path)
        return block.start * _STEP_NS if block is not None else 0

    def _make_room(self, need_bytes: int) -> None:
        """Remove the least recently used files (of every model) until `need_bytes` fit."""
        files = []
        with self._lock:
            stamps = dict(self._stamps_ns)
        for path in self.directory.parent.glob("*/*.kv"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                stamp_ns = stamps.get(path)
                own = stat.st_mtime_ns if stamp_ns is None else stamp_ns - self._depth_ns(path)
                files.append((own, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        if need_bytes > self.capacity_bytes:
            raise OSError("larger than the whole tier")
        for _, size, path in sorted(files):
            if total + need_bytes <= self.capacity_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size
            with self._lock:
                self._stamps_ns.pop(path, None)
                self._stale.discard(path)
            block = self._blocks.get(path)
            if block is not None:
                self._tell(block, "removed")
