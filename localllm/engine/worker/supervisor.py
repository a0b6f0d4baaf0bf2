"""Keeps one model served: loads it on first use if memory allows, reloads it after a crash or when it hangs, and gives
its memory back when closed."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from localllm.engine.host.memory import Available
from localllm.engine.worker.watchdog import ProcessEngine, watch
from localllm.errors import BusyError, WorkerDiedError

# A model that crashes at once must not be reloaded in a tight loop.
_BACKOFF_S = (0.0, 0.5, 2.0, 8.0, 30.0)
# One that answered something, or lived this long, crashed by accident: it is loaded again at once.
_HEALTHY_AFTER_S = 60.0
# Nobody is kept waiting longer than this for the end of a pause.
_PATIENCE_S = 2.5


E = TypeVar("E", bound=ProcessEngine)
StartedE = TypeVar("StartedE", bound=ProcessEngine, covariant=True)


class Startable(Protocol[StartedE]):
    """What a supervisor keeps running: WorkerOptions or EmbeddingOptions."""

    @property
    def hang_s(self) -> float:
        """How long its process may show no sign of life while it is waited for (0: as long as it likes)."""
        ...

    def check_memory(self, available: Available | None = None) -> None:
        """Raise DoesNotFitError unless loading it would leave the headroom free."""
        ...

    async def start(self, on_loading: Callable[[float], None] | None = None) -> StartedE:
        """Start the process and load the model; `on_loading` hears how much of it is loaded, from 0 to 1."""
        ...


class Supervisor(Generic[E]):
    """One model's worker over time (implements localllm.engine.worker.client.Host).

    `available` says how many bytes of the system's memory can be taken now (None: asked of the system). Every load
    must leave the options' headroom free.
    """

    def __init__(
        self,
        options: Startable[E],
        on_loading: Callable[[float], None] | None = None,
        available: Available | None = None,
    ) -> None:
        self.options = options
        self._on_loading = on_loading
        self._available = available
        self._engine: E | None = None
        self._watch: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._crashes = 0
        self._started_s = 0.0
        self._not_before_s = 0.0
        self.loads = 0

    @property
    def client(self) -> E | None:
        """The loaded engine, if it is alive."""
        return self._engine if self._engine is not None and self._engine.alive else None

    async def engine(self) -> E:
        """The loaded engine; loads or reloads it. Raises the LocalLLMError that loading ended in; before it begins,
        DoesNotFitError when other programs have taken the memory that it was planned to take, and BusyError when it
        crashed again and again."""
        async with self._lock:
            if self._engine is not None and self._engine.alive:
                return self._engine
            if self._engine is not None:
                await self._after_crash(self._engine)
            await self._back_off()
            await asyncio.to_thread(self.options.check_memory, self._available)
            try:
                self._engine = await self.options.start(self._on_loading)
            except WorkerDiedError:
                self._count_crash(healthy=False)
                raise
            self.loads += 1
            self._started_s = time.monotonic()
            if self.options.hang_s > 0:
                self._watch = asyncio.create_task(watch(self._engine, self.options.hang_s))
            return self._engine

    async def close(self) -> None:
        """Stop the worker; its memory is the system's again when this returns."""
        async with self._lock:
            if self._engine is not None:
                self._stop_watching()
                await self._engine.close()
                self._engine = None

    def _stop_watching(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()

    async def _after_crash(self, engine: E) -> None:
        self._stop_watching()
        await engine.close()
        self._engine = None
        self._count_crash(healthy=engine.finished > 0 or time.monotonic() - self._started_s > _HEALTHY_AFTER_S)

    def _count_crash(self, *, healthy: bool) -> None:
        self._crashes = 0 if healthy else self._crashes + 1
        pause_s = _BACKOFF_S[min(self._crashes, len(_BACKOFF_S)) - 1] if self._crashes else 0.0
        self._not_before_s = time.monotonic() + pause_s

    async def _back_off(self) -> None:
        """Wait out a short pause after a crash; a long one is the client's to wait."""
        left_s = self._not_before_s - time.monotonic()
        if left_s > _PATIENCE_S:
            raise BusyError(
                f"the model's process ended {self._crashes} times in a row; it is loaded again in {left_s:.0f} s",
                retry_after_s=math.ceil(left_s),
            )
        await asyncio.sleep(max(0.0, left_s))
