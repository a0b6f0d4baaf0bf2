"""Streams a reply to its client: early headers, keep-alives, and cancellation if the client
disconnects.

A kept stream continues without its client. Its events are numbered and kept for a while, and a
client can join it again."""

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
from localllm.server.http.accounts import Account, caller, request_answered
from localllm.server.http.asgi import CONNECTION, Receive, Scope, Send
from localllm.server.http.errors import for_client, refusal, stopping
from localllm.server.http.settings import ServerSettings

Result = TypeVar("Result")
_TICK_S = 1.0


class Outbox:
    """The send queue of one client. Data that is written within one turn of the event loop leaves
    in one send.

    If `direct` is set and accepts the data, it sends the data at once. Otherwise the consumer in
    `wait` does."""

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
        """End the queue, with `error` if it failed."""
        self.closed = True
        self.error = error
        self._wake()

    async def wait(self) -> None:
        """Wait until data is queued or the queue has ended. Only one consumer may wait."""
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


# Writes frames into an outbox. Raises if it fails.
Produce: TypeAlias = Callable[[Outbox], Coroutine[Any, Any, None]]


class StreamResponse(Response):
    """An ASGI response whose frames `produce(outbox)` writes.

    An error before the first frame and within the grace period becomes an HTTP status with a JSON
    body. A later error becomes the last frame. `headers` are read when they are sent, so `produce`
    may still add some. `keepalive` makes keep-alive frames; b"" means no frame."""

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
        watcher = asyncio.create_task(_cancel_task_on_disconnect(receive, producer))
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
            # The headers have been sent, and middleware only changes headers. So it can be
            # bypassed.
            send = connection.send
            direct = connection.write_piece
            # Probes must not change the stream: a comment before an event, a space before a line
            # of JSON.
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
            # The server is stopping. The client must not take this for the end of the answer.
            await self._send_last(send, stopping())
            raise
        finally:
            ticker.cancel()

    async def _send_last(self, send: Send, error: LocalLLMError | None) -> None:
        last = b""
        if error is not None:
            last = self._frame_error(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def _send_pieces(outbox: Outbox, direct: Callable[[bytes], bool] | None, send: Send) -> None:
    """Send the contents of `outbox` until it ends."""
    while not (outbox.closed and outbox.empty):
        # A task switch and h11's work are a third of the server's cost per token. `direct` avoids
        # both.
        outbox.direct = direct
        try:
            await outbox.wait()
        finally:
            outbox.direct = None
        if not outbox.empty:
            await send({"type": "http.response.body", "body": outbox.take(), "more_body": True})


async def run_into(produce: Produce, outbox: Outbox) -> None:
    """Run `produce` and close the outbox when it ends."""
    error: LocalLLMError | None = None
    try:
        await produce(outbox)
    except Exception as e:
        error = for_client(e)
    finally:
        request_answered()
        outbox.close(error)


async def _keep_alive(outbox: Outbox, keepalive: Callable[[], bytes], longest_s: float) -> None:
    """Send keep-alives until cancelled.

    Once a second, check whether the stream was silent. Send a frame if the frame has changed or if
    the silence is long. A stream has one timer, so tokens need no timers of their own."""
    period_s = min(_TICK_S, longest_s)
    max_silent_periods = max(1, int(longest_s / period_s) - 1)
    last_writes = outbox.writes
    silent_periods = 0
    last_frame = b""
    while True:
        await asyncio.sleep(period_s)
        if outbox.writes == last_writes:
            silent_periods += 1
            frame = keepalive()
            if frame and (frame != last_frame or silent_periods >= max_silent_periods):
                outbox.write(frame)
                silent_periods = 0
                last_frame = frame
        else:
            silent_periods = 0
        last_writes = outbox.writes


async def cancel_on_disconnect(
    receive: Receive, work: Coroutine[Any, Any, Result]
) -> Result | None:
    """Return the result of `work`. If the client disconnects first, cancel `work` and return
    None."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_cancel_task_on_disconnect(receive, task))
    try:
        await asyncio.wait({task})
        request_answered()
        if task.cancelled():
            return None
        return task.result()
    finally:
        await _end(task, watcher)


async def respond_unless_disconnected(
    request: Request, work: Coroutine[Any, Any, Response]
) -> Response:
    """Return the response that `work` makes. If the client disconnects first, return an empty
    response, which is never sent."""
    return await cancel_on_disconnect(request.receive, work) or Response(status_code=499)


async def _cancel_task_on_disconnect(receive: Receive, task: asyncio.Task[Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# Limit of one caller's kept streams, and limit of bytes for each; the newest bytes are kept.
_MAX_STREAMS = 32
_MAX_BYTES = 2 * 2**20
# Limit of one caller's streams that run without a reader. The engine is shared with them.
_MAX_UNREAD = 4


class StreamGoneError(
    NotFoundError,
    code="stream_gone",
    default_hint=(
        "send the request again; a stream with an Idempotency-Key can be resumed for some time"
    ),
):
    """The stream can't be joined at the event that the client wants."""


class KeptStream(Outbox):
    """Server-sent events of one reply, each with its number as `id`.

    `answer` makes a response that begins after the event with a given number. `digest` is a digest
    that tells apart different requests with the same key."""

    answer: Callable[[int], Response]

    def __init__(self, kept: KeptStreams, digest: bytes, produce: Produce) -> None:
        super().__init__()
        self.account = caller()
        self.digest = digest
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
        while self._bytes > _MAX_BYTES and len(self._blocks) > 1:
            self._bytes -= len(self._blocks.popleft())
            self._first += 1

    def close(self, error: LocalLLMError | None = None) -> None:
        super().close(error)
        self._ended.set()
        if error is not None and not self._blocks:  # no event was written, so the client may retry
            self._kept.forget(self)

    async def follow(self, outbox: Outbox, after: int) -> None:
        """Write the events after event `after` into `outbox` until the stream ends.

        Raises StreamGoneError if these events are no longer kept, and the error of the stream
        itself."""
        begin = after + 1 - self._first
        if begin < 0 or begin > len(self._blocks):
            raise StreamGoneError(f"the events after {after} of this stream are no longer stored")
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
                self._timer = loop.call_later(self._kept.max_disconnected_s, self.drop)
                self._kept.limit_unread(self.account)
        if self.error is not None:
            raise self.error

    def drop(self) -> None:
        """Cancel the task that writes the stream, and forget the stream."""
        self._task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._kept.forget(self)


class KeptStreams:
    """All kept streams, by caller and name. A name is a key or the id of a response."""

    def __init__(self, max_disconnected_s: float) -> None:
        self.max_disconnected_s = max_disconnected_s
        self._streams: dict[tuple[str, str], KeptStream] = {}

    def find(self, name: str) -> KeptStream | None:
        """Return the caller's stream of that name, or None."""
        return self._streams.get((caller().name, name))

    def make(self, names: tuple[str, ...], digest: bytes, produce: Produce) -> KeptStream:
        """Return a new stream under each of `names`. `produce` writes it, whether or not a client
        reads it.

        If the caller already has as many streams as it may have, its oldest unread one is dropped.
        Raises BusyError if all of them have readers."""
        self.limit_unread(caller(), more=1)
        own_streams = self._of(caller())
        if len(own_streams) >= _MAX_STREAMS:
            unread = next((stream for stream in own_streams if not stream.readers), None)
            if unread is None:
                raise BusyError(
                    f"{len(own_streams)} streams are already stored, which is the limit",
                    hint="send it without Idempotency-Key",
                )
            unread.drop()
        stream = KeptStream(self, digest, produce)
        self._streams |= {(caller().name, name): stream for name in names if name}
        return stream

    def limit_unread(self, account: Account, more: int = 0) -> None:
        """Drop the oldest of the account's running streams without a reader until `more` fit."""
        max_unread = min(account.parallel or _MAX_UNREAD, _MAX_UNREAD) - more
        unread = [s for s in self._of(account) if not (s.readers or s.closed)]
        for stream in unread[: max(0, len(unread) - max_unread)]:
            stream.drop()

    def _of(self, account: Account) -> list[KeptStream]:
        """Return the account's streams, the oldest first."""
        mine = [s for (name, _), s in self._streams.items() if name == account.name]
        return list(dict.fromkeys(mine))

    def forget(self, stream: KeptStream) -> None:
        self._streams = {
            name: other for name, other in self._streams.items() if other is not stream
        }
