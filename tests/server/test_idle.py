"""An idle model releases its memory; a model in use never does.

The next request loads the model again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from localllm.engine.messages import Event, Request
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.models.unloading import unload_idle
from localllm.server.models.worker import ModelWorker, PlannedModel
from support.scripted_backend import ScriptedBackend


class Engine:
    """An engine of which these tests read only the facts."""

    info = ScriptedBackend().info

    async def submit(self, request: Request) -> AsyncIterator[Event]:
        return
        yield

    async def tokenize(
        self,
        text: str,
        *,
        special: bool = True,
        add_bos: bool = False,
        media: dict[str, str] | None = None,
    ) -> list[int]:
        return []

    async def detokenize(self, tokens: list[int]) -> str:
        return ""

    async def snapshot(self) -> dict[str, Any]:
        return {}


class Host:
    def __init__(self) -> None:
        self.loads = 0
        self.closed = asyncio.Event()

    async def engine(self) -> Engine:
        self.loads += 1
        self.closed.clear()
        return Engine()

    async def close(self) -> None:
        self.closed.set()


def test_an_idle_model_is_closed_and_comes_back() -> None:
    async def main() -> None:
        host = Host()
        model = ServedModel("m", host)
        await model.engine()
        watch = asyncio.create_task(unload_idle(ModelRouter([model]), idle_s=0.05))
        async with asyncio.timeout(30):
            await host.closed.wait()
            await model.engine()
            assert host.loads == 2
            await host.closed.wait()
        watch.cancel()

    asyncio.run(main())


def test_a_model_may_have_its_own_idle_time() -> None:
    async def main() -> None:
        kept, brief = Host(), Host()
        workers = [
            ModelWorker("kept", PlannedModel(kept), idle_s=0),  # never
            ModelWorker("brief", PlannedModel(brief), idle_s=0.05),
        ]
        for worker in workers:
            await worker.engine()
        models = ModelRouter([ServedModel(w.name, worker=w) for w in workers])
        watch = asyncio.create_task(
            unload_idle(models, idle_s=3600, pressed=lambda: True, pressed_idle_s=0.01)
        )
        async with asyncio.timeout(30):
            await brief.closed.wait()
        assert not kept.closed.is_set()
        watch.cancel()

    asyncio.run(main())


def test_a_model_in_use_is_not_unloaded_and_idle_ones_are_sooner_if_memory_is_short() -> None:
    async def main() -> None:
        busy, idle = Host(), Host()
        models = [ServedModel("busy", busy), ServedModel("idle", idle)]
        for model in models:
            await model.engine()
        held = models[0].lease()
        held.__enter__()
        watch = asyncio.create_task(
            unload_idle(ModelRouter(models), idle_s=0.5, pressed=lambda: True, pressed_idle_s=0.01)
        )
        async with asyncio.timeout(30):
            await idle.closed.wait()
        assert not busy.closed.is_set()
        watch.cancel()

    asyncio.run(main())
