"""The response to a request for KV: passes frames on from the engine as they are made."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from secrets import token_hex

from starlette.responses import Response

from localllm.engine.messages import Event, Failure, Finish, Generation, Prefill, Request, Usage
from localllm.engine.transfer.frames import FAIL, MEDIA_TYPE, json_frame
from localllm.engine.worker.client import EngineClient
from localllm.errors import WorkerDiedError, by_code
from localllm.server.http.accounts import Account
from localllm.server.http.asgi import CONNECTION, Receive, Scope, Send
from localllm.server.http.streaming import cancel_on_disconnect
from localllm.server.models.served import ServedModel


class KvSending:
    """One request for the KV of `tokens` from `start` on, at a loaded `engine`.

    Pieces wait in a queue. The engine exports one more block after each frame that the connection
    has taken, so the queue has at most a few blocks. `account` pays for the computed tokens.
    """

    def __init__(
        self, engine: EngineClient, generation: Generation, tokens: list[int], start: int
    ) -> None:
        self._engine = engine
        self._request = Request(token_hex(12), tokens, generation, sends_from=start)
        # None: the engine has ended the request.
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._done = Usage()
        self._sending: asyncio.Task[Finish | Failure] | None = None

    async def begin(self) -> None:
        """Wait for the first frame. Raises the LocalLLMError if the engine refuses the request."""
        self._sending = asyncio.create_task(
            self._engine.send_kv(self._request, self._on_event, self._pieces.put_nowait)
        )
        self._sending.add_done_callback(self._end)
        first = await self._pieces.get()
        if first is None:
            end = await self._sending
            if isinstance(end, Failure):
                raise by_code(end.code, end.message, hint=end.hint or None, counts=end.counts)
            raise WorkerDiedError("the engine sent no KV")
        self._first = first

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Prefill):
            self._done = Usage(event.done, cached_tokens=event.cached)

    def _end(self, sending: asyncio.Task[Finish | Failure]) -> None:
        if not sending.cancelled() and sending.exception() is None:
            self._pieces.put_nowait(None)
        self._pieces.put_nowait(None)

    async def send_all(self, send: Send, silence_s: float) -> None:
        """Send the body of the response. Raises TimeoutError if the reader takes no data for
        `silence_s`. It would hold the model, a sequence and its cells otherwise."""
        piece: bytes | None = self._first
        in_frame = True
        while piece is not None:
            in_frame = bool(piece)
            if piece:
                async with asyncio.timeout(silence_s):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            else:
                self._engine.more_kv(self._request.id)
            piece = await self._pieces.get()
        assert self._sending is not None
        last = b""
        with suppress(asyncio.CancelledError):
            end = await self._sending
            # An engine that died within a frame ends the body there. More bytes would be read as
            # the rest of that frame.
            if isinstance(end, Failure) and not in_frame:
                last = json_frame(FAIL, {"message": end.message})
        await send({"type": "http.response.body", "body": last})

    async def close(self, account: Account) -> None:
        """Cancel the rest, and charge the `account`."""
        usage = self._done
        if self._sending is not None:
            self._sending.cancel()
            ended = await asyncio.gather(self._sending, return_exceptions=True)
            if isinstance(ended[0], Finish):
                usage = ended[0].usage
        account.charge(usage.prompt_tokens, usage.cached_tokens, 0)


class KvResponse(Response):
    """Streams a `KvSending` that has begun. The model is leased until the end, or until the reader
    has taken no data for `silence_s`."""

    media_type = MEDIA_TYPE

    def __init__(
        self, sending: KvSending, model: ServedModel, account: Account, silence_s: float
    ) -> None:
        super().__init__()
        self._sending = sending
        self._model = model
        self._account = account
        self._silence_s = silence_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", MEDIA_TYPE.encode())]
        with self._model.lease():
            try:
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await cancel_on_disconnect(receive, self._sending.send_all(send, self._silence_s))
            except TimeoutError:
                # Data for the reader is waiting, so closing the connection would wait too.
                scope[CONNECTION].transport.abort()
            finally:
                await self._sending.close(self._account)
