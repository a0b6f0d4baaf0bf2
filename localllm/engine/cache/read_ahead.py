"""Files of the disk tier, read and checked before they are needed, in a thread of their own.

The engine's thread says what it will want, and never waits for it while it has anything else to do: a block of a large
model has 64 MB, which a hard disk takes half a second for. What was read stays here until it is `release`d, and no more
than `ahead_bytes` are wanted at a time, besides what somebody needs next. A disk that hangs stops this thread alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

# Reading starts before its turn comes, for one or two large blocks.
_AHEAD_BYTES = 128 * 2**20
# A thread that is told to end in the middle of a read is waited for this long, then left to the process's end.
_CLOSE_S = 1.0
# Longer than a piece takes to be copied and hashed; what it waited for a slow disk displaced nobody.
_LONGEST_REST_S = 0.001


class OnDisk(Protocol):
    """What can be read: its file has about so many bytes."""

    size_bytes: int


B = TypeVar("B", bound=OnDisk)


@dataclass(slots=True, eq=False)
class _Wanted(Generic[B]):
    """A block that `users` restorations want, and what its file had, once it is `done`."""

    block: B
    users: int = 1
    done: bool = False
    data: memoryview | None = None


class ReadAhead(Generic[B]):
    """`read` gives a block's data, or None where its file is gone or damaged; it is called in the reader's thread."""

    def __init__(
        self,
        read: Callable[[B], memoryview | None],
        clock: Callable[[], float] = time.monotonic,
        ahead_bytes: int = _AHEAD_BYTES,
    ) -> None:
        self._read, self._clock, self._ahead_bytes = read, clock, ahead_bytes
        # By id: a block is not hashable. The engine's thread alone adds to it and takes from it.
        self._wanted: dict[int, _Wanted[B]] = {}
        self._jobs: queue.SimpleQueue[_Wanted[B] | None] = queue.SimpleQueue()
        self._told = threading.Event()
        self._awaited = threading.Event()
        self._since_s: float | None = None
        self._thread: threading.Thread | None = None
        self.wanted_bytes = 0

    # --- the engine's thread -------------------------------------------------------------------------------------

    def want(self, block: B, *, due: bool) -> bool:
        """Have a block read; False, doing nothing, where enough is wanted already and it is not `due`. Every True is
        answered with one `release`."""
        wanted = self._wanted.get(id(block))
        if wanted is not None:
            wanted.users += 1
            return True
        if not due and self.wanted_bytes + block.size_bytes > self._ahead_bytes:
            return False
        wanted = self._wanted[id(block)] = _Wanted(block)
        self.wanted_bytes += block.size_bytes
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_all, name="kv-reader", daemon=True)
            self._thread.start()
        self._jobs.put(wanted)
        return True

    def ready(self, block: B) -> bool:
        """Was it read, whatever came of that?"""
        wanted = self._wanted.get(id(block))
        return wanted is not None and wanted.done

    def get(self, block: B) -> memoryview | None:
        """What was read of a block that is `ready`."""
        return self._wanted[id(block)].data

    def release(self, block: B) -> None:
        """One of those who wanted it does so no more."""
        wanted = self._wanted.get(id(block))
        if wanted is None:
            return
        wanted.users -= 1
        if not wanted.users:
            del self._wanted[id(block)]
            self.wanted_bytes -= block.size_bytes

    def wait(self, seconds: float) -> None:
        """Wait until something was read, at most so long."""
        self._awaited.set()
        self._told.wait(seconds)
        self._told.clear()
        self._awaited.clear()

    @property
    def under_way_s(self) -> float:
        """How long the file that is being read has been; 0 between files."""
        since_s = self._since_s
        return 0.0 if since_s is None else max(0.0, self._clock() - since_s)

    def close(self) -> None:
        """Read nothing more."""
        if self._thread is not None:
            for wanted in self._wanted.values():
                wanted.users = 0
            self._jobs.put(None)
            self._thread.join(_CLOSE_S)
            self._thread, self.wanted_bytes = None, 0
            self._wanted.clear()

    # --- the reader's thread -------------------------------------------------------------------------------------

    def rest(self, took_s: float) -> None:
        """After a piece that took so long: unless the engine waits for it, rest as long, so that a thread that was displaced
        by this one computes again."""
        self._awaited.wait(min(took_s, _LONGEST_REST_S))

    def _read_all(self) -> None:
        jobs = self._jobs
        while (wanted := jobs.get()) is not None:
            if not wanted.users:
                continue
            self._since_s = self._clock()
            try:
                wanted.data = self._read(wanted.block)
            except (OSError, MemoryError):
                wanted.data = None
            self._since_s = None
            wanted.done = True
            self._told.set()
