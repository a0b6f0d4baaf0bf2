"""Unloads idle models: after the server's idle time, or by Ollama's `keep_alive`."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from localllm.errors import BusyError
from localllm.server.models.router import ModelRouter
from localllm.server.models.worker import ModelWorker

log = logging.getLogger("localllm.server")
# The minimum time between two checks of a model that is in use.
_MIN_CHECK_S = 0.1
# Number of checks by `unload_idle` within the shortest idle time, and the maximum pause in seconds.
_CHECKS_PER_PERIOD = 10
_MAX_PAUSE_S = 30.0


class KeepAlive:
    """The `keep_alive` that clients last sent for each model, until it is unloaded."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Task[None]] = {}

    def set(self, model: ModelWorker, seconds: float) -> None:
        """Keep `model` loaded for `seconds` after its last request.

        0 means until the running requests end. Infinity means until memory is short, because only
        the server's owner may pin a model.
        """
        self._stop(model)
        if math.isinf(seconds) and model.default_idle_s == 0:
            model.idle_s = 0.0
        elif math.isinf(seconds):
            model.idle_s = math.inf
        else:
            model.idle_s = seconds or model.default_idle_s
            self._waiting[model.name] = asyncio.create_task(self._unload_after(model, seconds))

    async def unload(self, model: ModelWorker) -> None:
        """Unload `model` now, or as soon as its requests have ended."""
        self._stop(model)
        try:
            if model.loaded:
                await model.unload()
        except BusyError:
            self.set(model, 0.0)

    async def _unload_after(self, model: ModelWorker, seconds: float) -> None:
        while model.in_use or (model.loaded and model.silent_s < seconds):
            await asyncio.sleep(max(seconds - model.silent_s, _MIN_CHECK_S))
        await self.unload(model)

    def _stop(self, model: ModelWorker) -> None:
        waiting = self._waiting.pop(model.name, None)
        if waiting is not None and waiting is not asyncio.current_task():
            waiting.cancel()


async def unload_idle(
    models: ModelRouter,
    *,
    idle_s: float,
    pressed: Callable[[], bool] | None = None,
    pressed_idle_s: float = 60.0,
) -> None:
    """Unload idle models until cancelled.

    A model is unloaded after `idle_s` seconds without a request, or after its own `idle_s` if it
    has one; 0 means never. While `pressed()` is True (memory is short), `pressed_idle_s` applies. A
    client's infinity means never only if the server's own `idle_s` is 0.
    """
    models.idle_s = idle_s
    times_s = [idle_s, *(worker.idle_s for worker in models.workers())]
    shortest_s = min((time_s for time_s in times_s if time_s), default=math.inf)
    pause = min(_MAX_PAUSE_S, shortest_s / _CHECKS_PER_PERIOD)
    while True:
        await asyncio.sleep(pause)
        is_short = pressed is not None and pressed()
        for model in models.workers():
            limit_s = idle_s if model.idle_s is None else model.idle_s
            pinned = not limit_s or (math.isinf(limit_s) and not idle_s)
            if is_short:
                limit_s = min(limit_s, pressed_idle_s)
            if model.loaded and not pinned and model.silent_s >= limit_s:
                log.info("unloading %s after %.0f s without a request", model.name, model.silent_s)
                await model.unload()
