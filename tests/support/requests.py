"""Requests in one line, because the engine's tests need hundreds of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from localllm.engine.messages import (
    Constraint,
    Event,
    Failure,
    Finish,
    Generation,
    Request,
    Sampling,
)
from localllm.engine.worker.supervisor import EngineClient

_OF_THE_REQUEST = frozenset(Request.__slots__) - {"generation"}


def request_for(
    id: str,  # noqa: A002 - the name of the request's field
    prompt: str | list[int],
    max_tokens: int | None = None,
    sampling: Sampling | None = None,
    **more: Any,
) -> Request:
    """Return a Request. `more` are fields of it and of its Generation, or `grammar` and `beginning`
    of a Constraint on the complete answer."""
    if "grammar" in more:
        more["constraint"] = Constraint(more.pop("grammar"), more.pop("beginning", ""))
    own = {name: more.pop(name) for name in _OF_THE_REQUEST & set(more)}
    generation = Generation(sampling if sampling is not None else Sampling(), max_tokens, **more)
    return Request(id, prompt, generation, **own)


async def events_of(engine: EngineClient, request: Request) -> AsyncIterator[Event]:
    """Yield the events of `request` from `engine`; the last one is its Finish or Failure. Leaving
    the iteration early cancels the request."""
    queue: asyncio.Queue[Event] = asyncio.Queue()

    async def listen() -> None:
        queue.put_nowait(await engine.listen(request, queue.put_nowait))

    listening = asyncio.create_task(listen())
    try:
        ended = False
        while not ended:
            event = await queue.get()
            ended = isinstance(event, Finish | Failure)
            yield event
    finally:
        listening.cancel()
        await asyncio.wait([listening])
