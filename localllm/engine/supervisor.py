"""Keeps one model served: loads it on first use if memory allows, reloads it after a crash, and gives its memory back
when closed."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path

from localllm.engine.client import WorkerClient, WorkerOptions
from localllm.engine.memory_guard import Available, check_before_load
from localllm.errors import BusyError, WorkerDiedError

# A model that crashes at once must not be reloaded in a tight loop.
_BACKOFF_S = (0.0, 0.5, 2.0, 8.0, 30.0)
# One that answered something, or lived this long, crashed by accident: it is loaded again at once.
_HEALTHY_AFTER_S = 60.0
# Nobody is kept waiting longer than this for the end of a pause.
_PATIENCE_S = 2.5


class Supervisor:
    """One model's worker over time (implements localllm.engine.api.Host).

    `available` says how many bytes of the system's memory can be taken now (None: asked of the system). Every load
    must leave the headroom free: `options.engine` names both as `planned_bytes` and `headroom_bytes`.
    """

    def __init__(
        self,
        options: WorkerOptions,
        on_loading: Callable[[float], None] | None = None,
        available: Available | None = None,
    ) -> None:
        self.options = options
        self._on_loading = on_loading
        self._available = available
        self._client: WorkerClient | None = None
        self._lock = asyncio.Lock()
        self._crashes = 0
        self._started_s = 0.0
        self._not_before_s = 0.0
        self.loads = 0
        self.load_progress: float | None = None

    @property
    def client(self) -> WorkerClient | None:
        """The loaded engine, if it is alive."""
        return self._client if self._client is not None and self._client.alive else None

    async def engine(self) -> WorkerClient:
        """The loaded engine; loads or reloads it. Raises the LocalLLMError that loading ended in; before it begins,
        DoesNotFitError when other programs have taken the memory that it was planned to take, and BusyError when it
        crashed again and again."""
        async with self._lock:
            if self._client is not None and self._client.alive:
                return self._client
            if self._client is not None:
                await self._after_crash(self._client)
            await self._back_off()
            settings = self.options.engine
            await asyncio.to_thread(
                check_before_load,
                Path(self.options.spec.path).name,
                settings.get("planned_bytes", 0),
                settings.get("headroom_bytes"),
                self._available,
            )
            self.load_progress = 0.0
            try:
                self._client = await WorkerClient.start(self.options, self._report)
            except WorkerDiedError:
                self._count_crash(healthy=False)
                raise
            finally:
                self.load_progress = None
            self.loads += 1
            self._started_s = time.monotonic()
            return self._client

    async def close(self) -> None:
        """Stop the worker; its memory is the system's again when this returns."""
        async with self._lock:
            if self._client is not None:
                await self._client.close()
                self._client = None

    async def _after_crash(self, client: WorkerClient) -> None:
        await client.close()
        self._client = None
        self._count_crash(healthy=client.finished > 0 or time.monotonic() - self._started_s > _HEALTHY_AFTER_S)

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

    def _report(self, progress: float) -> None:
        self.load_progress = progress
        if self._on_loading is not None:
            self._on_loading(progress)
