"""One model's worker as the server sees it: what is known of it, whether it is loaded, and who uses it. Several names may
share one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from localllm.engine.messages import Sampling
from localllm.engine.worker.api import EngineClient, Host
from localllm.errors import BusyError, DoesNotFitError, LocalLLMError
from localllm_backends.contract import ModelInfo

log = logging.getLogger("localllm.server")
_RETRY_AFTER_S = 10


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
        self._admitted: list[ModelWorker] = []

    @property
    def held_bytes(self) -> int:
        """Bytes that the admitted models were planned to take."""
        return sum(m.needs_bytes for m in self._admitted)

    @property
    def idle_bytes(self) -> int:
        """Bytes of the admitted models that nobody uses now: they would make room."""
        return sum(m.needs_bytes for m in self._admitted if m.loaded and not m.in_use)

    async def admit(self, model: ModelWorker) -> None:
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

    def release(self, model: ModelWorker) -> None:
        """`model` was unloaded, or could not be loaded."""
        if model in self._admitted:
            self._admitted.remove(model)

    async def fits(self, model: ModelWorker) -> bool:
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

    def _longest_unused(self) -> ModelWorker | None:
        idle = [m for m in self._admitted if m.loaded and not m.in_use]
        return min(idle, key=lambda m: m.last_used_s, default=None)

    async def _why(self, model: ModelWorker) -> str:
        free = self.limit_bytes - self.held_bytes
        if self._available is not None:
            free = min(free, await self._free())
        others = ", ".join(f"{m.name} ({_gb(m.needs_bytes)})" for m in self._admitted)
        return f"{model.name} needs {_gb(model.needs_bytes)} and {_gb(max(0, free))} are free; in use: {others}"


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"


_NEVER = float("-inf")
# What is free changes: a model that was planned this long ago and is not loaded yet is planned anew.
_PLAN_HOLDS_S = 30.0


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What is known of a model before it is loaded. `sampling` is what a request that says nothing gets, and
    `sampling_unthinking` what it gets where it switches reasoning off (None: the same); `n_ctx` the planned context in
    tokens; `details` are facts for lists (quant, bytes, licence …). `embeds`: it makes embeddings
    and no text; `ranks`: it scores texts against a query, and makes no text either. `needs_bytes` is what it was
    planned to take while loaded; `physics` what a token costs and this machine can do (planner/serialise.py)."""

    sampling: Sampling = field(default_factory=Sampling)
    sampling_unthinking: Sampling | None = None
    n_ctx: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    embeds: bool = False
    ranks: bool = False
    needs_bytes: int = 0
    physics: Mapping[str, Any] = field(default_factory=dict)


