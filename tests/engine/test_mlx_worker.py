"""A checkpoint folder selects the MLX backend by its entry point, and a worker process serves
it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from localllm.engine.messages import Failure, Finish, Sampling, Text
from localllm.engine.worker import backends
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.errors import ModelFileError
from localllm_backends.contract import LoadSpec
from localllm_backends.mlx import backend_type as mlx
from models import tiny_mlx
from support.requests import events_of, request_for

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(mlx.available() is not None, reason=str(mlx.available())),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mlx.write_llama(tmp_path_factory.mktemp("mlx") / "tiny-llama")


def test_a_checkpoint_folder_is_run_by_mlx_and_a_gguf_is_not(
    folder: Path, tiny_model: Path
) -> None:
    assert backends.for_path(str(folder)).declaration.name == "mlx"
    assert backends.for_path(str(folder), "mlx").declaration.name == "mlx"
    assert backends.for_path(str(tiny_model)).declaration.name == "llamacpp"
    with pytest.raises(ModelFileError):
        backends.for_path(str(tiny_model), "mlx")


def test_a_worker_serves_a_checkpoint_to_several_at_once(folder: Path) -> None:
    async def main() -> list[list[int]]:
        supervisor = Supervisor(WorkerOptions(LoadSpec(str(folder), n_ctx=512, n_seq_max=4)))
        try:
            engine = await supervisor.engine()
            assert engine.info.chat_template == tiny_mlx.TEMPLATE

            async def one(i: int) -> list[int]:
                request = request_for(
                    str(i),
                    "the man in the hat",
                    max_tokens=12,
                    sampling=Sampling(temperature=0.0),
                    ignore_eos=True,
                )
                tokens: list[int] = []
                async for event in events_of(engine, request):
                    if isinstance(event, Text):
                        tokens += event.tokens
                    assert not isinstance(event, Failure), event
                    if isinstance(event, Finish):
                        assert event.reason == "length"
                return tokens

            return list(await asyncio.gather(*(one(i) for i in range(3))))
        finally:
            await supervisor.close()

    answers = asyncio.run(main())
    assert len(answers[0]) == 12
    assert answers[0] == answers[1] == answers[2]
