"""Prefixes on disk: exported KV that survives a restart, a crash and a change of model.

One file per block, named by a hash of what it is the KV of; written beside its name and renamed, so half a file never
counts; checksummed, so a corrupt or foreign one is a miss and never a wrong answer. A thread of its own writes, in the
pauses between requests if there are any, and another reads (read_ahead.py); the engine never waits for either. What the
writer did becomes true for the engine when the engine reads its `news`, so that a block changes on one thread only.

The directory is bounded, and smaller where the disk is nearly full: least recently used files go first. Recency is that of
the engine's cache while it runs, and is kept in the files' time stamps (the ends of a line a little older than its
beginning, so that they go before it).

What is written in a day is bounded as well, for disks wear (write_budget.py). A block that is not written because of that is
held back: in memory only, until it is used again. So is, once much of the day's bytes is gone, a short block that was not
used since it was made: computing it again costs little, and most such prompts never come again.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from localllm.engine.cache import kv_file
from localllm.engine.cache.folder import put_label
from localllm.engine.cache.read_ahead import ReadAhead
from localllm.engine.cache.tree import PrefixCache
from localllm.engine.cache.write_budget import WriteBudget
from localllm.engine.tokens import Tokens

# Hashing and writing takes a core from whoever computes (45 MB: 5 % of a warm turn on two cores). So it waits until
# nothing is computed and for this long nothing new has come, but no longer than its patience, nor with much in hand.
_PAUSE_S = 0.05
_PATIENCE_S = 3.0
_MAX_WAITING_BYTES = 128 * 2**20
# What is written while the engine works is written in turns of half a millisecond with rests between: one busy thread more
# than there are processors stops whoever it displaces, and with it all who wait for that one at a barrier, hundreds of times a
# step. A line of 70 MB, written in one go, made one step take 250 ms, 20 times as long as the others.
_RESTS = 20.0
_LONGEST_REST_S = 0.02
_FIRST_GUESS_BYTES_S = 5e8
# A cache never takes the last of a disk that others write to.
FREE_BYTES = 2 * 10**9
# A block of so many tokens at most is computed again in a moment.
_SHORT_TOKENS = 256
# A file that takes longer than this to read is not waited for, nor is another as long as it does.
_STUCK_S = 10.0
# Reading takes as long as it was measured to, unless the read under way has taken longer than this already.
_LATE_S = 0.05
# Coarser than any current file system's time stamps (NTFS: 100 ns).
_STEP_NS = 1000

News = Literal["written", "failed", "removed", "held back"]


# What an engine without a disk says of it.
NO_DISK = dict.fromkeys(
    (
        "disk_written_bytes",
        "disk_written_today_bytes",
        "disk_daily_limit_bytes",
        "disk_budget_used_up",
        "disk_held_back_blocks",
        "disk_read_blocks",
        "disk_bad_blocks",
    ),
    0,
)


def _opened(path: Path) -> kv_file.Readable:
    return path.open("rb", buffering=0)


@dataclass(slots=True, eq=False)
class DiskBlock:
    """A block in memory, on disk, or both. `pending`: it waits to be written, or is being written; `written`: it has a
    file; `state`: it is a state, not KV; `again`: it was used since it was made. The engine's thread alone changes it."""

    start: int
    stop: int
    path: Path
    tier: DiskTier
    data: bytes | memoryview | None = None
    written: bool = False
    pending: bool = False
    size_bytes: int = 0
    state: bool = False
    again: bool = False

    @property
    def depth(self) -> int:
        """How far down its line it is of use: of two used together the deeper one goes first."""
        return self.stop if self.state else self.start

    @property
    def held_bytes(self) -> int:
        """Bytes in memory."""
        return len(self.data) if self.data is not None else 0

    def read(self) -> bytes | memoryview | None:
        """The exported bytes, from memory, the reader or the checked file; None when the file is gone or damaged."""
        if self.data is not None:
            return self.data
        return self.tier.reads.get(self) if self.tier.reads.ready(self) else self.tier.load(self)

    def demote(self) -> bool:
        """Keep only the file; False while there is none (any more)."""
        if not (self.written and self.path.exists()):
            return False
        self.data = None
        return True

    def promote(self, data: bytes | memoryview) -> None:
        """Hold what the file says in memory too."""
        self.data = data

    def used(self, at: int) -> None:
        """Its file is as recent as this."""
        self.tier.used(self, at)

    def discard(self) -> None:
        """No line has it any more: if it waits to be written, it does so no longer."""
        self.data = None
        self.tier.let_go(self)

    @property
    def fleeting(self) -> bool:
        """It may never be wanted again, and if it is, little is lost."""
        return not self.again and self.stop - self.start <= _SHORT_TOKENS