class LoadProgress:
    """How much of a model is loaded, from 0 to 1, as its worker tells it (0 for one that does not)."""

    def __init__(self) -> None:
        self.share = 0.0

    def __call__(self, share: float) -> None:
        self.share = share


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that can be loaded: the Host that does it, what is known of it now, and where its progress is told."""

    host: Host
    facts: ModelMetadata
    loading: LoadProgress


Plan = Callable[[int], PlannedModel]


class UnplannedHost:
    """The Host of a model that nobody has asked for yet: there is nothing to load and nothing to close."""

    async def engine(self) -> EngineClient:
        """Never asked for: a worker is planned first."""
        raise LocalLLMError("the model was not planned")

    async def close(self) -> None:
        """Nothing."""


class ModelWorker:
    """See the module docstring. With `plan` the model is planned, in a thread, before each load: given the bytes that
    idle models could give back, it says how the model is to be loaded. `idle_s`: unloaded after so many seconds of
    silence, 0 never, None as the server says."""

    def __init__(
        self,
        name: str,
        host: Host,
        facts: ModelMetadata,
        *,
        loading: LoadProgress | None = None,
        plan: Plan | None = None,
        idle_s: float | None = None,
    ) -> None:
        self.name, self.host, self.facts, self.idle_s = name, host, facts, idle_s
        self.admission: ModelAdmission | None = None
        self.info: ModelInfo | None = None
        self.loaded = False
        # Why the last load failed. Only its words: the error itself would keep the requests' frames.
        self.failure = ""
        self.failure_hint = ""
        # What its users should know about how it runs, in a sentence.
        self.notice = ""
        self.in_use = 0
        self.last_used_s = 0.0
        self._loading = loading or LoadProgress()
        self._plan = plan
        self._planned_s = _NEVER
        self._lock = asyncio.Lock()
        self._load: asyncio.Task[EngineClient] | None = None
        self._waiters = 0

    @property
    def needs_bytes(self) -> int:
        return self.facts.needs_bytes

    @property
    def loading(self) -> bool:
        """True from when it is asked for until it is loaded, or could not be."""
        return self._load is not None

    @property
    def progress(self) -> float:
        """How much of it is loaded, from 0 to 1."""
        return 1.0 if self.loaded else self._loading.share if self.loading else 0.0

    async def planned(self) -> None:
        """Know how it would be loaded now. Raises what planning ended in: no such file, no memory for it …"""
        if self._plan is None or self.loaded or self._is_planned():
            return
        async with self._lock:
            if not self._is_planned():
                spare_bytes = self.admission.idle_bytes if self.admission is not None else 0
                found = await asyncio.to_thread(self._plan, spare_bytes)
                await self.host.close()  # what is left of one that crashed
                self.host, self.facts, self._loading = found.host, found.facts, found.loading
                self._planned_s = asyncio.get_running_loop().time()

    def _is_planned(self) -> bool:
        return asyncio.get_running_loop().time() - self._planned_s < _PLAN_HOLDS_S

    async def engine(self) -> EngineClient:
        """The loaded engine (loading it when needed; all who ask meanwhile wait for that one load).

        Raises BusyError or DoesNotFitError when there is no memory for it, and what loading ended in."""
        with self.lease():
            if not self.loaded:
                return await self._shared_load()
            try:
                engine = await self.host.engine()
            except BaseException as e:
                if isinstance(e, LocalLLMError):
                    self.loaded = False
                    if self.in_use == 1:
                        self._give_back()
                raise
            self.info = engine.info
            return engine

    async def _shared_load(self) -> EngineClient:
        while self._load is not None and self._load.cancelling():
            await asyncio.wait({self._load})
        if self._load is None:
            self._load = asyncio.create_task(self._begin())
            # Its end is told to those who wait; when they have all left nobody asks.
            self._load.add_done_callback(lambda task: task.cancelled() or task.exception())
        task = self._load
        self._waiters += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiters -= 1
            if not self._waiters and not task.done():
                task.cancel()
            del task  # its error would hold this frame, and this frame its error

    async def _begin(self) -> EngineClient:
        try:
            await self.planned()
            if self.admission is not None:
                await self.admission.admit(self)
            self._loading.share, self.notice = 0.0, ""
            engine = await self.host.engine()
        except BaseException as e:
            self.failure, self.failure_hint = (e.message, e.hint) if isinstance(e, LocalLLMError) else ("", "")
            self._give_back()
            raise
        else:
            self.info, self.loaded, self.failure, self.failure_hint = engine.info, True, "", ""
            return engine
        finally:
            self._load = None

    def _give_back(self) -> None:
        self._planned_s = _NEVER
        if self.admission is not None:
            self.admission.release(self)

    async def snapshot(self) -> dict[str, Any]:
        """The engine's metrics; {} when it is not loaded. Looking is no use: it keeps nothing loaded."""
        if not self.loaded:
            return {}
        try:
            return await (await self.host.engine()).snapshot()
        except LocalLLMError:
            return {}  # it was being unloaded, or has crashed: the next request tells

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Hold the model for a request: it is never unloaded while somebody does."""
        self.in_use += 1
        try:
            yield
        finally:
            self.in_use -= 1
            self.last_used_s = asyncio.get_running_loop().time()

    async def unload(self) -> None:
        """Give the memory back; the next request loads it again. Raises BusyError while requests run.

        A request that comes while this runs waits for the Host, which loads again after it has closed."""
        if self.in_use:
            raise BusyError(f"{self.name} answers {self.in_use} requests")
        self.loaded = False
        async with self._lock:
            await self.host.close()
            self._planned_s = _NEVER
        if self.admission is not None and not self.in_use:
            self.admission.release(self)

    async def close(self) -> None:
        if self._load is not None:
            self._load.cancel()
        await self.host.close()
