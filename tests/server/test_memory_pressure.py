"""Memory pressure in the server: plans, which models are loaded together, unloading, and
/metrics."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.cli.serve.model_router import router_for
from localllm.errors import BusyError, DoesNotFitError
from localllm.load import fit_several_models
from localllm.load.fit_several_models import load_plans_together
from localllm.load.load_plan import load_plan_named
from localllm.memory.account import headroom_bytes
from localllm.memory.guard import memory_is_short
from localllm.memory.system import SystemMemory
from localllm.server.app import create_app
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.models.worker import ModelAdmission
from localllm.settings import Settings
from support.scripted_engine import Gate, ScriptedEngine

GB = 10**9


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, int | None]:
    """A machine of 16 GB whose available bytes the test sets. None: the system reports no value."""
    state: dict[str, int | None] = {"available": 12 * GB, "total": 16 * GB}
    monkeypatch.setattr(SystemMemory, "available_bytes", lambda _: state["available"])
    monkeypatch.setattr(SystemMemory, "total_bytes", property(lambda _: state["total"]))
    return state


def test_memory_is_short_if_the_memory_guard_would_act(machine: dict[str, int | None]) -> None:
    headroom = headroom_bytes(16 * GB)
    for available, short in (
        (12 * GB, False),
        (headroom, False),
        (headroom - 1, True),
        (None, False),
    ):
        machine["available"] = available
        assert memory_is_short() is short


def test_an_automatic_context_is_reduced_to_the_available_memory(
    smollm2: Path, machine: dict[str, int | None]
) -> None:
    wide = load_plan_named(str(smollm2), Settings())
    assert wide.options.engine["planned_bytes"] == wide.needs_bytes
    headroom = headroom_bytes(16 * GB)
    machine["available"] = headroom + wide.needs_bytes
    assert load_plan_named(str(smollm2), Settings()).options.spec.n_ctx == wide.options.spec.n_ctx
    machine["available"] = headroom + wide.needs_bytes - 1
    narrow = load_plan_named(str(smollm2), Settings())
    assert narrow.options.spec.n_ctx == wide.options.spec.n_ctx // 2
    assert narrow.options.engine["planned_bytes"] < wide.needs_bytes
    machine["available"] = None
    assert load_plan_named(str(smollm2), Settings()).options.spec.n_ctx == wide.options.spec.n_ctx


@pytest.mark.parametrize("short_by", [0.1, 0.4, 0.7])
def test_contexts_of_several_models_fit_the_available_memory_together(
    smollm2: Path, machine: dict[str, int | None], tmp_path: Path, short_by: float
) -> None:
    (second := tmp_path / "second.gguf").symlink_to(smollm2)
    both = [str(smollm2), str(second)]
    wide = load_plans_together(both, Settings())
    least = load_plans_together(both, Settings({"context": 4096}))
    wide_bytes, least_bytes = (sum(load.needs_bytes for load in loads) for loads in (wide, least))
    free = int(wide_bytes - short_by * (wide_bytes - least_bytes))
    machine["available"] = headroom_bytes(16 * GB) + free
    narrow = load_plans_together(both, Settings())
    assert sum(load.needs_bytes for load in narrow) <= free
    assert all(n.options.spec.n_ctx >= 4096 for n in narrow)
    assert [load.options.engine["planned_bytes"] for load in narrow] == [
        load.needs_bytes for load in narrow
    ]


def test_a_chosen_context_is_kept_and_refused_when_it_is_loaded(
    smollm2: Path, machine: dict[str, int | None]
) -> None:
    machine["available"] = 1 * GB
    chosen = load_plan_named(str(smollm2), Settings({"context": 8192}))
    assert chosen.options.spec.n_ctx == 8192

    async def story() -> None:
        models = router_for([chosen])
        with pytest.raises(
            DoesNotFitError,
            match=r"GB are free for it now: 1\.00 GB available, of "
            r"which "
            r"0\.80 "
            r"GB",
        ):
            await models.preload()
        assert not models.list()[0].loaded
        machine["available"] = 12 * GB
        try:
            await models.preload()
        finally:
            await models.close()

    asyncio.run(story())


def test_a_model_whose_smallest_context_is_too_large_is_refused(
    smollm2: Path, machine: dict[str, int | None]
) -> None:
    machine["available"] = 0
    least = load_plan_named(str(smollm2), Settings())
    assert least.options.spec.n_ctx == 2048

    async def story() -> None:
        with pytest.raises(DoesNotFitError, match=r"0\.00 GB available"):
            await router_for([least]).preload()

    asyncio.run(story())


def test_the_memory_for_models_is_the_amount_the_guard_lets_them_load(
    machine: dict[str, int | None],
) -> None:
    headroom = headroom_bytes(16 * GB)
    machine["available"] = headroom + 12345
    _, available = fit_several_models.memory_for_models()
    assert available() == 12345
    machine["available"] = headroom - 1
    assert available() == 0


def test_a_model_that_is_loading_has_its_memory_reserved() -> None:
    async def story() -> None:
        slow, other = (
            ServedModel(name, ScriptedEngine(), needs_bytes=4 * GB) for name in ("slow", "other")
        )
        gate = Gate()
        assert isinstance(slow.worker.host, ScriptedEngine)
        slow.worker.host.load_gate = gate
        free = 6 * GB
        models = ModelRouter([slow, other], ModelAdmission(20 * GB, lambda: free))
        loading = asyncio.create_task(models.resolve("slow").engine())
        for _ in range(10):
            await asyncio.sleep(0)
        # Each fits the memory that is available now, but both together do not.
        with pytest.raises(
            BusyError,
            match=r"other needs 4\.00 GB and 2\.00 GB are free; in use: "
            r"slow",
        ):
            await other.engine()
        gate.open()
        await loading
        free = 4 * GB  # other programs freed some memory
        await other.engine()
        assert [m.loaded for m in models.list()] == [True, True]

    asyncio.run(story())


def page(models: ModelRouter) -> str:
    async def get() -> str:
        transport = httpx.ASGITransport(app=create_app(models))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return (await client.get("/metrics")).text

    return asyncio.run(get())


def test_metrics_show_available_and_reserved_memory_and_each_engines_pressure() -> None:
    class Pressed(ScriptedEngine):
        async def snapshot(self) -> dict[str, Any]:
            return {"available_bytes": 700, "headroom_bytes": 800, "pressure": "shrink"}

    models = ModelRouter({"m": Pressed(), "old": ScriptedEngine()})
    for model in models.list():
        asyncio.run(model.engine())
    text = page(models)
    assert 'localllm_available_bytes{model="m"} 700\n' in text
    assert 'localllm_headroom_bytes{model="m"} 800\n' in text
    assert re.findall(r"localllm_memory_pressure\{(.*)\} (\d)", text) == [
        ('model="m",level="none"', "0"), ('model="m",level="shrink"', "1"),
        ('model="m",level="hold"', "0"),
    ]  # fmt: skip
    assert text.count("# TYPE localllm_memory_pressure gauge") == 1
    assert "memory_pressure" not in page(ModelRouter({"old": ScriptedEngine()}))


def test_a_served_model_shows_this_machines_memory(tiny_model: Path) -> None:
    async def story() -> dict[str, Any]:
        models = router_for(load_plans_together([str(tiny_model)], Settings()))
        try:
            await models.preload()
            return await models.list()[0].worker.snapshot()
        finally:
            await models.close()

    snapshot = asyncio.run(story())
    assert snapshot["available_bytes"] > 0
    assert snapshot["headroom_bytes"] == headroom_bytes(SystemMemory().total_bytes)
    assert snapshot["pressure"] in ("none", "shrink", "hold")
