"""Model workers: loading and leasing one model, and admission of all models to memory.

Several names may share a worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from localllm.engine.messages import Sampling
from localllm.engine.worker.client import EngineClient, Host
from localllm.errors import BusyError, DoesNotFitError, LocalLLMError
from localllm.formatting import gb
from localllm.memory.verdict import has_room
from localllm_backends.contract import LoraAdapter, ModelInfo

log = logging.getLogger("localllm.server")
_RETRY_AFTER_S = 10
_NEVER = float("-inf")
# An older plan is made again before loading, because free memory changes.
_PLAN_TTL_S = 30.0


class ModelAdmission:
    """Decides which models are loaded at the same time.

    To make room, it unloads idle models, least recently used first. All loaded models together stay
    within `limit_bytes`. A new model must also fit into the memory that is free now, minus the
    memory of models that are still loading. `available` returns the free bytes and is called in a
    thread; None means that only the limit applies. If only one model is loaded, the memory guard of
    its load checks it (localllm/engine/worker/supervisor.py).
    """

    def __init__(self, limit_bytes: int, available: Callable[[], int] | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._available = available
        self._lock = asyncio.Lock()
        self._admitted: list[ModelWorker] = []

    @property
    def held_bytes(self) -> int:
        """Planned bytes of the admitted models."""
        return sum(m.facts.needs_bytes for m in self._admitted)

    @property
    def idle_bytes(self) -> int:
        """Planned bytes of admitted models without a request, which could be unloaded."""
        return sum(m.facts.needs_bytes for m in self._admitted if m.loaded and not m.in_use)

    async def admit(self, model: ModelWorker) -> None:
        """Make room for `model` and admit it.

        Raises DoesNotFitError if it does not fit even alone, BusyError while requests run on the
        models that would have to be unloaded.
        """
        async with self._lock:
            if model in self._admitted:
                return
            needs_bytes = model.facts.needs_bytes
            if not has_room(needs_bytes, self.limit_bytes):
                raise DoesNotFitError(
                    f"{model.name} needs {gb(needs_bytes, 2)}, but the limit for models is "
                    f"{gb(self.limit_bytes, 2)}",
                    hint="serve it with a smaller --context, or a smaller quant",
                )
            while not await self.fits(model):
                idle = [m for m in self._admitted if m.loaded and not m.in_use]
                victim = min(idle, key=attrgetter("last_used_s"), default=None)
                if victim is None:
                    raise BusyError(await self._reason_refused(model), retry_after_s=_RETRY_AFTER_S)
                log.info("unloading %s to make room for %s", victim.name, model.name)
                self._admitted.remove(victim)
                await victim.unload()
            self._admitted.append(model)

    def release(self, model: ModelWorker) -> None:
        """Free the reservation of a `model` that was unloaded or failed to load."""
        if model in self._admitted:
            self._admitted.remove(model)

    async def fits(self, model: ModelWorker) -> bool:
        """True if `model` could be loaded now without unloading another."""
        room_bytes = self.limit_bytes
        if self._admitted and model not in self._admitted:
            room_bytes = await self._free_bytes()
        return has_room(model.facts.needs_bytes, room_bytes)

    async def _free_bytes(self) -> int:
        """The bytes left for one more model, in addition to the admitted ones."""
        room_bytes = self.limit_bytes - self.held_bytes
        if self._available is not None:
            # Models that are still loading have not allocated all their memory yet.
            promised_bytes = sum(m.facts.needs_bytes for m in self._admitted if not m.loaded)
            free_bytes = await asyncio.to_thread(self._available) - promised_bytes
            room_bytes = min(room_bytes, free_bytes)
        return max(0, room_bytes)

    async def _reason_refused(self, model: ModelWorker) -> str:
        free_bytes = await self._free_bytes()
        others = ", ".join(f"{m.name} ({gb(m.facts.needs_bytes, 2)})" for m in self._admitted)
        return (
            f"{model.name} needs {gb(model.facts.needs_bytes, 2)} and {gb(free_bytes, 2)} are free; "
            f"in use: {others}"
        )


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The facts about a model that are known before it is loaded.

    - `sampling`: defaults of a request.
    - `sampling_unthinking`: the same with reasoning off (None: no difference).
    - `details`: facts for model lists (quant, bytes, licence …).
    - `embeds`, `ranks`: True for an embedding model, for a reranker.
    - `needs_bytes`: planned memory.
    - `adapters`: the LoRA adapters that are loaded with it.
    - `physics`: bytes per token and this machine's rates (planner/serialise.py).
    """

    sampling: Sampling = field(default_factory=Sampling)
    sampling_unthinking: Sampling | None = None
    n_ctx: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    embeds: bool = False
    ranks: bool = False
    needs_bytes: int = 0
    adapters: tuple[LoraAdapter, ...] = ()
    physics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class LoadProgress:
    """The loaded share of a model, 0 to 1, as its worker reports it, and a notice for its users."""

    share: float = 0.0
    notice: str = ""

    def __call__(self, share: float) -> None:
        self.share = share


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A planned model: its Host, its metadata, and the object that receives its load progress."""

    host: Host
    facts: ModelMetadata = field(default_factory=ModelMetadata)
    loading: LoadProgress = field(default_factory=LoadProgress)


Plan = Callable[[int], PlannedModel]


class UnplannedHost:
    """The Host of a model before its first plan."""

    async def engine(self) -> EngineClient:
        raise LocalLLMError("the model has no plan")

    async def close(self) -> None:
        """There is no engine to close."""


class ModelWorker:
    """One model that can be loaded, as `planned`.

    `plan` is called in a thread before each load, with the bytes that idle models could free. The
    model is unloaded after `idle_s` seconds without a request (0: never; None: the server's
    default). A client's setting applies until the model is unloaded.
    """

    def __init__(
        self,
        name: str,
        planned: PlannedModel,
        *,
        plan: Plan | None = None,
        idle_s: float | None = None,
    ) -> None:
        self.name = name
        self.idle_s = idle_s
        self.default_idle_s = idle_s
        self.host = planned.host
        self.facts = planned.facts
        self._loading = planned.loading
        self.admission: ModelAdmission | None = None
        self.info: ModelInfo | None = None
        self.loaded = False
        # Why the last load failed. It is never raised: that would keep the requests' frames alive.
        self.failure: LocalLLMError | None = None
        # A sentence for users about how the model runs.
        self.notice = ""
        # The LoRA adapters of requests that do not choose any, as (number, scale). None: with the
        # scales with which they are loaded.
        self.adapters: tuple[tuple[int, float], ...] | None = None
        self.in_use = 0
        self.last_used_s = 0.0
        self._plan = plan
        self.described = plan is None
        self._planned_s = _NEVER
        self._lock = asyncio.Lock()
        self._load: asyncio.Task[EngineClient] | None = None
        self._waiters = 0

    @property
    def loading(self) -> bool:
        """True from the request to load until it is loaded or has failed."""
        return self._load is not None

    @property
    def silent_s(self) -> float:
        """Seconds since the last request; 0 while one runs."""
        if self.in_use:
            return 0.0
        return asyncio.get_running_loop().time() - self.last_used_s

    @property
    def progress(self) -> float:
        """The share that is loaded, 0 to 1."""
        if self.loaded:
            return 1.0
        if self.loading:
            return self._loading.share
        return 0.0

    def describe(self) -> None:
        """Plan the model without loading it, unless its metadata is already known. Blocks.

        The plan gives its context, and whether it generates text, vectors or scores. If planning
        fails, the metadata derived from its name stays.
        """
        known = self.described or self.loaded or self.loading
        self.described = True
        if self._plan is not None and not known:
            try:
                self.facts = self._plan(0).facts
            except LocalLLMError as e:
                log.info("%s can't be planned: %s", self.name, e.message)

    async def planned(self) -> None:
        """Make a new plan if there is no recent one.

        Raises the errors of planning: missing file, not enough memory …
        """
        if self._plan is None or self.loaded:
            return
        loop = asyncio.get_running_loop()
        async with self._lock:
            if loop.time() - self._planned_s >= _PLAN_TTL_S:
                spare_bytes = 0
                if self.admission is not None:
                    spare_bytes = self.admission.idle_bytes
                found = await asyncio.to_thread(self._plan, spare_bytes)
                await self.host.close()  # it may have crashed
                self.host = found.host
                self.facts = found.facts
                self._loading = found.loading
                self._planned_s = loop.time()

    async def engine(self) -> EngineClient:
        """The loaded engine. Loads it if needed, once for all concurrent callers.

        Raises BusyError or DoesNotFitError if there is not enough memory, and the errors of
        loading.
        """
        with self.lease():
            if not self.loaded:
                return await self._shared_load()
            try:
                engine = await self.host.engine()
            except LocalLLMError:
                self.loaded = False
                if self.in_use == 1:
                    self._release()
                raise
            self.info = engine.info
            return engine

    async def _shared_load(self) -> EngineClient:
        while self._load is not None and self._load.cancelling():
            await asyncio.wait({self._load})
        if self._load is None:
            self._load = asyncio.create_task(self._begin())
            self._load.add_done_callback(_retrieve_exception)
        task = self._load
        self._waiters += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiters -= 1
            if not self._waiters and not task.done():
                task.cancel()
            del task  # breaks the reference cycle of exception and frame

    async def _begin(self) -> EngineClient:
        try:
            await self.planned()
            if self.admission is not None:
                await self.admission.admit(self)
            self._loading.share = 0.0
            self.notice = ""
            engine = await self.host.engine()
        except BaseException as e:
            self.failure = None
            if isinstance(e, LocalLLMError):
                self.failure = LocalLLMError(e.message, hint=e.hint)
            self._release()
            raise
        else:
            self.info = engine.info
            self.loaded = True
            self.failure = None
            notes = self._loading.notice, *engine.info.load_notes
            self.notice = "; ".join(filter(None, notes))
            return engine
        finally:
            self._load = None

    def _release(self) -> None:
        self._planned_s = _NEVER
        if self.admission is not None:
            self.admission.release(self)

    async def snapshot(self) -> dict[str, Any]:
        """The engine's metrics; {} if it is not loaded. Does not count as a use."""
        if not self.loaded:
            return {}
        try:
            return await (await self.host.engine()).snapshot()
        except LocalLLMError:
            return {}  # being unloaded, or crashed: the next request reports it

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Hold the model for a request, so that it is not unloaded meanwhile."""
        self.in_use += 1
        try:
            yield
        finally:
            self.in_use -= 1
            self.last_used_s = asyncio.get_running_loop().time()

    async def unload(self) -> None:
        """Free its memory; the next request loads it again. Raises BusyError while requests run.

        A request that arrives meanwhile waits for the Host, which loads again after it has closed.
        """
        if self.in_use:
            raise BusyError(f"{self.name} is answering {self.in_use} requests")
        self.loaded = False
        self.idle_s = self.default_idle_s
        async with self._lock:
            await self.host.close()
            self._planned_s = _NEVER
        if self.admission is not None and not self.in_use:
            self.admission.release(self)

    async def close(self) -> None:
        if self._load is not None:
            self._load.cancel()
        await self.host.close()


def _retrieve_exception(task: asyncio.Task[EngineClient]) -> None:
    """Retrieve a load's exception, so that asyncio does not report it if there are no waiters."""
    if not task.cancelled():
        task.exception()
