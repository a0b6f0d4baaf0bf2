"""Workers that are started before their model is known or planned."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.pipe import (
    end_ahead,
    ordered_ahead,
    prepare_ahead,
    start_ahead,
)
from localllm.errors import ModelNotFoundError
from localllm.paths import worker_log
from localllm_backends.contract import LoadSpec
from support.until import until


def test_a_worker_started_in_advance_loads_the_model(few_layers: Path) -> None:
    """A worker's interpreter and imports take as long as planning, so they are started before
    it."""

    def children() -> set[int]:
        return {child.pid for child in psutil.Process().children()}

    async def main() -> None:
        before = children()
        await start_ahead()
        [ahead] = children() - before
        options = WorkerOptions(LoadSpec(str(few_layers), n_ctx=256), log_path=worker_log())
        first, second = await options.start(), await options.start()
        assert first.pid == ahead
        assert second.pid != ahead
        await asyncio.gather(first.close(), second.close())
        assert children() == before

    asyncio.run(main())


@pytest.mark.skipif(not hasattr(psutil.Process, "memory_maps"), reason="needs memory maps")
def test_a_worker_loads_the_library_while_its_load_options_are_planned(few_layers: Path) -> None:
    async def main() -> None:
        before = set(psutil.Process().children())
        await start_ahead()
        [ahead] = set(psutil.Process().children()) - before
        prepare_ahead(few_layers, "auto")
        until(lambda: any("libllama" in m.path for m in ahead.memory_maps()), "no library")
        options = WorkerOptions(LoadSpec(str(few_layers), n_ctx=256), log_path=worker_log())
        engine = await options.start()
        assert engine.pid == ahead.pid
        await engine.close()

    asyncio.run(main())


def test_a_model_that_cannot_be_prepared_is_reported_by_its_load(tmp_path: Path) -> None:
    missing = tmp_path / "gone.gguf"

    async def main() -> None:
        await start_ahead()
        prepare_ahead(missing, "auto")
        options = WorkerOptions(LoadSpec(str(missing), n_ctx=256), log_path=worker_log())
        with pytest.raises(ModelNotFoundError):
            await options.start()

    asyncio.run(main())


def test_the_rest_of_a_start_waits_until_the_worker_has_its_model(few_layers: Path) -> None:
    """It waits neither for the end of the load nor for a worker that was ended."""

    async def main() -> None:
        await start_ahead()
        ordered = asyncio.create_task(ordered_ahead())
        options = WorkerOptions(LoadSpec(str(few_layers), n_ctx=256), log_path=worker_log())
        starting = asyncio.create_task(options.start())
        await ordered
        assert not starting.done()
        await (await starting).close()

        await start_ahead()
        ordered = asyncio.create_task(ordered_ahead())
        await asyncio.sleep(0)
        assert not ordered.done()
        await end_ahead()
        await ordered

    asyncio.run(main())


def test_an_unused_worker_started_in_advance_can_be_ended(few_layers: Path) -> None:
    async def main() -> None:
        before = {child.pid for child in psutil.Process().children()}
        await start_ahead()
        [ahead] = [c for c in psutil.Process().children() if c.pid not in before]
        await end_ahead()
        assert not ahead.is_running()
        engine = await WorkerOptions(LoadSpec(str(few_layers), n_ctx=256)).start()
        assert engine.pid != ahead.pid
        await engine.close()

    asyncio.run(main())
