"""Streams that outlive their client: what was written is kept for a while, numbered, and a client can join it again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from starlette.responses import Response

from localllm.errors import BusyError, NotFoundError
from localllm.server.http.accounts import Account, caller
from localllm.server.http.streaming import Outbox, run_into

# So many streams are kept, and so many bytes of each: the newest.
_MOST_STREAMS, _MOST_BYTES = 32, 2 * 2**20


class StreamGoneError(NotFoundError):
    """A stream that can't be joined where the client wants to."""

    code = "stream_gone"
    default_hint = "send the request again; streams begun with an Idempotency-Key can be joined for a while"


@dataclass(eq=False)
class KeptStream(Outbox):
    """Server-sent events as they are written, each with its number as `id`. `answer` makes a response that begins behind
    an event's number; `asked` tells requests apart that are sent under one key."""

    account: Account
    asked: bytes
    longest_gone_s: float
    forget: Callable[[KeptStream], None]
    answer: Callable[[int], Response] = field(init=False)

    def __post_init__(self) -> None:
        super().__init__()
        self._blocks: deque[bytes] = deque()
        self._first = self._bytes = 0
        self._part = b""
        self._readers: list[Outbox] = []
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def followed(self) -> bool:
        """Whether a client reads it now."""
        return bool(self._readers)

    def begin(self, produce: Callable[[Outbox], Coroutine[Any, Any, None]]) -> None:
        """Let `produce` write it, whoever reads it."""
        self._task = asyncio.create_task(run_into(produce, self))

    def write(self, data: bytes) -> None:
        *blocks, self._part = (self._part + data).split(b"\n\n")
        for block in blocks:
            numbered = b"id: %d\n%b\n\n" % (self._first + len(self._blocks), block)
            self._blocks.append(numbered)
            self._bytes += len(numbered)
            for reader in self._readers:
                reader.write(numbered)
        while self._bytes > _MOST_BYTES and len(self._blocks) > 1:
            self._bytes -= len(self._blocks.popleft())
            self._first += 1

    def close(self, error: Any = None) -> None:
        super().close(error)
        self._ended.set()
        if error is not None and not self._blocks:  # nothing began: the same request may try again
            self.forget(self)

    async def follow(self, outbox: Outbox, after: int) -> None:
        """Write what comes behind event `after` into `outbox`, to the end. Raises StreamGoneError where that is not kept any
        more, and what the stream itself ended in."""
        begin = after + 1 - self._first
        if begin < 0 or begin > len(self._blocks):
            raise StreamGoneError(f"of this stream the events behind {after} are not here")
        if self._timer is not None:
            self._timer.cancel()
        self._readers.append(outbox)
        try:
            for block in islice(self._blocks, begin, None):
                outbox.write(block)
            await self._ended.wait()
        finally:
            self._readers.remove(outbox)
            if not self._readers:
                self._timer = asyncio.get_running_loop().call_later(self.longest_gone_s, self.drop)
        if self.error is not None:
            raise self.error

    def drop(self) -> None:
        """Cancel what still writes it, and forget it."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self.forget(self)


class KeptStreams:
    """All that are kept, by whose they are and what they are called (a key, a response's id)."""

    def __init__(self, longest_gone_s: float) -> None:
        self._longest_gone_s = longest_gone_s
        self._streams: dict[tuple[str, str], KeptStream] = {}

    def find(self, name: str) -> KeptStream | None:
        """The caller's own of that name."""
        return self._streams.get((caller().name, name))

    def make(self, names: tuple[str, ...], asked: bytes) -> KeptStream:
        """A new one, under each of `names`, in place of the oldest that nobody reads if there are too many, or if as many of
        the caller's are running on as it may have requests. Raises BusyError while all that are kept have clients."""
        every = list(dict.fromkeys(self._streams.values()))
        left = [stream for stream in every if not stream.followed]
        mine = [stream for stream in left if stream.account is caller() and not stream.closed]
        if len(every) >= _MOST_STREAMS and not left:
            raise BusyError(f"{len(every)} streams are kept already", hint="send it without Idempotency-Key")
        if len(mine) >= (caller().limits.parallel or _MOST_STREAMS):
            mine[0].drop()
        elif len(every) >= _MOST_STREAMS:
            left[0].drop()
        made = KeptStream(caller(), asked, self._longest_gone_s, self._forget)
        self._streams |= {(caller().name, name): made for name in names if name}
        return made

    def _forget(self, stream: KeptStream) -> None:
        self._streams = {name: other for name, other in self._streams.items() if other is not stream}
