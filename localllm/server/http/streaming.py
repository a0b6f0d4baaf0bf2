"""Streams a reply to its client: early headers, keep-alives, cancelled when the client disconnects.
Some outlive it: what was written is kept for a while, numbered, and a client can join it again."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import BusyError, LocalLLMError, NotFoundError
from localllm.server.http.accounts import caller
from localllm.server.http.asgi import CONNECTION, Receive, Scope, Send
from localllm.server.http.errors import for_client, refusal
from localllm.server.http.settings import ServerSettings

Result = TypeVar("Result")
_TICK_S = 1.0


class Outbox:
    """A client's send queue. What is written within one turn of the event loop leaves in one send:
    straight through `direct` while that is set and takes it, else by whoever waits."""

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
        self.closed = True
        self.error = error
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
        waiter = self._waiter
        self._waiter = None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


# Writes frames into an outbox, and raises on failure.
Produce: TypeAlias = Callable[[Outbox], Coroutine[Any, Any, None]]


class StreamResponse(Response):
    """An ASGI response fed by `produce(outbox)`.

    An error before the first frame and within the grace period becomes an HTTP status with a JSON
    body, a later one the last frame. `headers` are those of the moment when they are sent.
    `keepalive` makes keep-alive frames (b"" for none).
    """

    def __init__(
        self,
        produce: Produce,
        *,
        settings: ServerSettings,
        media_type: str,
        keepalive: Callable[[], bytes],
        frame_error: Callable[[LocalLLMError], bytes],
        headers: Mapping[str, str],
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
                await refusal(error, scope)(scope, receive, send)
            else:
                await self._stream(outbox, scope, send)
        finally:
            await _end(producer, watcher)

    async def _stream(self, outbox: Outbox, scope: Scope, send: Send) -> None:
        headers = {
            "content-type": self._media_type,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **self._more_headers,
        }
        raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        direct = None
        connection = scope.get(CONNECTION)
        if connection is not None:
            # Middleware only looks at the headers, and they have been sent.
            send = connection.send
            direct = connection.write_piece
            # Before an event a comment, before a line of JSON a blank.
            is_events = self._media_type.startswith("text/event-stream")
            connection.probes.append(partial(outbox.write, b": \n" if is_events else b" "))
        if outbox.empty and not outbox.closed:
            outbox.write(self._keepalive())
        ticker = asyncio.create_task(
            _keep_alive(outbox, self._keepalive, self._settings.keepalive_s)
        )
        try:
            await _send_pieces(outbox, direct, send)
            await self._send_last(send, outbox.error)
        except asyncio.CancelledError:
            # The server stops: a client must not take that for the end of the answer.
            await self._send_last(
                send, BusyError("the server is stopping", hint="send the request again later")
            )
            raise
        finally:
            ticker.cancel()

    async def _send_last(self, send: Send, error: LocalLLMError | None) -> None:
        last = b""
        if error is not None:
            last = self._frame_error(error)
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


async def run_into(produce: Produce, outbox: Outbox) -> None:
    """Run `produce`, and close the outbox as it ends."""
    error: LocalLLMError | None = None
    try:
        await produce(outbox)
    except Exception as e:
        error = for_client(e)
    finally:
        outbox.close(error)


async def _keep_alive(outbox: Outbox, keepalive: Callable[[], bytes], longest_s: float) -> None:
    """Send keep-alives until cancelled. Once a second, check whether the stream was silent, and send
    a frame if the frame has changed or the silence is long. One timer per stream, none per token."""
    period_s = min(_TICK_S, longest_s)
    most_silent = max(1, int(longest_s / period_s) - 1)
    seen = outbox.writes
    silent = 0
    last_frame = b""
    while True:
        await asyncio.sleep(period_s)
        if outbox.writes == seen:
            silent += 1
            frame = keepalive()
            if frame and (frame != last_frame or silent >= most_silent):
                outbox.write(frame)
                silent = 0
                last_frame = frame
        else:
            silent = 0
        seen = outbox.writes


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`; None if the client disconnected first, which cancels it."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_cancel_when_gone(receive, task))
    try:
        await asyncio.wait({task})
        if task.cancelled():
            return None
        return task.result()
    finally:
        await _end(task, watcher)


async def unless_left(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` makes; if the client disconnected first, an empty one that nobody
    reads."""
    return await unless_gone(request.receive, work) or Response(status_code=499)


