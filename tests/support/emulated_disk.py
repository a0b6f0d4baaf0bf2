"""A disk for the engine of an emulated device, in the device's virtual time.

For tests, never for the product. It replaces only the reader's thread: the product decides which
blocks are wanted, measures the reads, and decides whether to wait. The disk's time passes while the
engine waits for it."""

from __future__ import annotations

from localllm.engine.cache.disk import DiskTier
from localllm.engine.cache.eviction import Block
from localllm.engine.cache.kv_file import PendingRead, ReadAhead
from support.emulated_device import HostClock


class EmulatedReads(ReadAhead):
    """Read the files of `tier` one after the other at `bytes_s` of their blocks' bytes per second.
    A read that was requested while the disk was idle begins at the next look."""

    def __init__(self, tier: DiskTier, clock: HostClock, bytes_s: float) -> None:
        super().__init__(tier.load, clock.now)
        self._time, self._bytes_s = clock, bytes_s
        self._reading: PendingRead | None = None
        self._until_s = 0.0

    def start(self) -> None:
        """Start no thread: files are read as the device's time passes."""

    def on_piece_read(self, wanted: PendingRead, n_bytes: int, took_s: float) -> None:
        """Ignore the duration of the real read."""

    def ready(self, block: Block) -> bool:
        self._catch_up()
        return super().ready(block)

    def wait(self, seconds: float) -> None:
        self._catch_up()
        left = 0 if self._reading is None else self._reading.left_bytes
        self._time.until(self._time.now() + min(seconds, left / self._bytes_s or seconds))
        self._catch_up()

    def _catch_up(self) -> None:
        """Read as much as there was time for since the last look."""
        spare_s = self._time.now() - self._until_s
        self._until_s = self._time.now()
        while spare_s > 0 and self._next() is not None:
            assert self._reading is not None
            took_s = min(spare_s, self._reading.left_bytes / self._bytes_s)
            spare_s -= took_s
            self.learn(self._bytes_s * took_s, took_s)
            self._reading.left_bytes -= self._bytes_s * took_s
            if self._reading.left_bytes < 1e-6:
                self.read(self._reading)
                self._reading = None

    def _next(self) -> PendingRead | None:
        while self._reading is None and not self.jobs.empty():
            following = self.jobs.get_nowait()
            self._reading = following if following is not None and following.users else None
        return self._reading
