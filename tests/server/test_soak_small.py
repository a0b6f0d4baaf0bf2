"""Many mixed requests at once on a real server and worker, with disconnects and kills.

Each request ends exactly once.

The long version is `python -m benchmarks.soak`. These tests use its mix and its accounting.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from benchmarks.soak import Report, growth, kill, soak
from benchmarks.soak_hour import Use, grown
from benchmarks.soak_mix import Ask, draw, flowing, send
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm_backends.contract import LoadSpec
from support.http_server import Running, running_server

REQUESTS = 60


@pytest.fixture
def server(smollm2: Path):
    # With a small context, few slots and a small cache, requests wait for each other and evict.
    spec = LoadSpec(path=str(smollm2), n_ctx=2048, n_seq_max=6)
    supervisor = Supervisor(WorkerOptions(spec, engine={"cache_bytes": 40_000_000}))
    with running_server({"smollm2": supervisor}) as running:
        yield running


@asynccontextmanager
async def _client(server: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=None, trust_env=False) as http:
        await send(http, flowing("Load.", 1))
        yield http


@pytest.mark.long
def test_every_request_of_a_mix_with_disconnects_is_accounted_for(server: Running) -> None:
    report = Report()

    async def run() -> None:
        async with _client(server) as http:
            asks = [draw(random.Random(f"soak {i}"), longest_words=80) for i in range(REQUESTS)]
            await soak(http, os.getpid(), asks, report)

    asyncio.run(run())
    assert [
        (e.end, e.ask.kind, e.why) for e in report.ends if e.end not in ("finished", "left")
    ] == []
    assert len(report.ends) == REQUESTS
    assert report.count()["left"] >= 8  # 25 % of the mix disconnect, some of them after the end
    assert report.left_running == 0


@pytest.mark.long
def test_whenever_the_worker_is_killed_its_requests_end_soon(server: Running) -> None:
    report, rng = Report(), random.Random(7)

    async def run() -> None:
        async with _client(server) as http:
            for moment in ("prefill", "load", "decode"):
                await kill(http, os.getpid(), moment, rng, report)

    asyncio.run(run())
    assert report.bad() == []
    assert Counter(e.why for e in report.ends if e.end != "finished").keys() == {"worker_died"}
    assert {m: s for m, worst in report.after_kill_s.items() for s in worst if s > 20.0} == {}
    assert set(report.after_kill_s) == {"prefill", "load", "decode"}
    assert max(report.recovery_s) < 20.0


DONE = 'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
CUT = 'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
DIED = CUT + 'data: {"error":{"code":"worker_died","message":"x"}}\n\n'


@pytest.mark.parametrize(
    ("status", "said", "end"),
    [
        (200, DONE, "finished"),
        (200, CUT, "lost"),
        (200, CUT + "data: [DONE]\n\n", "lost"),
        (200, "", "lost"),
        (200, DIED, "failed"),
        (503, '{"error":{"code":"server_busy"}}', "refused"),
        (503, '{"error":{"code":"worker_died"}}', "failed"),
        (500, "Internal Server Error", "lost"),
    ],
)
def test_the_accounting_knows_a_lost_request(status: int, said: str, end: str) -> None:
    async def run() -> str:
        transport = httpx.MockTransport(lambda _: httpx.Response(status, text=said))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return (await send(http, flowing("hi", 3))).end

    assert asyncio.run(run()) == end


@pytest.mark.parametrize(("leaves", "end"), [(None, "hung"), (0.01, "left")])
def test_the_accounting_knows_a_hung_request(leaves: float | None, end: str) -> None:
    async def never(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> str:
        async with httpx.AsyncClient(
            transport=httpx.MockTransport(never), base_url="http://localhost"
        ) as http:
            ask = flowing("hi", 3)
            return (await send(http, Ask(ask.kind, ask.path, ask.body, leaves), limit_s=0.05)).end

    assert asyncio.run(run()) == end


def test_growth_is_measured_over_the_last_two_thirds() -> None:
    warming = [100 + i for i in range(40)]
    assert growth([*warming, *[140] * 80]) == 0
    assert growth([100 + i for i in range(120)]) > 0.5


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        (Use(101e6, 14, 8), []),
        (Use(103e6, 10, 6), ["worker: memory +3.0%"]),
        (Use(90e6, 15, 6), ["worker: +5 descriptors"]),
        (Use(100e6, 10, 9), ["worker: +3 threads"]),
    ],
)
def test_memory_is_stable_if_no_figure_rises_above_its_limit(worker: Use, said: list[str]) -> None:
    before = {role: Use(100e6, 10, 6) for role in ("server", "worker")}
    assert grown(before, {**before, "worker": worker}) == said
