"""The engine client: starts a worker process and speaks with it; the only thing the rest of the house knows of it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from localllm import errors
from localllm.engine.messages import Event, Failure, Finish, Request, event_from_json, request_to_json
from localllm.engine.pipe import JsonProcess, said
from localllm_backends.contract import LoadSpec, MemoryReport, ModelInfo

_STOP_GRACE_S = 3.0
# GNU OpenMP's threads spin for milliseconds while they wait for each other, by default: harmless on an idle machine,
# ruinous when anybody else needs a core. Measured with SmolLM2 on two cores: with 1,000 turns decode is as fast as ever
# alone (0.93 of a bare loop through HTTP) and 42 tok/s beside one busy process, where the default falls to 8; with 300
# it is 50, but 0.88 through HTTP; sleeping at once costs 60 % alone.
# Every thread that allocates gets a heap of its own, and every aside is a thread: over 1,500 mixed requests the worker grew
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


class WorkerClient:
    """One worker process with one loaded model (implements localllm.engine.api.Engine)."""

    def __init__(self, process: JsonProcess, info: ModelInfo, memory: MemoryReport) -> None:
        self._process = process
        self.info = info
        self.memory = memory
        self._streams: dict[str, Callable[[Event], None]] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._next = 0
        self._closing = False
        self.finished = 0
        self.died: asyncio.Event = asyncio.Event()
        process.listen(self._deliver, self._after_end)

    @classmethod
    async def start(cls, options: WorkerOptions, on_loading: Callable[[float], None] | None = None) -> WorkerClient:
        """Start a worker and load its model; raises the LocalLLMError the worker names, or WorkerDiedError."""

        def progress(message: dict[str, Any]) -> None:
            if on_loading is not None and "loading" in message:
                on_loading(message["loading"])

        process, message = await JsonProcess.start(
            (sys.executable, "-m", "localllm.engine.worker"),
            {
                "op": "load",
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
        return cls(process, _info(message["ready"]), MemoryReport(**message["memory"]))

    @property
    def alive(self) -> bool:
        """False once the process has ended."""
        return not self.died.is_set()

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

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
            if not self._post({"op": "submit", "request": request_to_json(request)}):
                del self._streams[request.id]
                take(self._death(request.id))
            yield
        finally:
            if self._streams.pop(request.id, None) is not None:
                self._post({"op": "cancel", "id": request.id})

    async def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """Token ids of `text`."""
        tokens: list[int] = await self._ask({"op": "tokenize", "text": text, "special": special, "add_bos": add_bos})
        return tokens

    async def detokenize(self, tokens: list[int]) -> str:
        """Text of `tokens`."""
        text: str = await self._ask({"op": "detokenize", "tokens": tokens})
        return text

    async def snapshot(self) -> dict[str, Any]:
        """The engine's metrics and this worker's memory."""
        values: dict[str, Any] = await self._ask({"op": "snapshot"})
        return {**values, "memory_bytes": self.memory.total_bytes}

    async def close(self) -> None:
        """End the process: it finishes its step, frees the model, and is killed if it takes too long."""
        self._closing = True
        self._post({"op": "close"})
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_GRACE_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    # --- the pipe ------------------------------------------------------------------------------------------------

    def _post(self, message: dict[str, Any]) -> bool:
        return self._process.send(message)

    async def _ask(self, message: dict[str, Any]) -> Any:
        self._next += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies[self._next] = future
        if not self._post({**message, "n": self._next}):
            raise errors.WorkerDiedError("the engine's process has ended")
        return await future

    def _after_end(self) -> None:
        self.died.set()
        streams, self._streams = self._streams, {}
        for request_id, take in streams.items():
            take(self._death(request_id))
        for future in self._replies.values():
            if not future.done():
                future.set_exception(errors.WorkerDiedError("the engine's process ended"))

    def _deliver(self, message: dict[str, Any]) -> None:
        if "ev" in message:
            for data in message["ev"]:
                take = self._streams.get(data["id"])
                if take is not None:
                    event = event_from_json(data)
                    if type(event) is Finish or type(event) is Failure:
                        # The request has ended: its id is free, and there is nothing to cancel.
                        del self._streams[event.id]
                        self.finished += type(event) is Finish
                    take(event)
        elif "re" in message:
            future = self._replies.pop(message["re"], None)
            if future is None or future.done():
                return
            if "error" in message:
                future.set_exception(errors.BackendError(message["error"]))
            else:
                future.set_result(message["value"])

    def _death(self, request_id: str) -> Failure:
        if self._closing:
            return Failure(request_id, "worker_died", "the model was unloaded", errors.WorkerDiedError.default_hint)
        how = said(self._process.returncode)
        message = f"the engine's process ended in mid-request ({how})"
        return Failure(request_id, "worker_died", message, errors.WorkerDiedError.default_hint)


def _info(data: dict[str, Any]) -> ModelInfo:
    return ModelInfo(**{**data, "eog_tokens": tuple(data["eog_tokens"])})
