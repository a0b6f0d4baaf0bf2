"""A block of exported KV as the prefix cache sees it, wherever its bytes are; and one that is in memory only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Block(Protocol):
    """Exported KV of tokens [start, stop) of some line. `held_bytes` is what it occupies in memory now; `pending` is
    True while a copy elsewhere is being made, after which it can be demoted."""

    start: int
    stop: int

    def read(self) -> bytes | memoryview | None:
        """The exported bytes; None when they turned out to be lost or corrupt (a miss, never a wrong answer)."""
        ...

    def demote(self) -> bool:
        """Let go of the memory and keep a copy elsewhere; False where there is none."""
        ...

    def promote(self, data: bytes | memoryview) -> None:
        """Hold `data`, which was read from the copy, in memory too."""
        ...

    def used(self, at: int) -> None:
        """It was used, at that time in the budget's uses: whoever keeps a copy may want to know."""
        ...

    def discard(self) -> None:
        """The tree has no use for it any more."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes in memory (0 while only elsewhere)."""
        ...

    @property
    def pending(self) -> bool:
        """True while a copy is being made."""
        ...


@dataclass(slots=True)
class MemoryBlock:
    """A block in memory, with no copy anywhere."""

    data: bytes | memoryview
    start: int
    stop: int

    def read(self) -> bytes | memoryview | None:
        """The data."""
        return self.data

    def demote(self) -> bool:
        """There is no other copy."""
        return False

    def promote(self, data: bytes | memoryview) -> None:
        """It is in memory already."""

    def used(self, at: int) -> None:
        """Nobody wants to know."""

    def discard(self) -> None:
        """Its memory goes with it."""

    @property
    def held_bytes(self) -> int:
        """Length of the data."""
        return len(self.data)

    @property
    def pending(self) -> bool:
        """No copy is ever made."""
        return False
