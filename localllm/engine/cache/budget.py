"""The memory that trees of cached blocks share: how much there is, who used what last, and who makes room for what is new.

Memory is taken from the blocks unused the longest, whichever tree has them. One that has a copy on disk is demoted (it loses
its memory, never its place), wherever it stands in its tree. One that is about to have a copy is waited for. Only one without
a copy is evicted. What is locked is neither demoted nor evicted, and nothing is evicted for what was used longer ago.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from localllm.engine.tokens import Tokens

# Room for a block: there now, there once what is being written is written, or not to be had.
Room = Literal["now", "later", "never"]
# When a block was used last, and which of those used together goes first.
Age = tuple[int, int]


class Shelf(Protocol):
    """A tree whose blocks can be asked for their memory. They are named by `id`."""

    held_bytes: int

    def ages(self) -> Iterable[tuple[Age, int]]:
        """Every block that holds memory and is not locked, by its age."""
        ...

    def protected(self, line: Tokens) -> set[int]:
        """The blocks that `line` goes through: they are not evicted for it."""
        ...

    def demote(self, block: int) -> int:
        """Let a block keep only its copy; returns the bytes freed, 0 where it has none."""
        ...

    def losable(self, block: int, *, pending: bool) -> int:
        """The bytes that evicting a block frees; 0 for one that is about to have a copy, unless told `pending`."""
        ...

    def evict(self, block: int) -> None:
        """Forget a block."""
        ...

    @property
    def waits(self) -> bool:
        """True while a block in memory is about to have a copy."""
        ...


@dataclass(eq=False)
class Budget:
    """`capacity_bytes` for all `shelves` together. `uses` counts time: by the `clock`'s nanoseconds where there is one, so that files
    can be compared by it, but always on; `changes` grows with everything that may make room or changes
    what is found, so that who was refused, or remembers what it found, knows when to ask again."""

    capacity_bytes: int
    uses: int = 0
    changes: int = 0
    shelves: list[Shelf] = field(default_factory=list)
    clock: Callable[[], int] = lambda: 0

    def use(self) -> int:
        """Something is used now: when, as `uses` counts."""
        self.uses = max(self.uses + 1, self.clock())
        return self.uses

    @property
    def held_bytes(self) -> int:
        """Bytes in memory, of all shelves."""
        return sum(shelf.held_bytes for shelf in self.shelves)

    def make_room(
        self, need_bytes: int, *, line: Tokens | None = None, used: int | None = None, force: bool = False
    ) -> Room:
        """Free memory until `need_bytes` more fit in the capacity, without evicting anything on the way of `line`, or that
        is more recent than `used` (None: now). `force`: what is being written is not waited for."""
        missing = self.held_bytes + need_bytes - self.capacity_bytes
        if missing <= 0:
            return "now"
        if need_bytes > self.capacity_bytes:
            return "never"
        keep = set().union(*(shelf.protected(line) for shelf in self.shelves)) if line is not None else set()
        until = self.uses if used is None else used
        if self._free(missing, keep, until, pending=False, all_or_nothing=True) >= missing:
            return "now"
        if not any(shelf.waits for shelf in self.shelves):
            return "never"
        if not force:
            return "later"
        missing = self.held_bytes + need_bytes - self.capacity_bytes
        freed = self._free(missing, keep, until, pending=True, all_or_nothing=True)
        return "now" if freed >= missing else "never"

    def _by_age(self) -> list[tuple[Age, int, int]]:
        return sorted((age, block, i) for i, shelf in enumerate(self.shelves) for age, block in shelf.ages())

    def shrink(self, n_bytes: int) -> int:
        """Give back `n_bytes` of memory, or all that no lock holds; returns the bytes freed."""
        freed = self._free(n_bytes, set(), self.uses, pending=False)
        return freed + (self._free(n_bytes - freed, set(), self.uses, pending=True) if freed < n_bytes else 0)

    def resize(self, capacity_bytes: int) -> None:
        """Hold no more than so many bytes from now on; what is held already stays until there is need for room."""
        if capacity_bytes != self.capacity_bytes:
            self.capacity_bytes = capacity_bytes
            self.changes += 1

    def _free(self, n_bytes: int, keep: set[int], until: int, *, pending: bool, all_or_nothing: bool = False) -> int:
        """Free up to `n_bytes` from the blocks unused the longest; `pending` ones only if told to, and none evicted that was
        used after `until` or is to be kept. `all_or_nothing`: nothing is evicted unless that is enough, for two lines could
        else take turns at losing what the other can't use. Returns the bytes freed."""
        order = self._by_age()
        freed, losable = 0, 0
        doomed: list[tuple[Shelf, int]] = []
        for (last_used, _), block, i in order:
            if freed + losable >= n_bytes:
                break
            shelf = self.shelves[i]
            demoted = shelf.demote(block)
            freed += demoted
            self.changes += demoted > 0
            if not demoted and last_used <= until and block not in keep:
                losable += shelf.losable(block, pending=pending)
                doomed.append((shelf, block))
        if all_or_nothing and freed + losable < n_bytes:
            return freed
        for shelf, block in doomed:
            lost = shelf.losable(block, pending=pending)
            if lost:
                shelf.evict(block)
                freed += lost
                self.changes += 1
        return freed
