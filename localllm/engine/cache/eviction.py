"""What leaves first where room is short: changing how the cache evicts is changing this file.

context   Finished sequences that are in the cache leave as soon as others run, and before a prompt
          is read. Where cells are needed the oldest is cut from its end, and its end goes to
          memory.
memory    What the context holds too, if its cells are needed; then the blocks unused the longest,
          whichever tree has them. One with a copy on disk is demoted: it loses its memory, never
          its place. One without is written, if the disk has room for it, and waited for; else it is
          evicted. What is locked stays, and nothing is evicted for what was used longer ago, nor
          within the hour for a sequence that could stay in the context.
disk      The files unused the longest, of all models, but none for what was used longer ago. What
          is new is written at once, so that it survives a crash; but a file used within the hour
          makes way only if its block is in memory or in the context too. So where room is short
          each place holds what the others don't.

Of what was used together, ends of sequences leave before their beginnings (`depth`).
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

# Room for a block: there now, there once what is being written is written, or not to be had.
Space = Literal["free", "pending", "full"]
# what becomes of a block that only memory holds (`CacheBudget._evict`)
Unwritten = Literal["saved", "kept", "evicted"]
# KV of a range of tokens; or the state behind a sequence, which is of use as a whole only.
Kind = Literal["kv", "state"]


def depth(start: int, stop: int, kind: Kind) -> int:
    """Of blocks that were used together the deeper one leaves first: the end of a sequence before
    its beginning."""
    if kind == "kv":
        return start
    return stop


# --- memory ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Block:
    """Exported KV of tokens [start, stop) of a sequence, or the state behind them, of `size_bytes`:
    in memory (`data`), in a file (`path`), or both.

    `pending`: it waits to be written, or is being written, and can be demoted after that;
    `written`: it has a file, of `file_bytes`;
    `failed`: it could not be written, and was not used since.
    `used_ns`: when it was used, `stamp_ns`: what its file says of that, which is the writer's
    alone; all else is the engine's thread's."""

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
        """Bytes in memory (0 while only elsewhere)."""
        if self.data is not None:
            return len(self.data)
        return 0

    @property
    def file_time_ns(self) -> int:
        """What its file is to say of when it was used, by which files are ordered: made older by
        its depth."""
        return self.used_ns - depth(self.start, self.stop, self.kind) * tunables.FILE_DEPTH_NS

    def demote(self) -> bool:
        """Free the memory and keep the file; False where there is none."""
        if not (self.written and self.path.exists()):
            return False
        self.data = None
        return True

    def touch(self, at: int) -> None:
        """It was used at that time, in the budget's uses, and its file is as recent: if it could
        not be written, it may be now."""
        self.failed = self.failed and at <= self.used_ns
        self.used_ns = max(at, self.used_ns)


class Candidate(NamedTuple):
    """A block that holds memory and is not locked."""

    last_used: int
    depth: int
    block: Block
    pool: EvictablePool


class EvictablePool(Protocol):
    """Blocks that can be asked for their memory: a tree of them."""

    held_bytes: int

    def candidates(self) -> Iterable[Candidate]: ...  # those that hold some and are not locked
    def on_path(self, prefix: Tokens) -> list[Block]: ...  # those that a prefix goes through
    # the tokens that one ends; None: not known any more
    def line(self, block: Block) -> Tokens | None: ...
    def demote(self, block: Block) -> int: ...  # keep only its copy; returns the bytes freed
    def forget(self, block: Block) -> None: ...  # locked or not
    def evict(self, block: Block) -> None: ...  # one that is not locked


@dataclass(eq=False)
class CacheBudget:
    """`capacity_bytes` of memory for all `pools` together.
    `uses` counts time: by the `clock`'s nanoseconds, so that files can be compared by it, but
    always on.
    `changes` grows with all that may make room or changes what is found: who was refused, or
    remembers what it found, asks again.
    `save`: has a block written that only memory holds, for which what was used until then may go
    ("pending": it will be, "free": no need).
    `wait_for_writing`: waits until something was written; False if that is not to be waited for.
    `in_context`: blocks whose tokens the context holds too, the
    first to go where something has to leave it."""

    capacity_bytes: int
    uses: int = 0
    changes: int = 0
    pools: list[EvictablePool] = field(default_factory=list)
    clock: Callable[[], int] = time.time_ns
    save: Callable[[Candidate, int], Space] = lambda _candidate, _until: "free"
    wait_for_writing: Callable[[], bool] = lambda: False
    in_context: Callable[[], Iterable[tuple[EvictablePool, Block]]] = tuple

    def use(self) -> int:
        """Something is used now: when, as `uses` counts."""
        self.uses = max(self.uses + 1, self.clock())
        return self.uses

    @property
    def held_bytes(self) -> int:
        return sum(pool.held_bytes for pool in self.pools)

    @property
    def forgotten(self) -> int:
        """What was used until then makes way for what could do without."""
        return self.uses - int(tunables.FORGOTTEN_S * 1e9)

    def make_room(
        self,
        need_bytes: int,
        *,
        prefix: Tokens | None = None,
        used: int | None = None,
        force: bool = False,
    ) -> Space:
        """Free memory until `need_bytes` more fit in the capacity, without evicting anything on the
        path of `prefix`, or more recent than `used` (None: now). `force`: it is now or never."""
        missing = self.held_bytes + need_bytes - self.capacity_bytes
        if missing <= 0:
            return "free"
        if need_bytes > self.capacity_bytes:
            return "full"
        keep = self._on_path(prefix)
        until = self.uses if used is None else used
        if force:
            missing -= self._drop_copies(missing)
        # What could stay where it is takes no other's place on disk.
        missing -= self._evict(
            missing, keep, until, "saved" if force or until > self.forgotten else "kept"
        )
        waited = True
        while missing > 0 and waited and self._is_writing:
            if not force:
                return "pending"
            waited = self.wait_for_writing()
            missing -= self._evict(missing, keep, until, "saved" if waited else "evicted")
        if missing <= 0:
            return "free"
        return "full"

    @property
    def _is_writing(self) -> bool:
        """True while something that memory holds is being written, which can be demoted then."""
        return any(candidate.block.pending for candidate in self.candidates())

    def _on_path(self, prefix: Tokens | None) -> set[Block]:
        """The blocks that `prefix` goes through (None: none)."""
        if prefix is None:
            return set()
        return set().union(*(pool.on_path(prefix) for pool in self.pools))

    def _drop_copies(self, n_bytes: int) -> int:
        """Free up to `n_bytes` of what the context holds too, locked or not. Returns the bytes
        freed."""
        freed = 0
        for pool, block in self.in_context():
            if freed >= n_bytes:
                break
            held = block.held_bytes
            if held and not pool.demote(block):
                pool.forget(block)
            freed += held
        return freed

    def shrink(self, n_bytes: int) -> int:
        """Give back `n_bytes` of memory, or all that no lock holds; returns the bytes freed."""
        return self._evict(n_bytes, set(), self.uses, "evicted", all_or_nothing=False)

    def resize(self, capacity_bytes: int) -> None:
        """Hold no more than so many bytes from now on; what is held already stays until there is
        need for room."""
        if capacity_bytes != self.capacity_bytes:
            self.capacity_bytes = capacity_bytes
            self.changes += 1

    def candidates(self, *, pending_last: bool = False) -> list[Candidate]:
        """What holds memory and is not locked, unused the longest first; with `pending_last` what
        is being written comes behind all else."""
        found = chain.from_iterable(pool.candidates() for pool in self.pools)
        return sorted(
            found, key=lambda c: (pending_last and c.block.pending, c.last_used, -c.depth)
        )

    def _evict(
        self,
        n_bytes: int,
        keep: set[Block],
        until: int,
        unwritten: Unwritten,
        *,
        all_or_nothing: bool = True,
    ) -> int:
        """Free up to `n_bytes` from the blocks unused the longest, but evict none that was used
        after `until` or is to be kept. What is `unwritten` so far is saved if it can be; or kept
        only if it is being written; or evicted, what is not being written first. `all_or_nothing`:
        nothing is evicted unless that is enough, for two sequences could else take turns at losing
        what the other can't use. Returns the bytes freed."""
        freed = 0
        lost = 0
        coming = 0
        can_save = unwritten == "saved"
        doomed: list[Candidate] = []
        for candidate in self.candidates(pending_last=unwritten == "evicted"):
            if freed + lost + coming >= n_bytes:
                break
            block = candidate.block
            demoted = candidate.pool.demote(block)
            if demoted:
                freed += demoted
                self.changes += 1
                continue
            if can_save and not block.pending:
                can_save = self.save(candidate, until) != "full"
            if block.pending and unwritten != "evicted":
                coming += block.held_bytes if unwritten == "saved" else 0
            elif block not in keep and candidate.last_used <= until:
                lost += block.held_bytes
                doomed.append(candidate)
        if all_or_nothing and freed + lost < n_bytes:
            return freed
        self._evict_all(doomed)
        return freed + lost

    def _evict_all(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            candidate.pool.evict(candidate.block)


def surplus_states(points: Sequence[tuple[int, bool]], interval: int) -> set[int]:
    """Of one sequence's `points` (tokens, and whether others part there) those that leave before
    anything else: nearer than `interval` to one before them, not among the newest, and not where
    others part."""
    surplus = set()
    before = 0
    for i, (stop, forks) in enumerate(points):
        if forks or stop - before >= interval or i >= len(points) - tunables.NEWEST_STATES:
            before = stop
        else:
            surplus.add(stop)
    return surplus


# --- the context ----------------------------------------------------------------------------------


@dataclass(eq=False)
class IdleSequence:
    """A finished sequence still in the context. `exported`: all of it is in the prefix cache;
    `space`: what room there was for more of it, when the cache had seen `as_of` changes.
    `used`: when its request ended, in uses of the cache; it takes no room in the cache from what
    was used since."""

    sequence: int
    tokens: Tokens
    exported: bool = False
    used: int | None = None
    space: Space = "free"
    as_of: int | None = None

    def line(self, start: int = 0, stop: int | None = None) -> Tokens:
        """Its tokens [start, stop)."""
        return self.tokens[start:stop]


def may_leave(
    idle: Sequence[IdleSequence], able: Capabilities, *, busy: bool, step_share: float
) -> list[IdleSequence]:
    """Those that leave the context: every token held there slows every other sequence. On a device
    only where others are `busy`, and what idle ones cost them is worth it (`may_stay`). Unless
    others are `busy` one stays, for the next turn of the chat just answered."""
    if able.kv_on_device and not (busy and step_share > tunables.IDLE_STEP_SHARE):
        return []
    return [i for i in (idle if busy else idle[:-1]) if i.exported]


def context_order(idle: Sequence[IdleSequence]) -> list[IdleSequence]:
    """Which leave first where cells or sequences run short: what is in the cache already, then the
    oldest."""
    return sorted(idle, key=lambda i: not i.exported)


def may_stay(
    able: Capabilities, info: ModelInfo, cells_free: int, n_sequences: int, step_share: float
) -> bool:
    """Is there nothing to be gained by exporting while others run? A device's KV is dear to read
    out; idle tokens make each step longer by about `step_share`, their bytes' part of the
    weights'."""
    room = cells_free > tunables.FEW_CELLS_SHARE * info.n_ctx and n_sequences < info.n_seq_max
    return able.kv_on_device and room and step_share <= tunables.IDLE_STEP_SHARE


def export_time_s(able: Capabilities, n_tokens: int, token_s: float) -> float:
    """How long idle sequences may be exported before `n_tokens` of prompts are read (0: beside
    them, piece by piece), each in `token_s` (0: not known).

    In a unified KV cache a prompt's attention computes every cell up to the highest that is held,
    whoever holds it: 1,400 tokens of SmolLM2 behind 3,000 idle ones took 6.5 s instead of 5.2.
    Where sequences have cells of their own nobody is in another's way."""
    if not able.shares_cells or able.kv_on_device or n_tokens < tunables.EXPORT_FIRST_TOKENS:
        return 0.0
    share_s = tunables.EXPORT_FIRST_SHARE * n_tokens * token_s
    if token_s:
        return min(PROMPT_STEP_S, share_s)
    return PROMPT_STEP_S


# --- the disk -------------------------------------------------------------------------------------


class StoredFile(NamedTuple):
    """A file of the disk tier. `used_ns`: when it was used, made older by its depth."""

    used_ns: int
    size_bytes: int
    path: Path


def files_to_remove(
    files: Iterable[StoredFile], excess_bytes: int, used_ns: int
) -> tuple[list[StoredFile], bool]:
    """The files unused the longest until `excess_bytes` are freed, none of them used after
    `used_ns`: two sequences would else be written by turns, for ever. And whether they are
    enough."""
    found = []
    for file in sorted(files):
        if excess_bytes <= 0 or file.used_ns > used_ns:
            break
        found.append(file)
        excess_bytes -= file.size_bytes
    return found, excess_bytes <= 0
