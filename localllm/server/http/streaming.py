"""Streams a reply to its client: early headers, keep-alives, cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import BusyError, LocalLLMError
from localllm.server.http.asgi import OWN_SEND, PROBES, WRITE, Receive, Scope, Send
from localllm.server.http.errors import envelope, headers_of, internal, log_failure
from localllm.server.http.json_body import send_json
from localllm.server.http.settings import ServerSettings

Result = TypeVar("Result")
_TICK_S = 1.0


class Outbox:
    """A client's send queue. What is written within one turn of the event loop leaves in one send: straight through
    `direct` while that is set and takes it, else by whoever waits."""

    __slots__ = ("_pieces", "_waiter", "closed", "direct", "error", "writes")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self.direct: Callable[[bytes], bool] | None = None
        self.closed = False
        self.error: LocalLLMError | None = None
        self.writes = 0

    def write(self, data: bytes) -> None:
        self._pieces.append(data)
        self.writes += 1
        if self.direct is None:
            self._wake()
        elif len(self._pieces) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self.direct is not None and self._pieces:
            if self.direct(b"".join(self._pieces)):
                self._pieces.clear()
            else:
                self._wake()

    def close(self, error: LocalLLMError | None = None) -> None:
        """End the queue; `error` if it did not end well."""
        self.closed, self.error = True, error
        self._wake()

    async def wait(self) -> None:
        """Until something is queued or the queue ended. One consumer only."""
        if not self._pieces and not self.closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take(self) -> bytes:
        data = b"".join(self._pieces)
        self._pieces.clear()
        return data

    @property
    def empty(self) -> bool:
        return not self._pieces

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class StreamResponse(Response):
    """An ASGI response fed by `produce(outbox)`, which writes frames and raises on failure.

    An error before the first frame and within the grace period becomes an HTTP status with a JSON body, a later one the
    last frame. `headers` is called once, when they are sent. `keepalive` makes keep-alive frames (b"" for none).
    """

    def __init__(
        self,
        produce: Callable[[Outbox], Coroutine[Any, Any, None]],
        *,
        settings: ServerSettings,
        media_type: str,
        keepalive: Callable[[], bytes],
        frame_error: Callable[[LocalLLMError], bytes],
        headers: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        super().__init__()
        self._produce = produce
        self._settings = settings
        self._keepalive = keepalive
        self._frame_error = frame_error
        self._media_type = media_type
        self._more_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outbox = Outbox()
        producer = asyncio.create_task(run_into(self._produce, outbox))
        watcher = asyncio.create_task(_cancel_when_gone(receive, producer))
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(outbox.wait(), self._settings.grace_s)
            error = outbox.error
            if outbox.closed and outbox.empty and error is not None:
                await send_json(send, error.http_status, envelope(error, scope["path"]), headers_of(error))
            else:
                await self._stream(outbox, scope, send)
        finally:
            await _end(producer, watcher)

    async def _stream(self, outbox: Outbox, scope: Scope, send: Send) -> None:
        fixed = {"content-type": self._media_type, "cache-control": "no-cache", "x-accel-buffering": "no"}
        raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in {**fixed, **self._more_headers()}.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        # Middleware only looks at the headers, and they have been sent.
        send = scope.get(OWN_SEND, send)
        if outbox.empty and not outbox.closed:
            outbox.write(self._keepalive())
        ticker = _Ticker(outbox, self._keepalive, self._settings.keepalive_s)
        # Before an event a comment, before a line of JSON a blank.
        nothing = b": \n" if self._media_type.startswith("text/event-stream") else b" "
        scope.get(PROBES, []).append(lambda: outbox.write(nothing))
        try:
            await _send_pieces(outbox, scope.get(WRITE), send)
            await self._send_last(send, outbox.error)
        except asyncio.CancelledError:
            # The server stops: a client must not take that for the end of the answer.
            await self._send_last(send, BusyError("the server is stopping", hint="send the request again later"))
            raise
        finally:
            ticker.stop()

    async def _send_last(self, send: Send, error: LocalLLMError | None) -> None:
        last = self._frame_error(error) if error is not None else b""
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def _send_pieces(outbox: Outbox, direct: Callable[[bytes], bool] | None, send: Send) -> None:
    """Send what comes into `outbox`, to its end."""
    while not (outbox.closed and outbox.empty):
        # A task's turn for every token, and h11's, cost a third of it.
        outbox.direct = direct
        try:
            await outbox.wait()
        finally:
            outbox.direct = None
        if not outbox.empty:
            await send({"type": "http.response.body", "body": outbox.take(), "more_body": True})


async def run_into(produce: Callable[[Outbox], Coroutine[Any, Any, None]], outbox: Outbox) -> None:
    """Run `produce`, and close the outbox as it ends."""
    try:
        await produce(outbox)
    except asyncio.CancelledError:
        outbox.close()
        raise
    except Exception as e:
        if not isinstance(e, LocalLLMError):
            log_failure(e)
        outbox.close(internal(e))
    else:
        outbox.close()


class _Ticker:
    """Sends keep-alives: checks once a second whether the stream was silent, and sends a frame if it has changed or the
    silence is long. One timer per stream, none per token."""

    def __init__(self, outbox: Outbox, keepalive: Callable[[], bytes], longest_s: float) -> None:
        self._outbox, self._keepalive = outbox, keepalive
        self._period_s = min(_TICK_S, longest_s)
        self._max_silent = max(1, int(longest_s / self._period_s) - 1)
        self._seen, self._silent, self._last_frame = outbox.writes, 0, b""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._period_s, self._tick)

    def stop(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        if self._outbox.writes != self._seen:
            self._silent = 0
        else:
            self._silent += 1
            frame = self._keepalive()
            if frame and (frame != self._last_frame or self._silent >= self._max_silent):
                self._outbox.write(frame)
                self._silent, self._last_frame = 0, frame
        self._seen = self._outbox.writes
        self._timer = self._loop.call_later(self._period_s, self._tick)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`; None if the client disconnected first, which cancels it."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_cancel_when_gone(receive, task))
    try:
        await asyncio.wait({task})
        return None if task.cancelled() else task.result()
    finally:
        await _end(task, watcher)


async def unless_left(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` makes; if the client disconnected first, an empty one that nobody reads."""
    return await unless_gone(request.receive, work) or Response(status_code=499)


async def _cancel_when_gone(receive: Receive, task: asyncio.Task[Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
