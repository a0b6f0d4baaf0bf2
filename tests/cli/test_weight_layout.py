"""A model is loaded in the layout that this processor's kernels were measured to be quicker in; they are timed when it matters."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.cli.launch import prepare
from localllm.device.detect import detect
from localllm.device.probes import matrix_rate
from localllm.device.probes.matrix_rate import Measurement
from localllm.settings import Settings
from models import sparse_gguf, tiny_gguf

SHAPE = sparse_gguf.Shape("wide", "llama", 2, 1024, 4096, 8, 8, 128, tiny_gguf.VOCAB)


def timed(prompt_tflops: float, token_tflops: float) -> dict[str, Measurement]:
    return {
        "prompt_flops_s": Measurement(prompt_tflops, 2, "2026-11-24"),
        "token_flops_s": Measurement(token_tflops, 2, "2026-11-24"),
    }


@pytest.fixture
def timings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every timing of this machine's kernels, which comes out as on two Zen cores with AVX-512."""
    monkeypatch.setenv("LOCALLLM_CACHE_DIR", str(tmp_path / "cache"))
    made: list[str] = []

    def measure() -> dict[str, dict[str, Measurement]]:
        made.append("timed")
        return {"stored": timed(0.51, 0.095), "laid_out": timed(0.291, 0.116)}

    monkeypatch.setattr(matrix_rate, "measure", measure)
    return made


def layout_of(path: Path) -> str:
    launch = prepare(str(path), Settings({"context": 2048}))
    assert launch.plan is not None
    if detect().accelerator != "cpu":
        pytest.skip("on this machine the processor computes nothing")
    return launch.options.spec.placement.layout


def test_a_model_of_the_measured_format_is_loaded_as_it_is_stored_and_the_kernels_are_timed_once(
    tmp_path: Path, timings: list[str]
) -> None:
    path = sparse_gguf.write(SHAPE, tmp_path, lambda writer, _n_tokens: tiny_gguf._vocabulary(writer))
    named = path.rename(path.with_name("Wide-Q4_K_M.gguf"))
    assert [layout_of(named), layout_of(named)] == ["stored", "stored"]
    assert timings == ["timed"]


def test_a_model_of_another_format_is_loaded_as_ever_and_nothing_is_timed(smollm2: Path, timings: list[str]) -> None:
    assert layout_of(smollm2) == "auto"
    assert timings == []