@dataclass
class DiskTier:
    """The directory of one model's prefixes. `identity` names all that gives the bytes their meaning: weights, tokenizer,
    KV types, and what wrote them; `model` is whose they are, for people. `free_bytes` of the disk are left to others;
    `daily_bytes` may be written in a day, by all models together (0: no limit)."""

    directory: Path
    identity: str
    capacity_bytes: int
    free_bytes: int = FREE_BYTES
    daily_bytes: int = 0
    model: str = ""
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
    _held_back: dict[Path, tuple[DiskBlock, Tokens]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.budget = WriteBudget(self.directory.parent, self.daily_bytes)
        self.open_file: Callable[[Path], kv_file.Readable] = _opened
        self.reads: ReadAhead[DiskBlock] = ReadAhead(lambda block: self.load(block, self.reads.rest))

    def open(self, cache: PrefixCache, states: PrefixCache | None = None) -> int:
        """Enter the directory's blocks into `cache`, and states into `states` (without their data), and start the writer;
        returns their number."""
        put_label(self.directory, self.model)
        cache.budget.clock = time.time_ns  # what was used in memory and what is on disk are compared
        found: list[tuple[int, Tokens, DiskBlock]] = []
        for path in self.directory.glob("*.kv"):
            entry = kv_file.read_index(path, self.identity)
            if entry is None or (entry.state and states is None):
                # A damaged file would keep its name from being written again.
                path.unlink(missing_ok=True)
                continue
            block = DiskBlock(
                entry.start, entry.stop, path, self, None, True, size_bytes=entry.n_data, state=entry.state
            )
            stamp_ns = entry.stamp_ns + block.depth * _STEP_NS
            found.append((stamp_ns, entry.tokens, block))
            self._blocks[path], self._stamps_ns[path] = block, stamp_ns
        for leftover in self.directory.glob("*.part"):
            leftover.unlink(missing_ok=True)
        # The oldest first, so that the cache knows their order; of a line, what begins first.
        found.sort(key=lambda e: (e[0], e[2].start, e[2].stop))
        stamps = dict(self._stamps_ns)
        entered = 0
        for _, tokens, block in found:
            tree = states if block.state and states is not None else cache
            entered += tree.insert(tokens, block)
        self._stamps_ns, self._stale = stamps, set()
        self.budget.written_bytes()
        self._start()
        return entered

    def sweep(self, older: str) -> None:
        """Remove the directories beside this one whose names begin with `older`: what they hold has lost its meaning."""
        for path in self.directory.parent.glob(f"{older}*"):
            if path != self.directory and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)

    def make_block(self, tokens: Tokens, data: bytes, start: int, *, state: bool = False) -> DiskBlock:
        """A block for `cache.insert`, which ends where the line does; `keep` has it written."""
        path = self.directory / f"{kv_file.name(self.identity, tokens, start, state=state)}.kv"
        return DiskBlock(start, len(tokens), path, self, data, pending=True, size_bytes=len(data), state=state)

    def keep(self, block: DiskBlock, tokens: Tokens) -> None:
        """Have a block of the cache written."""
        self._blocks[block.path] = block
        with self._lock:
            self._pending_bytes += block.held_bytes
        self._jobs.put((block, tokens.copy(), time.monotonic()))

    def news(self, trees: Sequence[PrefixCache]) -> None:
        """Make true what the writer did since: blocks that are written can be demoted, ones that were removed and are in
        memory no more are forgotten."""
        self._told.clear()
        while self._news:
            block, what = self._news.popleft()
            block.pending = block.pending and what == "removed"
            block.written = what == "written"
            trees[0].budget.changes += 1
            if what == "held back" and block.data is None:
                # It was evicted meanwhile.
                self.let_go(block)
            if what == "removed" and block.data is None:
                for tree in trees:
                    tree.forget(block)
            if not block.written and not block.pending and self._blocks.get(block.path) is block:
                del self._blocks[block.path]
                with self._lock:
                    self._stamps_ns.pop(block.path, None)
                    self._stale.discard(block.path)

    def wait(self, seconds: float) -> bool:
        """Wait until there is news, at most so long; False if there was none."""
        return bool(self._news) or self._told.wait(seconds)

    def used(self, block: DiskBlock, at_ns: int) -> None:
        """A block was used, at that time. One that was held back is worth writing after all, on a day that has bytes left."""
        held_back, tokens = self._held_back.get(block.path, (None, None))
        block.again = block.again or held_back is block or self._blocks.get(block.path) is block
        # While it is pending, what the writer decided is not known here yet.
        if held_back is block and tokens is not None and not block.pending and not self.budget.used_up:
            self.let_go(block)
            block.pending = True
            self.keep(block, tokens)
        with self._lock:
            self._stamps_ns[block.path] = max(at_ns, self._stamps_ns.get(block.path, 0))
            self._stale.add(block.path)

    def let_go(self, block: DiskBlock) -> None:
        """A block is no longer held in memory: if it was held back, nothing is left of it."""
        held_back, _ = self._held_back.get(block.path, (None, None))
        if held_back is block:
            del self._held_back[block.path]

    def snapshot(self) -> dict[str, int]:
        """Its counters, as NO_DISK names them. What others wrote today is as new as our last write: the engine's thread, which
        asks, reads no files."""
        today_bytes, used_up = self.budget.known()
        return {
            "disk_written_bytes": self.written_bytes,
            "disk_written_today_bytes": today_bytes,
            "disk_daily_limit_bytes": self.daily_bytes,
            "disk_budget_used_up": int(used_up),
            "disk_held_back_blocks": len(self._held_back),
            "disk_read_blocks": self.read_blocks,
            "disk_bad_blocks": self.bad_blocks,
        }

    def worth_reading(self, block: object, n_tokens: int, prefill_tok_s: float | None) -> bool:
        """True when the file is read faster than the `n_tokens` wanted of it are computed, both as measured here."""
        if not isinstance(block, DiskBlock) or block.data is not None or self.reads.ready(block):
            return True
        under_way_s = self.reads.under_way_s
        if under_way_s > _STUCK_S or not prefill_tok_s:
            return under_way_s <= _STUCK_S
        # What has taken so long already is expected to take as long again.
        late_s = under_way_s if under_way_s > _LATE_S else 0.0
        return max(block.size_bytes / self.read_bytes_s, late_s) < n_tokens / prefill_tok_s

    @property
    def pace(self) -> tuple[float, int]:
        """How fast it reads: bytes/s as measured, and how often the time doubled since which the read under way is late."""
        return self.read_bytes_s, max(0, math.frexp(self.reads.under_way_s / _LATE_S)[1])

    def load(self, block: DiskBlock, rest: Callable[[float], object] = lambda _: None) -> memoryview | None:
        """The data of a block that is only on disk; the file is checked whole, and removed if it is not right. `rest` is called
        after each piece with the seconds it took."""
        started = time.monotonic()
        try:
            with self.open_file(block.path) as f:
                data = kv_file.read(f, self.identity, rest)
        except OSError:
            self.bad_blocks += 1
            return None
        if data is None:
            self.bad_blocks += 1
            block.path.unlink(missing_ok=True)
            return None
        self.read_blocks += 1
        seconds = max(time.monotonic() - started, 1e-6)
        self.read_bytes_s += 0.3 * (len(data) / seconds - self.read_bytes_s)
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
        self._finish_writing()
        self._start()

    def close(self) -> None:
        """Write what is queued, then stop the threads."""
        self.reads.close()
        self._finish_writing()

    def _finish_writing(self) -> None:
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
            what = self._put(block, tokens)
            self.budget.written_bytes()
            with self._lock:
                self._pending_bytes -= block.size_bytes
            self._tell(block, what)
            if self._jobs.empty():
                self._stamp()
        self._stamp()

    def _put(self, block: DiskBlock, tokens: Tokens) -> News:
        data = block.data
        if data is None:
            # It was evicted meanwhile: nobody waits for it.
            return "failed"
        if block.path.exists():
            return "written"
        if self.budget.used_up or (block.fleeting and not self.budget.easy):
            self._held_back[block.path] = block, tokens
            return "held back"
        try:
            self._write(tokens, block, data)
        except OSError:
            # A full or read-only disk costs us the block, nothing more.
            with contextlib.suppress(OSError):
                block.path.with_suffix(".part").unlink(missing_ok=True)
            return "failed"
        return "written"

    def _tell(self, block: DiskBlock, what: News) -> None:
        self._news.append((block, what))
        self._told.set()

    @property
    def _pressed(self) -> bool:
        return self._closing or self._hurry or self._pending_bytes > _MAX_WAITING_BYTES

    def _wait_for_a_pause(self, until_s: float) -> None:
        while not self._pressed:
            if not self._quiet.wait(max(0.0, until_s - time.monotonic())):
                return
            if self._closing or self._hurry or not self._working.wait(_PAUSE_S):
                return

    def _write(self, tokens: Tokens, block: DiskBlock, data: bytes | memoryview) -> None:
        content = self.identity, tokens, block.start, data
        # Somebody may have cleared the folder.
        put_label(self.directory, self.model)
        size_bytes = kv_file.size_bytes(*content, state=block.state)
        self._make_room(block, size_bytes)
        self.budget.count(self.directory, size_bytes)
        part = block.path.with_suffix(".part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as f:
            started = time.perf_counter()
            for piece in kv_file.pieces(*content, state=block.state):
                f.write(piece)
                self._rest(time.perf_counter() - started)
                started = time.perf_counter()
        part.replace(block.path)
        self.written_bytes += len(data)

    def _rest(self, took_s: float) -> None:
        """Between two turns of so long: while the engine works and nobody waits for what is written, rest many times as long."""
        if not self._pressed:
            self._quiet.wait(min(took_s * _RESTS, _LONGEST_REST_S))

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
        return block.depth * _STEP_NS if block is not None else 0

    def _make_room(self, block: DiskBlock, need_bytes: int) -> None:
        """Remove the least recently used files (of every model) until the `need_bytes` of `block` fit; OSError where they don't,
        or only what was used since would make room: two lines would be written by turns, for ever."""
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
        capacity_bytes = min(self.capacity_bytes, total + shutil.disk_usage(self.directory).free - self.free_bytes)
        if need_bytes > capacity_bytes:
            raise OSError("larger than the whole tier, or than what the disk has to spare")
        mine = stamps.get(block.path, time.time_ns()) - self._depth_ns(block.path)
        for used, size, path in sorted(files):
            if total + need_bytes <= capacity_bytes:
                return
            if used > mine:
                raise OSError("all that is there was used since")
            path.unlink(missing_ok=True)
            total -= size
            with self._lock:
                self._stamps_ns.pop(path, None)
                self._stale.discard(path)
            gone = self._blocks.get(path)
            if gone is not None:
                self._tell(gone, "removed")
