"""Admission of models to memory.

A model that fits is loaded next to the others. Otherwise the least recently used model is
unloaded. A model in use is never unloaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.errors import BackendError, BusyError, DoesNotFitError, UsageError
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.models.worker import ModelAdmission
from support.scripted_engine import Gate, ScriptedEngine

GB = 10**9


def router(
    limit_gb: float, available: Callable[[], int] | None = None, **sizes_gb: float
) -> ModelRouter:
    models = [
        ServedModel(name, ScriptedEngine(), needs_bytes=int(gb * GB))
        for name, gb in sizes_gb.items()
    ]
    return ModelRouter(models, ModelAdmission(int(limit_gb * GB), available))


def loaded(models: ModelRouter) -> list[str]:
    return [m.name for m in models.list() if m.loaded]


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story())


def test_two_models_that_fit_together_stay_loaded_together() -> None:
    async def story() -> None:
        models = router(10, chat=6, autocomplete=2)
        await models.preload()
        assert loaded(models) == ["chat", "autocomplete"]

    run(story)


def test_a_model_that_does_not_fit_with_the_first_replaces_it_on_request() -> None:
    async def story() -> None:
        models = router(10, chat=6, other=5)
        await models.preload()
        await models.resolve("other").engine()
        assert loaded(models) == ["other"]
        await models.resolve("chat").engine()
        assert loaded(models) == ["chat"]

    run(story)


def test_only_the_least_recently_used_models_are_unloaded_for_another() -> None:
    async def story() -> None:
        models = router(10, a=4, b=4, c=4)
        for name in ("a", "b", "a", "c"):
            await models.resolve(name).engine()
        assert loaded(models) == ["a", "c"]

    run(story)


def test_a_model_that_answers_is_never_unloaded_and_the_refusal_has_figures() -> None:
    async def story() -> None:
        models = router(10, chat=6, other=5)
        with models.resolve("chat").lease():
            await models.resolve("chat").engine()
            with pytest.raises(
                BusyError,
                match=r"other needs 5\.00 GB and 4\.00 GB are free; in "
                r"use: "
                r"chat",
            ):
                await models.resolve("other").engine()
            assert loaded(models) == ["chat"]
        await models.resolve("other").engine()
        assert loaded(models) == ["other"]

    run(story)


def test_a_model_too_large_for_the_machine_is_refused_and_unloads_no_other() -> None:
    async def story() -> None:
        models = router(10, chat=6, huge=12)
        await models.preload()
        with pytest.raises(
            DoesNotFitError,
            match=r"huge needs 12\.00 GB, but the limit for models is "
            r"10\.00 "
            r"GB",
        ):
            await models.resolve("huge").engine()
        assert loaded(models) == ["chat"]

    run(story)


def test_memory_of_other_programs_counts_unless_no_other_model_is_loaded() -> None:
    async def story() -> None:
        models = router(10, lambda: 1 * GB, chat=6, small=2)
        await models.resolve("chat").engine()  # no other model is loaded: the limit decides
        await models.resolve("small").engine()  # 1 GB is available: chat is unloaded
        assert loaded(models) == ["small"]

    run(story)


def test_memory_of_a_model_that_failed_to_load_is_free_again() -> None:
    async def story() -> None:
        models = router(10, broken=8, chat=6)
        engine = models.resolve("broken").worker.host
        assert isinstance(engine, ScriptedEngine)
        engine.load_error = BackendError("no")
        with pytest.raises(BackendError):
            await models.resolve("broken").engine()
        assert models.admission is not None
        assert models.admission.held_bytes == 0
        await models.resolve("chat").engine()
        assert models.admission.held_bytes == 6 * GB

    run(story)


def test_a_request_for_a_model_that_is_leaving_waits_and_gets_it_back() -> None:
    async def story() -> None:
        models = router(10, a=6, b=6)
        a, b = models.resolve("a"), models.resolve("b")
        gate = Gate()
        assert isinstance(b.worker.host, ScriptedEngine)
        b.worker.host.load_gate = gate
        await a.engine()
        first = asyncio.create_task(b.engine())
        for _ in range(10):
            await asyncio.sleep(0)
        with pytest.raises(BusyError):  # b is being loaded, which counts as use
            await a.engine()
        gate.open()
        await first
        await a.engine()
        assert loaded(models) == ["a"]

    run(story)


def test_a_name_that_would_mean_two_models_is_refused() -> None:
    with pytest.raises(UsageError, match="would name both"):
        ModelRouter(
            [
                ServedModel("a", ScriptedEngine(), aliases=("fast",)),
                ServedModel("fast", ScriptedEngine()),
            ]
        )


def test_metrics_neither_load_a_model_nor_keep_it_loaded() -> None:
    async def story() -> None:
        model = router(10, a=6).resolve("a")
        assert await model.worker.snapshot() == {}
        await model.engine()
        used = model.worker.last_used_s
        await model.worker.snapshot()
        assert model.worker.last_used_s == used
        assert isinstance(model.worker.host, ScriptedEngine)

    run(story)


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    asks=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=20),
)
def test_with_any_requests_the_loaded_models_fit_and_models_in_use_stay(
    sizes: list[int], asks: list[tuple[int, bool]]
) -> None:
    async def story() -> None:
        models = router(10, **{f"m{i}": size for i, size in enumerate(sizes)})
        held: list[Any] = []
        for at, keep in asks:
            model = models.list()[at % len(sizes)]
            lease = model.lease()
            lease.__enter__()
            try:
                await model.engine()
            except (BusyError, DoesNotFitError):
                lease.__exit__(None, None, None)
                continue
            if keep:
                held.append((model, lease))
            else:
                lease.__exit__(None, None, None)
            now = [m for m in models.list() if m.loaded]
            assert sum(m.facts.needs_bytes for m in now) <= 10 * GB
            assert all(m.loaded for m, _ in held)
            assert models.admission is not None
            assert models.admission.held_bytes == sum(m.facts.needs_bytes for m in now)

    run(story)
