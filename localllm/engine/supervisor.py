"""Keeps one model served: loads it on first use, reloads it after a crash, and gives its memory back when closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from localllm.engine.client import WorkerClient, WorkerOptions

# A model that crashes at once must not be reloaded in a tight loop.
_BACKOFF_S = (0.0, 0.5, 2.0, 8.0, 30.0)
_HEALTHY_AFTER_S = 60.0


class Supervisor:
    """One model's worker over time (implements localllm.engine.api.Host)."""

    def __init__(self, options: WorkerOptions, on_loading: Callable[[float], None] | None = None) -> None:
        self.options = options
        self._on_loading = on_loading
        self._client: WorkerClient | None = None
        self._lock = asyncio.Lock()
        self._crashes = 0
        self._started_s = 0.0
        self.loads = 0
        self.load_progress: float | None = None

    @property
    def client(self) -> WorkerClient | None:
        """The loaded engine, if it is alive."""
        return self._client if self._client is not None and self._client.alive else None

    async def engine(self) -> WorkerClient:
        """The loaded engine; loads or reloads it. Raises the LocalLLMError that loading ended in."""
        async with self._lock:
            if self._client is not None and self._client.alive:
                return self._client
            if self._client is not None:
                await self._after_crash(self._client)
            self.load_progress = 0.0
            try:
                self._client = await WorkerClient.start(self.options, self._report)
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
        healthy = time.monotonic() - self._started_s > _HEALTHY_AFTER_S
        self._crashes = 0 if healthy else self._crashes + 1
        await asyncio.sleep(_BACKOFF_S[min(self._crashes, len(_BACKOFF_S)) - 1] if self._crashes else 0.0)

    def _report(self, progress: float) -> None:
        self.load_progress = progress
        if self._on_loading is not None:
            self._on_loading(progress)
