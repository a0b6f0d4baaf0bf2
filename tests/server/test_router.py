"""Several models at one port: names, loading on request, and unloading only of unused models."""

from __future__ import annotations

import asyncio

import pytest

from localllm.engine.messages import Finish
from localllm.errors import BusyError, ModelNotFoundError
from localllm.server.models.router import ModelRouter, ServedModel
from support.requests import events_of, request_for
from support.scripted_engine import Gate, ScriptedEngine


def test_names_aliases_and_tags_select_their_model() -> None:
    router = ModelRouter(
        [
            ServedModel("Qwen3-8B", ScriptedEngine(), aliases=("chat",)),
            ServedModel("b", ScriptedEngine()),
        ]
    )
    for name in ("Qwen3-8B", "qwen3-8b", "chat", "CHAT:latest", None, ""):
        assert router.resolve(name).name == "Qwen3-8B"
    assert router.resolve("b").name == "b"
    assert [m.name for m in router.list()] == ["Qwen3-8B", "b"]
    with pytest.raises(ModelNotFoundError, match=r"Qwen3-8B, b") as caught:
        router.resolve("qwen3-8")
    assert "qwen3-8b" in caught.value.hint


def test_an_unloaded_model_is_loaded_again_on_request() -> None:
    async def story() -> None:
        engine = ScriptedEngine()
        model = ModelRouter({"m": engine}).resolve("m")
        with model.lease():
            await model.engine()
        await model.worker.unload()
        assert (engine.closed, model.loaded, model.served_n_ctx) == (True, False, 4096)
        with model.lease():
            await model.engine()
        assert (engine.loads, model.loaded) == (2, True)

    asyncio.run(story())


def test_a_model_in_use_is_not_unloaded() -> None:
    async def story() -> None:
        gate = Gate()
        engine = ScriptedEngine(["a", gate, "b"])
        model = ServedModel("m", engine)

        async def ask() -> object:
            with model.lease():
                events = [e async for e in events_of(await model.engine(), request_for("r", "x"))]
            return events[-1]

        first, second = asyncio.create_task(ask()), asyncio.create_task(ask())
        for _ in range(10):
            await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await model.worker.unload()
        assert not engine.closed
        gate.open()
        assert isinstance(await first, Finish)
        assert isinstance(await second, Finish)

    asyncio.run(story())
