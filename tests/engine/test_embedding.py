"""The embedding worker: a process that embeds, refuses with a reason, and is restarted after it
dies, but not again and again without a pause."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from localllm.engine.messages import Failure
from localllm.engine.worker.embedding import EmbeddingEngine, EmbeddingOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.errors import (
    BackendError,
    BusyError,
    ContextLengthError,
    DoesNotFitError,
    ModelFileError,
    ModelNotFoundError,
    RequestError,
    WorkerDiedError,
)
from models.tiny_bert import CTX, E, write_bert
from support.requests import events_of, request_for


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert") / "bert.gguf")


def test_texts_and_tokens_become_vectors_and_refusals_are_words(bert: Path) -> None:
    async def story() -> None:
        host = Supervisor(EmbeddingOptions(str(bert)))
        engine = await host.engine()
        try:
            assert isinstance(engine, EmbeddingEngine)
            assert (engine.n_embd, engine.info.n_ctx) == (E, CTX)
            tokens = await engine.tokenize("ab")
            vectors, count = await engine.embed(["ab", tokens])
            rows = [np.frombuffer(v, dtype="<f4") for v in vectors]
            assert (len(rows[0]), count) == (E, 2 * len(tokens))
            assert np.allclose(rows[0], rows[1], atol=1e-3)
            with pytest.raises(ContextLengthError, match=f"limit is {CTX}"):
                await engine.embed(["word " * CTX])
            (cut,), count = await engine.embed(["word " * CTX], truncate=True)
            assert (len(cut), count) == (4 * E, CTX)
            for bad in ([], [10**6], [-1]):
                with pytest.raises(RequestError):
                    await engine.embed([bad])
            with pytest.raises(RequestError):
                await engine.detokenize([10**6])
            assert (await engine.detokenize(tokens[1:-1])).strip() == "ab"
            events = [e async for e in events_of(engine, request_for("r", "hi"))]
            assert [type(e) for e in events] == [Failure]
            assert [await engine.listen(request_for("r", "hi"), events.append)] == events
            many = await asyncio.gather(*(engine.embed([f"text {i}"]) for i in range(20)))
            assert len({v[0][0] for v in many}) == 20
            assert (await engine.snapshot())["requests"] == 22
        finally:
            await host.close()

    asyncio.run(story())


def test_a_dead_worker_is_an_error_and_the_next_request_starts_another(bert: Path) -> None:
    async def story() -> None:
        host = Supervisor(EmbeddingOptions(str(bert)))
        first = await host.engine()
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            await first.embed(["hello"])
        second = await host.engine()
        assert second is not first
        assert len((await second.embed(["hello"]))[0]) == 1
        await host.close()

    asyncio.run(story())


async def die_of_a_request(engine: EmbeddingEngine) -> None:
    """Kill the process while it holds a request and check that the request fails with the signal's
    name."""
    os.kill(engine.pid, signal.SIGSTOP)
    asked = asyncio.create_task(engine.embed(["hello"]))
    await asyncio.sleep(0)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="signal SIGKILL"):
        await asked


def test_a_model_that_crashes_on_every_request_is_refused_for_a_while(bert: Path) -> None:
    async def story() -> None:
        host = Supervisor(EmbeddingOptions(str(bert)))
        for _ in range(4):
            await die_of_a_request(await host.engine())
        with pytest.raises(
            BusyError, match=r"4 times in a row; it will be loaded again in \d+ s"
        ) as refused:
            await asyncio.wait_for(host.engine(), 5)
        assert 1 <= refused.value.retry_after_s <= 8
        await host.close()

    asyncio.run(story())


def test_a_model_that_embedded_a_text_is_loaded_again_at_once(bert: Path) -> None:
    async def story() -> None:
        host = Supervisor(EmbeddingOptions(str(bert)))
        for _ in range(6):
            engine = await host.engine()
            await engine.embed(["hello"])
            await die_of_a_request(engine)
        await host.close()

    asyncio.run(story())


def test_a_model_that_crashes_on_every_load_is_refused_for_a_while(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "false")

    async def story() -> None:
        host = Supervisor(EmbeddingOptions(str(bert)))
        for _ in range(4):
            with pytest.raises(WorkerDiedError, match=r"while loading 'bert.gguf' \(exit code 1\)"):
                await host.engine()
        with pytest.raises(BusyError, match="4 times in a row"):
            await host.engine()

    asyncio.run(story())


def test_a_load_that_would_take_the_headroom_never_starts(bert: Path) -> None:
    async def story() -> None:
        options = EmbeddingOptions(str(bert), planned_bytes=2_000_000, headroom_bytes=1_000_000)
        host = Supervisor(options, available=lambda: 2_500_000)
        with pytest.raises(DoesNotFitError, match=r"bert\.gguf needs"):
            await host.engine()
        assert host.loads == 0

    asyncio.run(story())


def test_an_invalid_request_to_the_embedding_worker_gets_an_error(bert: Path) -> None:
    async def story() -> None:
        host = Supervisor(EmbeddingOptions(str(bert)))
        engine = await host.engine()
        with pytest.raises(BackendError, match=r"TypeError|AttributeError"):
            await asyncio.wait_for(engine.tokenize(None), 30)  # type: ignore[arg-type]
        assert len((await engine.embed(["still here"]))[0]) == 1
        await host.close()

    asyncio.run(story())


def test_a_model_without_embeddings_is_refused_with_the_reason(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def story() -> None:
        with pytest.raises(ModelFileError, match="generates text"):
            await Supervisor(EmbeddingOptions(str(tiny_model))).engine()
        with pytest.raises(ModelNotFoundError):
            await Supervisor(EmbeddingOptions(str(tmp_path / "none.gguf"))).engine()

    asyncio.run(story())


def test_the_embedding_process_has_the_environment_of_a_worker(bert: Path) -> None:
    async def main() -> None:
        host = Supervisor(EmbeddingOptions(str(bert)))
        try:
            engine = await host.engine()
            environment = psutil.Process(engine.pid).environ()
            assert {"GOMP_SPINCOUNT", "MALLOC_ARENA_MAX"} <= set(environment)

        finally:
            await host.close()

    asyncio.run(main())
