"""How long a model stays loaded behind its last request, where a client said so (Ollama's `keep_alive`)."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from localllm.errors import BusyError
from localllm.server.models.router import ModelRouter
from localllm.server.models.worker import ModelWorker

# A model that answers is looked at again after its time, and not sooner than this.
_LEAST_LOOK_S = 0.1


class KeepAlive:
    """What clients last said of each model; it is forgotten when the model is unloaded. One per server."""

    def __init__(self) -> None:
        self._before: dict[str, float | None] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._unloading: set[asyncio.Task[None]] = set()

    def set(self, model: ModelWorker, seconds: float) -> None:
        """`model` stays for `seconds` behind its last request (0: no longer than those that run), or with infinity until
        another word comes or memory is short: to hold it even then is its owner's to say, not a client's."""
        self._stop(model)
        owners_s = self._before.setdefault(model.name, model.idle_s)
        if math.isinf(seconds):
            model.idle_s = 0.0 if owners_s == 0 else math.inf
        else:
            model.idle_s = seconds or owners_s
            self._look_again(model, seconds, max(seconds, _LEAST_LOOK_S))

    async def unload(self, model: ModelWorker) -> None:
        """Unload `model` now, or as soon as nobody uses it."""
        self._stop(model)
        try:
            if model.loaded:
                await model.unload()
        except BusyError:
            self.set(model, 0.0)
        else:
            self._forget(model)

    def _look_again(self, model: ModelWorker, seconds: float, delay_s: float) -> None:
        self._timers[model.name] = asyncio.get_running_loop().call_later(delay_s, self._look, model, seconds)

    def _look(self, model: ModelWorker, seconds: float) -> None:
        left_s = model.last_used_s + seconds - asyncio.get_running_loop().time()
        if model.in_use:
            self._look_again(model, seconds, max(seconds, _LEAST_LOOK_S))
        elif model.loaded and left_s > 0:
            self._look_again(model, seconds, left_s)
        else:
            task = asyncio.create_task(self.unload(model))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    def _stop(self, model: ModelWorker) -> None:
        timer = self._timers.pop(model.name, None)
        if timer is not None:
            timer.cancel()

    def _forget(self, model: ModelWorker) -> None:
        if model.name in self._before:
            model.idle_s = self._before.pop(model.name)


log = logging.getLogger("localllm.server")
_LOOKS_PER_PERIOD = 10
_MOST_BETWEEN_LOOKS_S = 30.0


async def unload_idle(
    models: ModelRouter, *, idle_s: float, pressed: Callable[[], bool] = lambda: False, pressed_idle_s: float = 60.0
) -> None:
    """Runs until cancelled. A loaded model without a request in flight is closed after `idle_s` seconds of silence (its
    own, where it has one; 0 never), or after `pressed_idle_s` while `pressed()` says that the machine's memory is
    short. A client's "for ever" (infinity) is never as well where the owner says never for all (`idle_s` 0)."""
    models.idle_s = idle_s
    closed_at: dict[str, float] = {}
    periods_s = [s for s in (idle_s, *(w.idle_s for w in models.workers())) if s]
    pause = min([_MOST_BETWEEN_LOOKS_S, *(s / _LOOKS_PER_PERIOD for s in periods_s)])
    while True:
        await asyncio.sleep(pause)
        now = asyncio.get_running_loop().time()
        short = pressed()
        for model in models.workers():
            used = model.last_used_s
            own_s = idle_s if model.idle_s is None else model.idle_s
            if not own_s or (math.isinf(own_s) and not idle_s) or not model.loaded or model.in_use:
                continue
            limit = min(own_s, pressed_idle_s) if short else own_s
            if closed_at.get(model.name) == used or now - used < limit:
                continue
            closed_at[model.name] = used
            log.info("unloading %s after %.0f s without a request", model.name, now - used)
            await model.unload()


def memory_is_short() -> bool:
    """True when less is available than the memory guard keeps for the system."""
    from localllm.engine.host.memory import SystemMemory, headroom_bytes, judge, process_and_children

    memory = SystemMemory(process_and_children)
    return judge(memory.available_bytes(), headroom_bytes(memory.total_bytes)) != "none"