async def _cancel_when_gone(receive: Receive, task: asyncio.Task[Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# So many streams are kept, and so many bytes of each: the newest.
_MOST_STREAMS = 32
_MOST_BYTES = 2 * 2**20


class StreamGoneError(
    NotFoundError,
    code="stream_gone",
    default_hint=(
        "send the request again; streams begun with an Idempotency-Key can be joined for a while"
    ),
):
    """A stream that can't be joined where the client wants to."""


class KeptStream(Outbox):
    """Server-sent events as they are written, each with its number as `id`. `answer` makes a
    response that begins behind an event's number; `asked` tells requests apart that are sent under
    one key."""

    answer: Callable[[int], Response]

    def __init__(self, kept: KeptStreams, asked: bytes, produce: Produce) -> None:
        super().__init__()
        self.account = caller()
        self.asked = asked
        self._kept = kept
        self.readers: list[Outbox] = []
        self._blocks: deque[bytes] = deque()
        self._first = self._bytes = 0
        self._part = b""
        self._ended = asyncio.Event()
        self._task = asyncio.create_task(run_into(produce, self))
        self._timer: asyncio.TimerHandle | None = None

    def write(self, data: bytes) -> None:
        *blocks, self._part = (self._part + data).split(b"\n\n")
        for block in blocks:
            numbered = b"id: %d\n%b\n\n" % (self._first + len(self._blocks), block)
            self._blocks.append(numbered)
            self._bytes += len(numbered)
            for reader in self.readers:
                reader.write(numbered)
        while self._bytes > _MOST_BYTES and len(self._blocks) > 1:
            self._bytes -= len(self._blocks.popleft())
            self._first += 1

    def close(self, error: LocalLLMError | None = None) -> None:
        super().close(error)
        self._ended.set()
        if error is not None and not self._blocks:  # nothing began: the same request may try again
            self._kept.forget(self)

    async def follow(self, outbox: Outbox, after: int) -> None:
        """Write what comes behind event `after` into `outbox`, to the end. Raises StreamGoneError
        where that is not kept any more, and what the stream itself ended in."""
        begin = after + 1 - self._first
        if begin < 0 or begin > len(self._blocks):
            raise StreamGoneError(f"of this stream the events behind {after} are not here")
        if self._timer is not None:
            self._timer.cancel()
        self.readers.append(outbox)
        try:
            for block in islice(self._blocks, begin, None):
                outbox.write(block)
            await self._ended.wait()
        finally:
            self.readers.remove(outbox)
            if not self.readers:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self._kept.longest_gone_s, self.drop)
        if self.error is not None:
            raise self.error

    def drop(self) -> None:
        """Cancel what still writes it, and forget it."""
        self._task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._kept.forget(self)


class KeptStreams:
    """All that are kept, by whose they are and what they are called (a key, a response's id)."""

    def __init__(self, longest_gone_s: float) -> None:
        self.longest_gone_s = longest_gone_s
        self._streams: dict[tuple[str, str], KeptStream] = {}

    def find(self, name: str) -> KeptStream | None:
        """The caller's own of that name."""
        return self._streams.get((caller().name, name))

    def make(self, names: tuple[str, ...], asked: bytes, produce: Produce) -> KeptStream:
        """A new one, which `produce` writes whoever reads it, under each of `names`, in place of
        the oldest that nobody reads if there are too many, or if as many of the caller's are
        running on as it may have requests. Raises BusyError while all that are kept have
        clients."""
        every = list(dict.fromkeys(self._streams.values()))
        left = [stream for stream in every if not stream.readers]
        mine = [stream for stream in left if stream.account is caller() and not stream.closed]
        if len(every) >= _MOST_STREAMS and not left:
            raise BusyError(
                f"{len(every)} streams are kept already", hint="send it without Idempotency-Key"
            )
        if len(mine) >= (caller().parallel or _MOST_STREAMS):
            mine[0].drop()
        elif len(every) >= _MOST_STREAMS:
            left[0].drop()
        made = KeptStream(self, asked, produce)
        self._streams |= {(caller().name, name): made for name in names if name}
        return made

    def forget(self, stream: KeptStream) -> None:
        self._streams = {
            name: other for name, other in self._streams.items() if other is not stream
        }
