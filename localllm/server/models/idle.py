"""Gives a model's memory back when nobody has used it for a while: the next request loads it again."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from localllm.server.models.router import ModelRouter

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
