"""Which models are loaded at once: a new one comes in when its predicted bytes fit beside the others, and those that
nobody uses make room for it, the longest unused first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from localllm.errors import BusyError, DoesNotFitError

log = logging.getLogger("localllm.server")
_RETRY_AFTER_S = 10


class LoadedModel(Protocol):
    """A model as admission sees it."""

    name: str
    loaded: bool
    in_use: int
    last_used_s: float

    @property
    def needs_bytes(self) -> int:
        """What it takes while loaded, as planned."""
        ...

    async def unload(self) -> None:
        """Give its memory back."""


class ModelAdmission:
    """Decides who may be loaded. `limit_bytes` is the most that models may ever take together; `available` says what
    is free now (it may block: it is called in a thread), and None trusts the limit alone.

    Two rules. Together the loaded models stay within the limit. And a new one must find its bytes available now, beside
    those that are still being loaded; when it is alone nobody could make room for it, so that is left to the memory
    guard of its own load (localllm/engine/worker/supervisor.py), which looks again.
    """

    def __init__(self, limit_bytes: int, available: Callable[[], int] | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._available = available
        self._lock = asyncio.Lock()
        self._admitted: list[LoadedModel] = []

    @property
    def held_bytes(self) -> int:
        """Bytes that the admitted models were planned to take."""
        return sum(m.needs_bytes for m in self._admitted)

    @property
    def idle_bytes(self) -> int:
        """Bytes of the admitted models that nobody uses now: they would make room."""
        return sum(m.needs_bytes for m in self._admitted if m.loaded and not m.in_use)

    async def admit(self, model: LoadedModel) -> None:
        """Make room for `model` and count it in; nothing to do when it is in already.

        Raises DoesNotFitError when it is too large for this machine even alone, BusyError while the models in its way
        answer requests.
        """
        async with self._lock:
            if model in self._admitted:
                return
            if model.needs_bytes > self.limit_bytes:
                raise DoesNotFitError(
                    f"{model.name} needs {_gb(model.needs_bytes)}, and models may take {_gb(self.limit_bytes)} here",
                    hint="serve it with a smaller --context, or a smaller quant",
                )
            while not await self.fits(model):
                victim = self._longest_unused()
                if victim is None:
                    raise BusyError(await self._why(model), retry_after_s=_RETRY_AFTER_S)
                log.info("unloading %s to make room for %s", victim.name, model.name)
                self._admitted.remove(victim)
                await victim.unload()
            self._admitted.append(model)

    def release(self, model: LoadedModel) -> None:
        """`model` was unloaded, or could not be loaded."""
        if model in self._admitted:
            self._admitted.remove(model)

    async def fits(self, model: LoadedModel) -> bool:
        """True if `model` could be loaded now with nobody leaving."""
        if model in self._admitted or not self._admitted:
            return model.needs_bytes <= self.limit_bytes
        if self.held_bytes + model.needs_bytes > self.limit_bytes:
            return False
        return self._available is None or model.needs_bytes <= await self._free()

    async def _free(self) -> int:
        assert self._available is not None
        # A model that is still being loaded has not taken its memory yet, or not all.
        promised = sum(m.needs_bytes for m in self._admitted if not m.loaded)
        return max(0, await asyncio.to_thread(self._available) - promised)

    def _longest_unused(self) -> LoadedModel | None:
        idle = [m for m in self._admitted if m.loaded and not m.in_use]
        return min(idle, key=lambda m: m.last_used_s, default=None)

    async def _why(self, model: LoadedModel) -> str:
        free = self.limit_bytes - self.held_bytes
        if self._available is not None:
            free = min(free, await self._free())
        others = ", ".join(f"{m.name} ({_gb(m.needs_bytes)})" for m in self._admitted)
        return f"{model.name} needs {_gb(model.needs_bytes)} and {_gb(max(0, free))} are free; in use: {others}"


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
