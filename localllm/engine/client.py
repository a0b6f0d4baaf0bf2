"""The text worker as the rest of the house sees it: starts the process and hands its events to whoever asked."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from localllm.engine.memory_guard import Available, check_before_load
from localllm.engine.messages import Event, Failure, Finish, Request, event_from_json, request_to_json
from localllm.engine.pipe import JsonProcess
from localllm.engine.process_engine import ProcessEngine
from localllm_backends.contract import LoadSpec, MemoryReport

# GNU OpenMP's threads spin for milliseconds while they wait for each other, by default: harmless on an idle machine,
# ruinous when anybody else needs a core. Measured with SmolLM2 on two cores: with 1,000 turns decode is as fast as ever
# alone (0.93 of a bare loop through HTTP) and 42 tok/s beside one busy process, where the default falls to 8; with 300
# it is 50, but 0.88 through HTTP; sleeping at once costs 60 % alone.
# Every thread that allocates gets a heap of its own, and every sliced prefill is a thread: over 1,500 mixed requests the worker grew
# by 10 %, with two heaps for all by 0.2 % (mallopt(3), M_ARENA_MAX).
_WORKER_ENVIRONMENT = {"GOMP_SPINCOUNT": "1000", "MALLOC_ARENA_MAX": "2"}


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker loads and how its engine is set. `engine` holds EngineSettings values that survive JSON;
    `draft_path` is a smaller model of the same vocabulary that drafts for it."""

    spec: LoadSpec
    backend: str = "auto"
    engine: dict[str, Any] = field(default_factory=dict)
    draft_path: str | None = None
    log_path: Path | None = None

    def check_memory(self, available: Available | None = None) -> None:
        """See check_before_load."""
        planned_bytes, headroom_bytes = self.engine.get("planned_bytes", 0), self.engine.get("headroom_bytes")
        check_before_load(Path(self.spec.path).name, planned_bytes, headroom_bytes, available)

    async def start(self, on_loading: Callable[[float], None] | None = None) -> WorkerClient:
        """See WorkerClient.start."""
        return await WorkerClient.start(self, on_loading)


class WorkerClient(ProcessEngine):
    """One worker process with one loaded model (implements localllm.engine.api.Engine)."""

    def __init__(self, process: JsonProcess, ready: dict[str, Any]) -> None:
        super().__init__(process, ready)
        self.memory = MemoryReport(**ready["memory"])
        self._streams: dict[str, Callable[[Event], None]] = {}
        self.died: asyncio.Event = asyncio.Event()
        process.listen(self._deliver, self._after_end)

    @classmethod
    async def start(cls, options: WorkerOptions, on_loading: Callable[[float], None] | None = None) -> WorkerClient:
        """Start a worker and load its model; raises the LocalLLMError the worker names, or WorkerDiedError."""

        def progress(message: dict[str, Any]) -> None:
            if on_loading is not None and "loading" in message:
                on_loading(message["loading"])

        process, ready = await JsonProcess.start(
            (sys.executable, "-m", "localllm.engine.worker"),
            {
                "spec": asdict(options.spec),
                "backend": options.backend,
                "engine": options.engine,
                "draft_path": options.draft_path,
            },
            loads=Path(options.spec.path).name,
            environment={**_WORKER_ENVIRONMENT, **os.environ},
            log_path=options.log_path,
            on_progress=progress,
        )
        return cls(process, ready)

    async def submit(self, request: Request) -> AsyncIterator[Event]:
        """Yield the request's events up to its one Finish or Failure; closing the iterator cancels the request."""
        queue: asyncio.Queue[Event] = asyncio.Queue()
        with self._stream(request, queue.put_nowait):
            while True:
                event = await queue.get()
                yield event
                if isinstance(event, Finish | Failure):
                    return

    async def listen(self, request: Request, hear: Callable[[Event], None]) -> Finish | Failure:
        """Call `hear` with the request's events as they arrive; returns its one Finish or Failure. Cancelling this, or
        an error of `hear` (raised here), cancels the request."""
        ended: asyncio.Future[Finish | Failure] = asyncio.get_running_loop().create_future()

        def take(event: Event) -> None:
            if ended.done():
                return
            if isinstance(event, Finish | Failure):
                ended.set_result(event)
                return
            try:
                hear(event)
            except Exception as e:
                ended.set_exception(e)

        with self._stream(request, take):
            return await ended

    @contextmanager
    def _stream(self, request: Request, take: Callable[[Event], None]) -> Iterator[None]:
        """Submit `request` and call `take` with its events, in this call already if it can't run. A block that is left
        before the last of them cancels the request."""
        if request.id in self._streams:
            take(Failure(request.id, "invalid_request", "a request with this id is running already"))
            yield
            return
        self._streams[request.id] = take
        try:
            if not self._process.send({"op": "submit", "request": request_to_json(request)}):
                del self._streams[request.id]
                take(self._death(request.id))
            yield
        finally:
            if self._streams.pop(request.id, None) is not None:
                self._process.send({"op": "cancel", "id": request.id})

    async def snapshot(self) -> dict[str, Any]:
        """The engine's metrics and this worker's memory."""
        values: dict[str, Any] = await self._process.ask({"op": "snapshot"})
        return {**values, "memory_bytes": self.memory.total_bytes}

    def _after_end(self) -> None:
        self.died.set()
        streams, self._streams = self._streams, {}
        for request_id, take in streams.items():
            take(self._death(request_id))

    def _deliver(self, message: dict[str, Any]) -> None:
        for data in message.get("ev", ()):
            take = self._streams.get(data["id"])
            if take is not None:
                event = event_from_json(data)
                if type(event) is Finish or type(event) is Failure:
                    # The request has ended: its id is free, and there is nothing to cancel.
                    del self._streams[event.id]
                    self.finished += type(event) is Finish
                take(event)

    def _death(self, request_id: str) -> Failure:
        death = self._process.death()
        return Failure(request_id, death.code, death.message, death.hint)
