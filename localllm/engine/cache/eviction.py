"""The eviction order for context, memory and disk. To change how the cache evicts, change this
file.

context   Finished sequences that are in the cache are evicted as soon as others run, and before a
          prompt is read. If cells are needed, the oldest sequence is truncated, and its end is
          moved to memory.
memory    If cells are needed, blocks that the context also holds are evicted first. Then come the
          least recently used blocks of all trees. A block with a copy on disk is demoted: it loses
          its memory and keeps its place in the tree. A block without a copy is written first, if
          the disk has room, and the eviction waits for that. Otherwise it is evicted. Locked blocks
          stay. No block is evicted for one that was used longer ago. No block used within the last
          hour is evicted for a sequence that could stay in the context.
disk      The least recently used files of all models, but none for a block used longer ago. New
          blocks are written at once, so that they survive a crash. A file used within the last hour
          is removed only if its block is also in memory or the context. If room is short, each of
          the three places therefore holds different data.

Among blocks that were used together, ends of sequences are evicted before beginnings (`depth`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from localllm.engine.cache import tunables
from localllm.engine.step_costs import PROMPT_STEP_S
from localllm.engine.tokens import Tokens
from localllm_backends.contract import Capabilities, ModelInfo

# Room for a block: available, available after pending writes, or not available.
Space = Literal["free", "pending", "full"]
# The fate of a block that only memory holds (`CacheBudget._evict`).
Unwritten = Literal["saved", "kept", "evicted"]
# KV of a range of tokens, or the state at the end of a sequence, which is only useful as a whole.
Kind = Literal["kv", "state"]


def depth(start: int, stop: int, kind: Kind) -> int:
    """The order of blocks that were used together: the deeper block is evicted first.

    So the end of a sequence is evicted before its beginning.
    """
    if kind == "kv":
        return start
    return stop


# --- memory ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Block:
    """Exported KV of tokens [start, stop) of a sequence, or the state after them.

    Its `size_bytes` are in memory (`data`), in a file (`path`), or both.

        `pending`: it is queued or being written, and can be demoted after that.
        `written`: it has a file of `file_bytes`.
        `failed`: the write failed, and the block was not used since.
        `used_ns`: the time of its last use.
        `stamp_ns`: the time stamp of its file.

    Only the writer's thread changes `stamp_ns`. Only the engine's thread changes the other fields.
    """

    data: bytes | memoryview | None
    start: int
    stop: int
    size_bytes: int = 0
    pending: bool = False
    path: Path = Path()
    kind: Kind = "kv"
    written: bool = False
    failed: bool = False
    file_bytes: int = 0
    used_ns: int = 0
    stamp_ns: int = 0

    def __post_init__(self) -> None:
        if self.data is not None:
            self.size_bytes = len(self.data)

    @property
    def held_bytes(self) -> int:
        """Bytes in memory (0 if the block is only on disk)."""
        if self.data is not None:
            return len(self.data)
        return 0

    @property
    def file_time_ns(self) -> int:
        """The time stamp for its file: the time of its last use, made older by its depth.

        Files are ordered by this time.
        """
        return self.used_ns - depth(self.start, self.stop, self.kind) * tunables.FILE_DEPTH_NS

    def demote(self) -> bool:
        """Free the memory and keep the file. Returns False if there is no file."""
        if not (self.written and self.path.exists()):
            return False
        self.data = None
        return True

    def touch(self, at_ns: int) -> None:
        """Mark the block as used at `at_ns`. After that a failed write may be tried again."""
        self.failed = self.failed and at_ns <= self.used_ns
        self.used_ns = max(at_ns, self.used_ns)


class Candidate(NamedTuple):
    """A block that holds memory and is not locked."""

    last_used_ns: int
    depth: int
    block: Block
    pool: EvictablePool


class EvictablePool(Protocol):
    """Blocks whose memory can be freed: a tree of them."""

    held_bytes: int

    def candidates(self) -> Iterable[Candidate]: ...  # those that hold memory and are not locked
    def on_path(self, prefix: Tokens) -> list[Block]: ...  # those along a prefix
    # the tokens from 0 to the block's end; None if they are no longer known
    def tokens_of(self, block: Block) -> Tokens | None: ...
    # frees its memory and keeps the copy; returns the bytes freed
    def demote(self, block: Block) -> int: ...
    def forget(self, block: Block) -> None: ...  # locked or not
    def evict(self, block: Block) -> None: ...  # must not be locked


@dataclass(eq=False)
class CacheBudget:
    """`capacity_bytes` of memory for all `pools` together.

    `last_use_ns`: the time of the newest use, by `clock` but always increasing. The time stamps of
        files can be compared with it.
    `changes`: grows with every change that may make room or change a lookup. A caller that was
        refused, or remembers a lookup, tries again if it has grown.
    `save`: writes a block that only memory holds, and may remove files used until the given time.
        Returns "pending" if it will be written, "free" if that is not needed.
    `wait_for_writing`: waits until a block was written. Returns False if it must not wait.
    `in_context`: blocks whose tokens the context also holds. They are the first to be evicted if a
        sequence has to leave the context.
    """

    capacity_bytes: int
    last_use_ns: int = 0
    changes: int = 0
    pools: list[EvictablePool] = field(default_factory=list)
    clock: Callable[[], int] = time.time_ns
    save: Callable[[Candidate, int], Space] = lambda _candidate, _until: "free"
    wait_for_writing: Callable[[], bool] = lambda: False
    in_context: Callable[[], Iterable[tuple[EvictablePool, Block]]] = tuple

    def use(self) -> int:
        """Record a use that happens now, and return its time."""
        self.last_use_ns = max(self.last_use_ns + 1, self.clock())
        return self.last_use_ns

    @property
    def held_bytes(self) -> int:
        return sum(pool.held_bytes for pool in self.pools)

    @property
    def stale_before_ns(self) -> int:
        """Blocks used until this time are evicted even for data that could stay elsewhere."""
        return self.last_use_ns - int(tunables.STALE_S * 1e9)

    def make_room(
        self,
        need_bytes: int,
        *,
        prefix: Tokens | None = None,
        used_ns: int | None = None,
        force: bool = False,
    ) -> Space:
        """Free memory until `need_bytes` more fit in the capacity.

        Blocks along `prefix`, and blocks used after `used_ns` (None: now), are not evicted.
        `force`: there will be no second try, so wait for writes if necessary.
        """
        missing = self.held_bytes + need_bytes - self.capacity_bytes
        if missing <= 0:
            return "free"
        if need_bytes > self.capacity_bytes:
            return "full"
        keep = self._on_path(prefix)
        until_ns = self.last_use_ns if used_ns is None else used_ns
        if force:
            missing -= self._drop_copies(missing)
        # Data that could stay in the context displaces no file on disk.
        missing -= self._evict(
            missing, keep, until_ns, "saved" if force or until_ns > self.stale_before_ns else "kept"
        )
        waited = True
        while missing > 0 and waited and self._is_writing:
            if not force:
                return "pending"
            waited = self.wait_for_writing()
            missing -= self._evict(missing, keep, until_ns, "saved" if waited else "evicted")
        if missing <= 0:
            return "free"
        return "full"

    @property
    def _is_writing(self) -> bool:
        """True while a block in memory is being written. It can be demoted afterwards."""
        return any(candidate.block.pending for candidate in self.unlocked())

    def _on_path(self, prefix: Tokens | None) -> set[Block]:
        """The blocks along `prefix`; empty if it is None."""
        if prefix is None:
            return set()
        return set().union(*(pool.on_path(prefix) for pool in self.pools))

    def _drop_copies(self, n_bytes: int) -> int:
        """Free up to `n_bytes` of blocks that the context also holds, locked or not.

        Returns the bytes freed.
        """
        freed_bytes = 0
        for pool, block in self.in_context():
            if freed_bytes >= n_bytes:
                break
            held_bytes = block.held_bytes
            if held_bytes and not pool.demote(block):
                pool.forget(block)
            freed_bytes += held_bytes
        return freed_bytes

    def shrink(self, n_bytes: int) -> int:
        """Free `n_bytes` of memory, or as much as is not locked. Returns the bytes freed."""
        return self._evict(n_bytes, set(), self.last_use_ns, "evicted", all_or_nothing=False)

    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity. Blocks over the new capacity stay until room is needed."""
        if capacity_bytes != self.capacity_bytes:
            self.capacity_bytes = capacity_bytes
            self.changes += 1

    def candidates(self, *, pending_last: bool = False) -> list[Candidate]:
        """Blocks that hold memory and are not locked, least recently used first.

        With `pending_last`, blocks that are being written come last.
        """
        return sorted(
            self.unlocked(),
            key=lambda c: (pending_last and c.block.pending, c.last_used_ns, -c.depth),
        )

    def unlocked(self) -> Iterable[Candidate]:
        """Blocks that hold memory and are not locked, in no order."""
        return chain.from_iterable(pool.candidates() for pool in self.pools)

    def _evict(
        self,
        n_bytes: int,
        keep: set[Block],
        until_ns: int,
        on_unwritten: Unwritten,
        *,
        all_or_nothing: bool = True,
    ) -> int:
        """Free up to `n_bytes` from the least recently used blocks, and return the bytes freed.

        Blocks in `keep` or used after `until_ns` are not evicted. `on_unwritten` decides about
        blocks without a file:

            "saved": they are written if possible.
            "kept": a block that is being written stays, others are evicted.
            "evicted": they are evicted, those that are being written last.

        `all_or_nothing`: no block is evicted unless that frees enough. Otherwise two sequences
        could evict each other's blocks by turns without either having enough room.
        """
        freed_bytes = 0
        evictable_bytes = 0
        pending_bytes = 0
        can_save = on_unwritten == "saved"
        victims: list[Candidate] = []
        for candidate in self.candidates(pending_last=on_unwritten == "evicted"):
            if freed_bytes + evictable_bytes + pending_bytes >= n_bytes:
                break
            block = candidate.block
            demoted = candidate.pool.demote(block)
            if demoted:
                freed_bytes += demoted
                self.changes += 1
                continue
            if can_save and not block.pending:
                can_save = self.save(candidate, until_ns) != "full"
            if block.pending and on_unwritten != "evicted":
                pending_bytes += block.held_bytes if on_unwritten == "saved" else 0
            elif block not in keep and candidate.last_used_ns <= until_ns:
                evictable_bytes += block.held_bytes
                victims.append(candidate)
        if all_or_nothing and freed_bytes + evictable_bytes < n_bytes:
            return freed_bytes
        self._evict_all(victims)
        return freed_bytes + evictable_bytes

    def _evict_all(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            candidate.pool.evict(candidate.block)


def surplus_states(points: Sequence[tuple[int, bool]], interval: int) -> set[int]:
    """The states of one sequence that are evicted before any others.

    `points` are (tokens, whether other sequences branch there). A state is surplus if it is less
    than `interval` after the previous kept state, is not among the newest, and no sequence branches
    there.
    """
    surplus = set()
    last_kept = 0
    for i, (stop, is_branch) in enumerate(points):
        if is_branch or stop - last_kept >= interval or i >= len(points) - tunables.NEWEST_STATES:
            last_kept = stop
        else:
            surplus.add(stop)
    return surplus


# --- the context ----------------------------------------------------------------------------------


@dataclass(eq=False)
class IdleSequence:
    """A finished sequence that is still in the context.

    `exported`: all of it is in the prefix cache.
    `space`: whether there was room to export more of it, as of `seen_changes` of the cache.
    `used_ns`: when its request ended. Blocks used since are not evicted for it.
    """

    sequence: int
    tokens: Tokens
    exported: bool = False
    used_ns: int | None = None
    space: Space = "free"
    seen_changes: int | None = None

    def cache_tokens(self, start: int = 0, stop: int | None = None) -> Tokens:
        """Its tokens [start, stop)."""
        return self.tokens[start:stop]


def sequences_to_evict(
    idle: Sequence[IdleSequence], capabilities: Capabilities, *, busy: bool, step_share: float
) -> list[IdleSequence]:
    """The exported sequences to evict from the context, because every token there slows down all
    others.

    Device KV is evicted only if others are `busy` and idle tokens cost them enough
    (`exporting_can_wait`). Unless others are `busy`, the newest stays for the next turn of its
    chat.
    """
    if capabilities.kv_on_device and not (busy and step_share > tunables.IDLE_STEP_SHARE):
        return []
    if not busy:
        idle = idle[:-1]
    return [i for i in idle if i.exported]


def context_order(idle: Sequence[IdleSequence]) -> list[IdleSequence]:
    """The eviction order if cells or sequences run short: exported ones first, then the oldest."""
    return sorted(idle, key=lambda i: not i.exported)


def exporting_can_wait(
    capabilities: Capabilities,
    info: ModelInfo,
    cells_free: int,
    n_sequences: int,
    step_share: float,
) -> bool:
    """Is there no benefit in exporting while other requests run?

    KV on a device is slow to export. Idle tokens make each step longer by about `step_share`: the
    size of their KV relative to the weights.
    """
    has_room = cells_free > tunables.LOW_CELLS_SHARE * info.n_ctx and n_sequences < info.n_seq_max
    return capabilities.kv_on_device and has_room and step_share <= tunables.IDLE_STEP_SHARE


def export_time_s(capabilities: Capabilities, n_tokens: int, token_s: float) -> float:
    """Seconds in which idle sequences may be exported before a prompt of `n_tokens` is read.

    0 means that they are exported in pieces between steps. `token_s` is the time per token (0:
    unknown).

    In a unified KV cache the attention of a prompt covers every cell up to the highest one in use,
    of any sequence. 1,400 tokens of SmolLM2 after 3,000 idle ones took 6.5 s instead of 5.2 s. If
    each sequence has its own cells, they do not affect each other.
    """
    if (
        not capabilities.unified
        or capabilities.kv_on_device
        or n_tokens < tunables.EXPORT_FIRST_TOKENS
    ):
        return 0.0
    share_s = tunables.EXPORT_FIRST_SHARE * n_tokens * token_s
    if token_s:
        return min(PROMPT_STEP_S, share_s)
    return PROMPT_STEP_S


# --- the disk -------------------------------------------------------------------------------------


class StoredFile(NamedTuple):
    """A file of the disk tier. `used_ns`: the time of its last use, made older by its depth."""

    used_ns: int
    size_bytes: int
    path: Path


def files_to_remove(
    files: Iterable[StoredFile], excess_bytes: int, used_ns: int
) -> tuple[list[StoredFile], bool]:
    """The least recently used files that free `excess_bytes`, and whether they are enough.

    Files used after `used_ns` are kept. Otherwise two sequences would be written by turns forever.
    """
    removed = []
    for file in sorted(files):
        if excess_bytes <= 0 or file.used_ns > used_ns:
            break
        removed.append(file)
        excess_bytes -= file.size_bytes
    return removed, excess_bytes <= 0
