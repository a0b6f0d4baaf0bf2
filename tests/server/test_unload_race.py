"""Models that unload while requests arrive.

Every request is answered, and no engine is closed while a request uses it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.worker.client import Host, WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.errors import BusyError
from localllm.server.app import create_app
from localllm.server.models.router import ModelRouter, ServedModel
from localllm_backends.contract import LoadSpec
from support.scripted_engine import ScriptedEngine

HI = [{"role": "user", "content": "hi"}]
ASKS = [
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 3, "stream": True}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 3}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 3}),
    ("/v1/messages", {"messages": HI, "max_tokens": 3}),
    ("/v1/messages/count_tokens", {"messages": HI}),
    ("/api/chat", {"messages": HI, "stream": False, "options": {"num_predict": 3}}),
    ("/api/chat", {"messages": []}),
    ("/tokenize", {"content": "a"}),
    ("/detokenize", {"tokens": [97]}),
    ("/apply-template", {"messages": HI}),
]


class _Fragile(ScriptedEngine):
    """An engine that yields to the event loop at every step.

    It records which methods are called after it is closed.
    """

    def __init__(self) -> None:
        super().__init__(["a", "b", "c"])
        self.misused: list[str] = []

    async def submit(self, request: Any) -> Any:
        async for event in super().submit(request):
            await self._turn("submit")
            yield event

    async def tokenize(
        self,
        text: str,
        *,
        special: bool = True,
        add_bos: bool = False,
        media: dict[str, str] | None = None,
    ) -> list[int]:
        await self._turn("tokenize")
        return await super().tokenize(text, special=special, add_bos=add_bos)

    async def detokenize(self, tokens: list[int]) -> str:
        await self._turn("detokenize")
        return await super().detokenize(tokens)

    async def _turn(self, what: str) -> None:
        await asyncio.sleep(0)
        if self.closed:
            self.misused.append(what)


class _Reloading:
    """A host that makes a new engine after each close."""

    def __init__(self) -> None:
        self.engines: list[_Fragile] = []

    async def engine(self) -> _Fragile:
        await asyncio.sleep(0)
        if not self.engines or self.engines[-1].closed:
            self.engines.append(_Fragile())
        return self.engines[-1]

    async def close(self) -> None:
        await asyncio.sleep(0)
        if self.engines:
            self.engines[-1].closed = True


async def _race(host: Host, rounds: int) -> tuple[list[httpx.Response], int, int]:
    model = ServedModel("tiny", host)
    app = create_app(ModelRouter([model]))
    unloaded = refused = 0
    over = asyncio.Event()

    async def unload() -> None:
        nonlocal unloaded, refused
        while not over.is_set():
            try:
                was = model.loaded
                await model.worker.unload()
                unloaded += was
            except BusyError:
                refused += 1
            await asyncio.sleep(0)

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", timeout=60
    ) as http:
        unloader = asyncio.create_task(unload())
        replies: list[httpx.Response] = []
        for i in range(rounds):
            together = [ASKS[(i * 3 + k) % len(ASKS)] for k in range(1 + i % 4)]
            replies += await asyncio.gather(
                *(http.post(path, json=body) for path, body in together)
            )
        over.set()
        await unloader
    await host.close()
    return replies, unloaded, refused


def test_requests_and_unloading_take_turns() -> None:
    host = _Reloading()
    replies, unloaded, refused = asyncio.run(_race(host, 120))
    assert [
        (r.request.url.path, r.status_code, r.text) for r in replies if r.status_code != 200
    ] == []
    assert not any('"error":{' in r.text.replace(" ", "") for r in replies)
    assert [e.misused for e in host.engines if e.misused] == []
    assert unloaded > 20
    assert refused > 20


@pytest.mark.parametrize("rounds", [4])
def test_a_real_worker_unloads_between_requests(tiny_model: Path, rounds: int) -> None:
    supervisor = Supervisor(WorkerOptions(LoadSpec(path=str(tiny_model), n_ctx=512, n_seq_max=4)))
    replies, unloaded, _ = asyncio.run(_race(supervisor, rounds))
    assert [(r.request.url.path, r.text) for r in replies if r.status_code != 200] == []
    assert unloaded >= 1
    assert supervisor.client is None
