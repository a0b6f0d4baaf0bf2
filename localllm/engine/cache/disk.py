"""Prefixes on disk: exported KV that survives a restart, a crash and a change of model.

There is one file per block, named by a hash of its contents' identity. A file is written under a
temporary name and renamed, so an incomplete file is never used. A file has checksums, so a corrupt
or foreign one is a miss and never a wrong answer.

A separate thread writes, in the pauses between requests if there are any, and another thread reads
(kv_file.py). The engine never waits for either of them. It applies the writer's results by calling
`sync`, so only one thread changes a block.

The directory's size is limited, and the limit is lower if the disk is nearly full. The order of
removal is in cache/eviction.py. The files' time stamps record their last use by the engine's
cache.

The bytes written per day are limited too, because disks wear out (folder.py). A block that would
exceed the limit stays in memory only. It is written when it is evicted from memory, if the day's
limit allows it by then.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from localllm.engine import EngineSettings
from localllm.engine.cache import tunables
from localllm.engine.cache.eviction import (
    Block,
    EvictablePool,
    Kind,
    StoredFile,
    files_to_remove,
)
from localllm.engine.cache.folder import (
    FolderSurvey,
    WriteBudget,
    put_label,
    remove_stale,
)
from localllm.engine.cache.folder_scan import FolderScan
from localllm.engine.cache.identity import identity_of
from localllm.engine.cache.kv_file import (
    KvEntry,
    Progress,
    Readable,
    ReadAhead,
    read_data,
    read_entry,
    write_pieces,
)
from localllm.engine.cache.part_files import remove_parts
from localllm.engine.cache.tree import PrefixCache
from localllm.engine.tokens import Tokens
from localllm.paths import regular_files
from localllm_backends.contract import Backend

# The result of a block's write, or of its file's removal.
Outcome = Literal["written", "failed", "removed", "deferred"]
# A block on disk that is also held elsewhere, and its tree.
Copy: TypeAlias = "tuple[EvictablePool, Block]"


class FoundFile(NamedTuple):
    """A file, its entry, the bytes of its KV, and its time stamp in ns."""

    path: Path
    entry: KvEntry
    n_data: int
    stamp_ns: int


def _opened(path: Path) -> Readable:
    return path.open("rb")


@dataclass
class DiskTier:
    """The directory of one model's prefixes.

    `capacity_bytes`: limit for this and the other models together (0: no files are kept).
    `identity`: everything that gives the bytes their meaning (identity.py).
    `model`: the model's name, for people.
    `free_bytes`: space on the disk left to others.
    `daily_bytes`: limit of all models together for the bytes written in a day (0: no limit).
    `n_readers`: threads that read one file.
    """

    directory: Path = Path()
    identity: str = ""
    capacity_bytes: int = 0
    free_bytes: int = tunables.DISK_FREE_BYTES
    daily_bytes: int = 0
    model: str = ""
    n_readers: int = 1
    written_bytes: int = 0
    read_blocks: int = 0
    bad_blocks: int = 0
    # Set while no request computes. Queued blocks are written then.
    quiet: threading.Event = field(default_factory=threading.Event)
    _busy: threading.Event = field(default_factory=threading.Event)
    _urgent: bool = False
    _jobs: queue.SimpleQueue[tuple[Block, Tokens, int, float] | None] = field(
        default_factory=queue.SimpleQueue
    )
    _outcomes: deque[tuple[Block, Outcome]] = field(default_factory=deque)
    _written: threading.Event = field(default_factory=threading.Event)
    _pending_bytes: int = 0
    # The survey at the last write, without the files that the engine has removed since.
    _known: FolderSurvey = field(default_factory=FolderSurvey)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _blocks: dict[Path, Block] = field(default_factory=dict)
    _trees: tuple[PrefixCache | None, PrefixCache | None] = (None, None)
    # Files that other servers wrote.
    _foreign_files: deque[FoundFile] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.budget = WriteBudget(self.directory.parent, self.daily_bytes)
        # Buffered, so that each read is complete: a short piece would count as damaged.
        self.open_file: Callable[[Path], Readable] = _opened
        self.reads = ReadAhead(self.load)
        self._scan = FolderScan(self.directory)

    def open(self, cache: PrefixCache, states: PrefixCache | None = None) -> int:
        """Add the directory's blocks to `cache`, its states to `states`, and start the writer.

        The blocks' data is not read. Returns the number of blocks added.
        """
        if not self.capacity_bytes:
            return 0
        put_label(self.directory, self.model)
        self._trees = (cache, states)
        entries: list[tuple[Block, Tokens, PrefixCache]] = []
        for path in regular_files(self.directory, "*.kv"):
            indexed = read_entry(path, self.identity)
            in_tree = None
            if indexed is not None:
                in_tree = self._indexed(FoundFile(path, *indexed))
            if in_tree is None:
                # A damaged file would prevent a new file of the same name.
                path.unlink(missing_ok=True)
                continue
            entries.append(in_tree)
        remove_parts(self.directory)
        # Oldest first, so that the cache knows their order. Within a sequence, its beginning comes
        # first.
        entries.sort(key=lambda e: (e[0].used_ns, e[0].start, e[0].stop))
        n_added = sum(tree.insert(tokens, block, block.used_ns) for block, tokens, tree in entries)
        self.budget.written_bytes()
        # If the directory can't be written now, it may be later. Every write tries again.
        self._known = FolderSurvey(max_bytes=self.capacity_bytes)
        with contextlib.suppress(OSError):
            self._known = self._survey()
        self._start()
        return n_added

    def _indexed(self, file: FoundFile) -> tuple[Block, Tokens, PrefixCache] | None:
        """The block of a file, its tokens and the tree for it; None if this model has no such
        blocks."""
        tree = self._trees[file.entry.state]
        if tree is None:
            return None
        block = self._blocks[file.path] = self._block(file.entry, tree.kind, None, file.n_data)
        block.written = True
        block.stamp_ns = file.stamp_ns
        block.used_ns = file.stamp_ns - block.file_time_ns
        return block, file.entry.tokens, tree

    def _block(self, entry: KvEntry, kind: Kind, data: bytes | None, size_bytes: int) -> Block:
        return Block(
            data=data,
            start=entry.start,
            stop=len(entry.tokens),
            size_bytes=size_bytes,
            path=self.directory / entry.file_name,
            kind=kind,
            file_bytes=entry.size_bytes(size_bytes),
        )

    def make_block(self, tokens: Tokens, data: bytes, start: int, kind: Kind = "kv") -> Block:
        """A block for `cache.insert` that ends at the end of `tokens`. Call `write` to write it to
        disk.
        """
        entry = KvEntry(self.identity, tokens, start, kind == "state")
        return self._block(entry, kind, data, len(data))

    def wants(self, block: Block) -> bool:
        """Is the block only in memory, and is it worth trying to write it?"""
        is_stored = block.written or block.pending or block.failed or block.data is None
        return self.capacity_bytes > 0 and not is_stored and not self.budget.known()[1]

    def write(self, block: Block, tokens: Tokens, until_ns: int) -> None:
        """Queue a block to be written. Files used after `until_ns` are not removed for it."""
        self._blocks[block.path] = block
        block.pending = True
        with self._lock:
            self._pending_bytes += block.file_bytes
        self._jobs.put((block, tokens.copy(), until_ns, time.monotonic()))

    def sync(self, trees: Sequence[PrefixCache]) -> None:
        """Apply the writer's results since the last call, and add files that other servers wrote.

        Written blocks can be demoted. Blocks whose file was removed are forgotten if not in
        memory.
        """
        self._written.clear()
        while self._foreign_files:
            file = self._foreign_files.popleft()
            if file.path not in self._blocks:
                indexed = self._indexed(file)
                if indexed is not None:
                    indexed[2].insert(indexed[1], indexed[0], indexed[0].used_ns)
        while self._outcomes:
            block, outcome = self._outcomes.popleft()
            block.pending = block.pending and outcome == "removed"
            block.written = outcome == "written"
            block.failed = outcome == "failed"
            trees[0].budget.changes += 1
            if outcome == "removed" and block.data is None:
                for tree in trees:
                    tree.forget(block)
            if not block.written and not block.pending and self._blocks.get(block.path) is block:
                del self._blocks[block.path]

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` until a block was written. Returns False on a timeout."""
        return bool(self._outcomes) or self._written.wait(seconds)

    def snapshot(self) -> dict[str, int]:
        """Counters. Writes of other processes today are as of our last write."""
        today_bytes, used_up = self.budget.known()
        return {
            "disk_written_bytes": self.written_bytes,
            "disk_written_today_bytes": today_bytes,
            "disk_daily_limit_bytes": self.daily_bytes,
            "disk_budget_used_up": int(used_up),
            "disk_read_blocks": self.read_blocks,
            "disk_bad_blocks": self.bad_blocks,
        }

    # --- reading ----------------------------------------------------------------------------------

    def load(
        self, block: Block, progress: Progress = lambda _n_bytes, _took_s: None
    ) -> memoryview | None:
        """Read the data of a block that is only on disk. The file is checked, and removed if it is
        invalid.

        Calls `progress` for each piece. Returns None if the file is missing or invalid.
        """
        data = None
        with contextlib.suppress(OSError):
            open_file = partial(self.open_file, block.path)
            data = read_data(open_file, self.identity, block.path.name, progress, self.n_readers)
            if data is None:
                block.path.unlink(missing_ok=True)
        if data is None:
            self.bad_blocks += 1
            return None
        self.read_blocks += 1
        return data

    # --- when to write ----------------------------------------------------------------------------

    def set_busy(self, busy: bool) -> None:
        """Tell the writer whether a step begins (True) or no request is running (False)."""
        if busy and self.quiet.is_set():
            self.quiet.clear()
            self._busy.set()
        elif not busy and not self.quiet.is_set():
            self._busy.clear()
            self.quiet.set()

    def missing_bytes(self, n_bytes: int, until_ns: int) -> int:
        """Bytes missing for `n_bytes` more, as far as is known, if files used until `until_ns` are
        removed.
        """
        missing = self._known.files_bytes + self._pending_bytes + n_bytes - self._known.max_bytes
        for file in self._known.files:
            if missing <= 0 or file.used_ns > until_ns:
                break
            block = self._blocks.get(file.path)
            missing -= file.size_bytes if block is None or block.file_time_ns <= until_ns else 0
        return missing

    def remove_copies(self, copies: Iterable[Copy], missing_bytes: int, until_ns: int) -> bool:
        """Remove files of `copies`, which are also held elsewhere, that were used after
        `until_ns`.

        Returns False and removes no file if that would not free `missing_bytes`.
        """
        removed: dict[Path, Copy] = {}
        for pool, block in copies:
            if missing_bytes > 0 and block.file_time_ns > until_ns:
                removed[block.path] = pool, block
                missing_bytes -= block.file_bytes
        if missing_bytes > 0:
            return False
        for path, (pool, block) in removed.items():
            path.unlink(missing_ok=True)
            block.written = False
            self._blocks.pop(path, None)
            if block.data is None:
                pool.forget(block)
        self._known = self._known.without(removed)
        return True

    def set_urgent(self, is_urgent: bool) -> None:
        """Start writing without waiting for a pause, because memory is needed; or cancel that
        (False).
        """
        self._urgent = is_urgent
        if is_urgent:
            self.quiet.set()

    def flush(self) -> None:
        """Wait until all queued blocks are written."""
        self._finish_writing()
        if self.capacity_bytes:
            self._start()

    def close(self) -> None:
        """Write the queued blocks, then stop the threads."""
        self.reads.close()
        self._finish_writing()

    def _finish_writing(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self.set_urgent(True)
            self._thread.join()
            self._thread = None

    def _start(self) -> None:
        self._urgent = False
        self._busy.clear()
        self.quiet.set()
        self._thread = threading.Thread(target=self._write_all, name="kv-writer", daemon=True)
        self._thread.start()

    # --- the writer's thread ----------------------------------------------------------------------

    def _write_all(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=tunables.FOLDER_SCAN_S)
            except queue.Empty:
                self._find_new_files()
                continue
            if job is None:
                break
            block, tokens, until_ns, queued_s = job
            self._wait_for_a_pause(queued_s + tunables.WRITE_PATIENCE_S)
            with self._lock:
                self._pending_bytes -= block.file_bytes
            outcome = self._write_block(block, tokens, until_ns)
            self.budget.written_bytes()
            self._outcomes.append((block, outcome))
            self._written.set()
            if self._jobs.empty():
                self._set_time_stamps()
            if self._scan.due:
                self._find_new_files()
        self._set_time_stamps()

    def _find_new_files(self) -> None:
        """Read the headers of files that other servers have written."""
        for path in self._scan.new_files(list(self._blocks)):
            indexed = read_entry(path, self.identity)
            if indexed is not None:
                self._foreign_files.append(FoundFile(path, *indexed))

    def _write_block(self, block: Block, tokens: Tokens, until_ns: int) -> Outcome:
        data = block.data
        if data is None:
            # It was evicted in the meantime, so it is not needed.
            return "failed"
        if block.path.exists():
            return "written"
        # Other processes may have written in the meantime.
        self.budget.written_bytes()
        if self.budget.known()[1]:
            return "deferred"
        try:
            self._write_file(tokens, block, data, until_ns)
        except OSError:
            # On a full or read-only disk only this block is lost.
            return "failed"
        return "written"

    @property
    def _is_urgent(self) -> bool:
        return self._urgent or self._pending_bytes > tunables.WRITE_WAITING_BYTES

    def _wait_for_a_pause(self, until_s: float) -> None:
        while not self._is_urgent:
            if not self.quiet.wait(max(0.0, until_s - time.monotonic())):
                return
            if self._urgent or not self._busy.wait(tunables.WRITE_PAUSE_S):
                return

    def _write_file(
        self, tokens: Tokens, block: Block, data: bytes | memoryview, until_ns: int
    ) -> None:
        entry = KvEntry(self.identity, tokens, block.start, block.kind == "state")
        # Another process may have deleted the folder.
        put_label(self.directory, self.model)
        self._make_room(block, until_ns)
        self.budget.count(self.directory, block.file_bytes)
        write_pieces(block.path, entry.pieces(data), self._pause)
        self.written_bytes += len(data)

    def _pause(self, took_s: float) -> None:
        """Rest after a piece that took `took_s`, while steps run: computing has priority."""
        if not self._is_urgent:
            self.quiet.wait(min(took_s * tunables.WRITE_RESTS, tunables.WRITE_REST_S))

    def _set_time_stamps(self) -> None:
        """Set the files' time stamps to their last use."""
        for block in list(self._blocks.values()):
            stamp_ns = block.file_time_ns
            if stamp_ns != block.stamp_ns:
                with contextlib.suppress(OSError):
                    if file_time_ns(block, block.path.stat().st_mtime_ns) == stamp_ns:
                        os.utime(block.path, ns=(stamp_ns, stamp_ns))
                    block.stamp_ns = stamp_ns

    def _survey(self) -> FolderSurvey:
        files = []
        for path in regular_files(self.directory.parent, "*/*.kv"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                used_ns = file_time_ns(self._blocks.get(path), stat.st_mtime_ns)
                files.append(StoredFile(used_ns, stat.st_size, path))
        total = sum(file.size_bytes for file in files)
        # Files that other servers write now count too.
        for path in regular_files(self.directory.parent, "*/*.part"):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        spare_bytes = shutil.disk_usage(self.directory).free - self.free_bytes
        return FolderSurvey(sorted(files), total, min(self.capacity_bytes, total + spare_bytes))

    def _make_room(self, block: Block, until_ns: int) -> None:
        """Remove files last used by `until_ns` until `block` fits. Raises OSError if that fails."""
        files, total, max_bytes = self._survey()
        if block.file_bytes > max_bytes:
            raise OSError("larger than the disk cache's limit or the free space of the disk")
        removed, enough = files_to_remove(files, total + block.file_bytes - max_bytes, until_ns)
        for file in removed:
            file.path.unlink(missing_ok=True)
            removed_block = self._blocks.get(file.path)
            if removed_block is not None:
                self._outcomes.append((removed_block, "removed"))
        new = []
        if enough:
            new = [StoredFile(block.file_time_ns, block.file_bytes, block.path)]
        remaining = sorted({*files, *new} - set(removed))
        self._known = FolderSurvey(remaining, sum(file.size_bytes for file in remaining), max_bytes)
        if not enough:
            raise OSError("all files on disk were used more recently")


def file_time_ns(block: Block | None, stamp_ns: int) -> int:
    """The time stamp that a file should have. Our own block decides, unless another server has
    stamped the file later: then it has another `stamp_ns` than the block knows."""
    if block is None:
        return stamp_ns
    if block.stamp_ns in (0, stamp_ns):
        return block.file_time_ns
    return max(block.file_time_ns, stamp_ns)


def tier_of(backend: Backend, settings: EngineSettings) -> DiskTier:
    """The disk tier for this backend's KV, with the limits in `settings`."""
    if settings.disk_dir is None or settings.disk_bytes <= 0:
        return DiskTier()
    identity = identity_of(backend)
    disk = DiskTier(
        Path(settings.disk_dir) / identity.name,
        identity.name,
        settings.disk_bytes,
        settings.disk_free_bytes,
        settings.disk_daily_bytes,
        settings.model_name,
        tunables.READERS_WITH_DEVICE_KV if backend.capabilities.kv_on_device else 1,
    )
    put_label(disk.directory, disk.model)
    remove_stale(disk.directory, identity.kind)
    return disk
