"""A real engine with a scripted backend, in a thread of this process, used as a server's host and
client.

It takes the same requests as a worker process and starts without delay, so a test can run many.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from localllm.engine import EngineSettings
from localllm.engine.cache.identity import identity_of
from localllm.engine.core import Engine
from localllm.engine.messages import Event, Failure, Finish, Request
from localllm.engine.tokens import Tokenizer
from localllm.engine.transfer.shared_prefix import tokenised
from localllm_backends.contract import Backend

Call = Callable[[], object]


class EngineThread:
    """The engine of `backend` with `settings`. `sent` lists the requests for KV."""

    def __init__(self, backend: Backend, **settings: Any) -> None:
        self.backend = backend
        self.info = backend.info
        self.kv_identity = identity_of(backend).to_json()
        self.sent: list[Request] = []
        self._tokenizer = Tokenizer(backend)
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._hearers: dict[str, tuple[asyncio.AbstractEventLoop, Callable[[Event], None]]] = {}
        self._kv: dict[str, Callable[[bytes], None]] = {}
        wanted = EngineSettings(headroom_bytes=0, **settings)
        self._engine = Engine(backend, wanted, outlet=self._outlet)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # --- the engine's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        for call in iter(self._next, None):
            call()
            while self._engine.can_step:
                self._deliver(self._engine.step(self._deliver))
                self._take()
            if self._engine.has_work:
                self._engine.idle()
        self._engine.close()

    def _next(self) -> Call | None:
        try:
            return self._calls.get(timeout=0.01 if self._engine.has_work else None)
        except queue.Empty:
            return int

    def _take(self) -> None:
        while not self._calls.empty():
            call = self._calls.get()
            if call is None:
                self._calls.put(None)
                return
            call()

    def _deliver(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.id in self._hearers:
                loop, hear = self._hearers[event.id]
                _call(loop, hear, event)

    def _outlet(self, request_id: str, frame: Iterable[bytes]) -> None:
        if request_id in self._kv:
            loop, _ = self._hearers[request_id]
            for piece in (*frame, b""):
                _call(loop, self._kv[request_id], piece)

    # --- Host and client --------------------------------------------------------------------------

    async def engine(self) -> EngineThread:
        return self

    async def close(self) -> None:
        self._calls.put(None)

    async def listen(self, request: Request, on_event: Callable[[Event], None]) -> Finish | Failure:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Finish | Failure] = loop.create_future()

        def hear(event: Event) -> None:
            if isinstance(event, Finish | Failure):
                if not ended.done():
                    ended.set_result(event)
            else:
                on_event(event)

        tokens = request.prompt
        if isinstance(tokens, str):
            request, tokens = tokenised(request, self._tokenizer.tokens)
        prompt = list(tokens)
        self._hearers[request.id] = loop, hear
        self._calls.put(lambda: self._deliver(self._engine.submit(request, prompt)))
        try:
            return await ended
        finally:
            self._calls.put(lambda: self._engine.cancel(request.id))

    async def send_kv(
        self, request: Request, on_event: Callable[[Event], None], hear_kv: Callable[[bytes], None]
    ) -> Finish | Failure:
        self.sent.append(request)
        self._kv[request.id] = hear_kv
        return await self.listen(request, on_event)

    def more_kv(self, request_id: str) -> None:
        self._calls.put(lambda: self._engine.sender.more(request_id))

    async def tokenize(
        self,
        text: str,
        *,
        special: bool = True,
        add_bos: bool = False,
        media: dict[str, str] | None = None,
    ) -> list[int]:
        del media
        return self._tokenizer.tokens(text, special=special, add_bos=add_bos)

    async def count_tokens(self, text: str, **options: Any) -> int:
        return len(await self.tokenize(text, **options))

    async def snapshot(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[dict[str, Any]] = loop.create_future()

        def hear(values: dict[str, Any]) -> None:
            if not found.done():
                found.set_result(values)

        self._calls.put(lambda: _call(loop, hear, dict(self._engine.snapshot())))
        return await found


def _call(loop: asyncio.AbstractEventLoop, call: Callable[[Any], None], value: object) -> None:
    """Run the call in the server's thread, unless the server has ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, value)
