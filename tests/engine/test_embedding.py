"""The embedding worker: a process that embeds, refuses in words, and is started again after it died."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from localllm.engine.embedding import EmbeddingHost, EmbeddingOptions, Embeds
from localllm.engine.messages import Failure
from localllm.errors import ContextLengthError, ModelFileError, ModelNotFoundError, RequestError, WorkerDiedError
from models.tiny_bert import CTX, E, write_bert
from support.requests import request_for


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert") / "bert.gguf")


def test_texts_and_tokens_become_vectors_and_refusals_are_words(bert: Path) -> None:
    async def story() -> None:
        host = EmbeddingHost(EmbeddingOptions(str(bert)))
        engine = await host.engine()
        try:
            assert isinstance(engine, Embeds)
            assert (engine.n_embd, engine.info.n_ctx) == (E, CTX)
            tokens = await engine.tokenize("ab")
            vectors, count = await engine.embed(["ab", tokens])
            rows = [np.frombuffer(v, dtype="<f4") for v in vectors]
            assert (len(rows[0]), count) == (E, 2 * len(tokens))
            assert np.allclose(rows[0], rows[1], atol=1e-3)
            with pytest.raises(ContextLengthError, match=f"takes {CTX}"):
                await engine.embed(["word " * CTX])
            (cut,), count = await engine.embed(["word " * CTX], truncate=True)
            assert (len(cut), count) == (4 * E, CTX)
            for bad in ([], [10**6], [-1]):
                with pytest.raises(RequestError):
                    await engine.embed([bad])
            with pytest.raises(RequestError):
                await engine.detokenize([10**6])
            assert (await engine.detokenize(tokens[1:-1])).strip() == "ab"
            events = [e async for e in engine.submit(request_for("r", "hi"))]
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
        host = EmbeddingHost(EmbeddingOptions(str(bert)))
        first = await host.engine()
        os.kill(first._process.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            await first.embed(["hello"])
        second = await host.engine()
        assert second is not first
        assert len((await second.embed(["hello"]))[0]) == 1
        await host.close()

    asyncio.run(story())


def test_what_is_no_embedding_model_is_refused_by_its_own_reason(tiny_model: Path, tmp_path: Path) -> None:
    async def story() -> None:
        with pytest.raises(ModelFileError, match="generates text"):
            await EmbeddingHost(EmbeddingOptions(str(tiny_model))).engine()
        with pytest.raises(ModelNotFoundError):
            await EmbeddingHost(EmbeddingOptions(str(tmp_path / "none.gguf"))).engine()

    asyncio.run(story())
