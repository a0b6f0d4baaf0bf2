"""`doctor --accelerator` examines engines other than llama.cpp, here MLX on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.cli import doctor_engines
from localllm.library.resolve import resolve
from localllm.library.types import LocalModel
from localllm_backends import registry
from localllm_backends.mlx import backend_type
from models import tiny_mlx

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(backend_type.available() is not None, reason=str(backend_type.available())),
]
MLX = registry.declared("mlx")


@pytest.fixture
def local(tmp_path: Path) -> LocalModel:
    return resolve(str(tiny_mlx.write_llama(tmp_path / "secret-name")))


def test_the_report_covers_text_kv_state_a_burst_kv_types_a_restart_and_memory(
    local: LocalModel,
) -> None:
    shown: list[str] = []
    test = doctor_engines.examine_engine(MLX, local, shown.append)
    assert test.failures == ()
    assert "checking that a fork at the end continues independently …" in shown
    text = "\n".join(test.lines)
    for said in (
        "10 of 10 tokens as on the CPU",
        "a fork at the end continues independently",
        "truncated tokens leave no trace",
        "exported kv gives the same continuation",
        "a burst of streams decodes as each does alone: 4 streams",
        "accepted drafts stay",
        "turbo4",
        "a prompt from before a restart continues as before",
        "a restart changes no token",
        "planned",
    ):
        assert said in text
    assert "secret-name" not in text
    assert str(Path.home()) not in text


def test_a_model_that_cannot_be_loaded_is_a_failure_without_its_path(local: LocalModel) -> None:
    for file in local.files:
        file.write_bytes(b"no weights")
    test = doctor_engines.examine_engine(MLX, local, [].append)
    assert test.failures
    text = "\n".join(test.lines)
    assert "FAILED" in text
    assert str(local.path.parent) not in text
    assert "secret-name" not in text
