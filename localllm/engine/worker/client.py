"""The engine for the server, the bench and the CLI: starts a worker process and delivers its
events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from localllm.engine.messages import (
    Event,
    Failure,
    Finish,
    Request,
    event_from_json,
    prompt_too_long,
)
from localllm.engine.worker import pipe
from localllm.engine.worker.child_pipe import Pulse
from localllm.engine.worker.pipe import JsonProcess
from localllm.engine.worker.supervisor import HANG_S, HearKv
from localllm.engine.worker.supervisor import EngineClient as EngineClient
from localllm.memory.guard import Available, check_before_load
from localllm_backends.contract import LoadSpec, MemoryReport

log = logging.getLogger("localllm.server")


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The model that a worker loads, and the settings of its engine.

    `engine`: EngineSettings values that can be sent as JSON.
    `draft_path`: a smaller model with the same vocabulary, used as draft model.
    `hang_s`: see supervisor.py (0: unwatched).
    """

    spec: LoadSpec
    backend: str = "auto"
    engine: dict[str, Any] = field(default_factory=dict)
    draft_path: str | None = None
    log_path: Path | None = None
    hang_s: float = HANG_S

    def check_memory(self, available: Available | None = None) -> None:
        check_before_load(
            Path(self.spec.path).name,
            self.engine.get("planned_bytes", 0),
            self.engine.get("headroom_bytes"),
            available,
        )

    async def start(self, on_loading: Callable[[float], None] | None = None) -> WorkerClient:
        """Start the process and load the model.

        Raises the LocalLLMError that the worker reports, or WorkerDiedError.
        """

        def progress(message: dict[str, Any]) -> None:
            _log_notice(message)
            if on_loading is not None and "loading" in message:
                on_loading(message["loading"])

        process = await pipe.take(self.log_path)
        ready = await process.load(
            {
                "spec": asdict(self.spec),
                "backend": self.backend,
                "engine": self.engine,
                "draft_path": self.draft_path,
            },
            model_name=Path(self.spec.path).name,
            on_progress=progress,
        )
        return WorkerClient(process, ready, self.spec.placement.workers)


class WorkerClient(EngineClient):
    """One worker process with one loaded model that generates text."""

    def __init__(
        self, process: JsonProcess, ready: dict[str, Any], workers: tuple[str, ...] = ()
    ) -> None:
        super().__init__(process, ready)
        self._workers = workers
        self.memory = MemoryReport(**ready["memory"])
        self._streams: dict[str, Callable[[Event], None]] = {}
        self._kv_readers: dict[str, HearKv] = {}
        self._kv_identity: dict[str, str] = ready.get("kv_identity", {})
        process.listen(self._deliver, self._after_end)

    async def listen(self, request: Request, on_event: Callable[[Event], None]) -> Finish | Failure:
        if request.id in self._streams:
            message = "a request with this id is running already"
            return Failure(request.id, "invalid_request", message)
        # Copying a million ids would stop the event loop for a second.
        if not isinstance(request.prompt, str) and len(request.prompt) >= self.info.n_ctx:
            return prompt_too_long(request.id, len(request.prompt), self.info.n_ctx)
        ended: asyncio.Future[Finish | Failure] = asyncio.get_running_loop().create_future()

        def take(event: Event) -> None:
            if ended.done():
                return
            if isinstance(event, Finish | Failure):
                ended.set_result(event)
                return
            try:
                on_event(event)
            except Exception as e:
                ended.set_exception(e)

        self._streams[request.id] = take
        try:
            if not self.process.send({"op": "submit", "request": asdict(request)}):
                del self._streams[request.id]
                return self._death(request.id)
            return await ended
        finally:
            if self._streams.pop(request.id, None) is not None:
                self.process.send({"op": "cancel", "id": request.id})

    @property
    def kv_identity(self) -> dict[str, str]:
        return self._kv_identity

    async def send_kv(
        self, request: Request, on_event: Callable[[Event], None], hear_kv: HearKv
    ) -> Finish | Failure:
        self._kv_readers[request.id] = hear_kv
        try:
            return await self.listen(request, on_event)
        finally:
            del self._kv_readers[request.id]

    def more_kv(self, request_id: str) -> None:
        self.process.send({"op": "more", "id": request_id})

    @property
    def has_waiters(self) -> bool:
        """True while a request runs or a question is unanswered."""
        return bool(self._streams) or super().has_waiters

    async def pulse(self) -> Pulse:
        """The status of the computing thread, as reported by the worker's reader thread."""
        return Pulse(**await self.process.ask({"op": "pulse"}))

    async def snapshot(self) -> dict[str, Any]:
        values: dict[str, Any] = await self.process.ask({"op": "snapshot"})
        return {**values, "memory_bytes": self.memory.total_bytes}

    def _after_end(self) -> None:
        streams = self._streams
        self._streams = {}
        for request_id, take in streams.items():
            take(self._death(request_id))

    def _deliver(self, message: dict[str, Any]) -> None:
        if "kv" in message and message["kv"] in self._kv_readers:
            self._kv_readers[message["kv"]](message.get("data", b""))
        _log_notice(message)
        for data in message.get("ev", ()):
            take = self._streams.get(data["id"])
            if take is not None:
                event = event_from_json(data)
                if type(event) is Finish or type(event) is Failure:
                    # The request has ended: its id is free, and no cancellation is needed.
                    del self._streams[event.id]
                    self.finished += type(event) is Finish
                take(event)

    def _death(self, request_id: str) -> Failure:
        death = self.process.death()
        if not self._workers:
            return Failure(request_id, death.code, death.message, death.hint)
        # If a worker machine is lost, the process that computes on it ends.
        advice = (
            f"parts of the model are on {', '.join(self._workers)}: check that each machine is "
            "reachable and runs its worker"
        )
        return Failure(
            request_id,
            death.code,
            f"{death.message}; {advice}",
            "the next request loads the model again",
        )


def _log_notice(message: dict[str, Any]) -> None:
    if "notice" in message:
        log.warning("%s", message["notice"])


class Host(Protocol):
    """A source of the loaded engine for a model name. It loads or reloads the model if needed."""

    async def engine(self) -> EngineClient:
        """The loaded engine. Loads it on first use, and after a crash, following a pause. Raises
        LocalLLMError.
        """

    async def close(self) -> None: ...
