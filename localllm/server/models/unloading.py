"""Unloads idle models: after the server's idle time, or as clients say by Ollama's `keep_alive`."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from localllm.errors import BusyError
from localllm.server.models.router import ModelRouter
from localllm.server.models.worker import ModelWorker

log = logging.getLogger("localllm.server")
# A model in use is checked again after its time, and at most this often.
_MIN_CHECK_S = 0.1
# `unload_idle` checks this often within the shortest idle time, and at least every so many seconds.
_CHECKS_PER_PERIOD = 10
_MAX_PAUSE_S = 30.0


class KeepAlive:
    """The `keep_alive` that clients last sent for each model, until it is unloaded."""

    def __init__(self) -> None:
        self._owners_idle_s: dict[str, float | None] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._unloading: set[asyncio.Task[None]] = set()

    def set(self, model: ModelWorker, seconds: float) -> None:
        """`model` stays loaded for `seconds` after its last request (0: until the running ones end;
        infinity: until memory is short, for only the server's owner may pin a model)."""
        self._stop(model)
        owners_s = self._owners_idle_s.setdefault(model.name, model.idle_s)
        if math.isinf(seconds):
            model.idle_s = 0.0 if owners_s == 0 else math.inf
        else:
            model.idle_s = seconds or owners_s
            self._check_later(model, seconds, max(seconds, _MIN_CHECK_S))

    async def unload(self, model: ModelWorker) -> None:
        """Unload `model` now, or once its requests have ended."""
        self._stop(model)
        try:
            if model.loaded:
                await model.unload()
        except BusyError:
            self.set(model, 0.0)
        else:
            self._forget(model)

    def _check_later(self, model: ModelWorker, seconds: float, delay_s: float) -> None:
        self._timers[model.name] = asyncio.get_running_loop().call_later(
            delay_s, self._check, model, seconds
        )

    def _check(self, model: ModelWorker, seconds: float) -> None:
        left_s = model.last_used_s + seconds - asyncio.get_running_loop().time()
        if model.in_use:
            self._check_later(model, seconds, max(seconds, _MIN_CHECK_S))
        elif model.loaded and left_s > 0:
            self._check_later(model, seconds, left_s)
        else:
            task = asyncio.create_task(self.unload(model))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    def _stop(self, model: ModelWorker) -> None:
        timer = self._timers.pop(model.name, None)
        if timer is not None:
            timer.cancel()

    def _forget(self, model: ModelWorker) -> None:
        if model.name in self._owners_idle_s:
            model.idle_s = self._owners_idle_s.pop(model.name)


def _idle_limit_s(model: ModelWorker, servers_s: float) -> float | None:
    """The idle time after which `model` is unloaded; None for never."""
    own_s = servers_s if model.idle_s is None else model.idle_s
    pinned = math.isinf(own_s) and not servers_s
    return None if not own_s or pinned else own_s


async def unload_idle(
    models: ModelRouter,
    *,
    idle_s: float,
    pressed: Callable[[], bool] = lambda: False,
    pressed_idle_s: float = 60.0,
) -> None:
    """Runs until cancelled. Unloads a model after `idle_s` seconds without a request (its own
    `idle_s` where it has one; 0 never), or after `pressed_idle_s` while `pressed()`: memory is
    short. A client's infinity means never only where the server's own `idle_s` is 0."""
    models.idle_s = idle_s
    closed_at: dict[str, float] = {}
    shortest_s = min(
        filter(None, [idle_s, *(worker.idle_s for worker in models.workers())]), default=math.inf
    )
    pause = min(_MAX_PAUSE_S, shortest_s / _CHECKS_PER_PERIOD)
    while True:
        await asyncio.sleep(pause)
        now = asyncio.get_running_loop().time()
        short = pressed()
        for model in models.workers():
            own_s = _idle_limit_s(model, idle_s)
            if own_s is None or not model.loaded or model.in_use:
                continue
            used = model.last_used_s
            limit_s = min(own_s, pressed_idle_s) if short else own_s
            if closed_at.get(model.name) == used or now - used < limit_s:
                continue
            closed_at[model.name] = used
            log.info("unloading %s after %.0f s without a request", model.name, now - used)
            await model.unload()
