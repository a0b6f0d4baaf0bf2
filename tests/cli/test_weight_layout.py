"""A model is loaded in the weight layout that is faster on this processor.

The kernels are timed only if the result matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from localllm.device.detect import detect
from localllm.device.measurement_store import Measurement
from localllm.device.probes import matrix_rate
from localllm.load.load_plan import load_plan_named
from localllm.settings import Settings
from models import sparse_gguf, tiny_gguf

# Weights of 0.6 GB in a sparse file.
SHAPE = sparse_gguf.Shape("wide", "llama", 16, 2048, 8192, 16, 16, 128, tiny_gguf.VOCAB)


def timed(prompt_tflops: float, token_tflops: float) -> dict[str, Measurement]:
    return {
        "prompt_flops_s": Measurement(prompt_tflops, "Q4_K", "2026-11-24"),
        "experts_flops_s": Measurement(prompt_tflops, "Q4_K", "2026-11-24"),
        "token_flops_s": Measurement(token_tflops, "Q4_K", "2026-11-24"),
    }


@pytest.fixture
def timings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record every timing of kernels, with the results of two Zen cores with AVX-512."""
    monkeypatch.setenv("LOCALLLM_CACHE_DIR", str(tmp_path / "cache"))
    made: list[str] = []

    def measure(types: Sequence[str]) -> matrix_rate.Measurements:
        made.extend(types)
        layouts = {"stored": timed(0.51, 0.095), "laid_out": timed(0.291, 0.116)}
        return {
            (name, layout, kind): figure
            for name in types
            for layout, rates in layouts.items()
            for kind, figure in rates.items()
        }

    monkeypatch.setattr(matrix_rate, "measure", measure)
    return made


def layout_of(path: Path) -> str:
    load = load_plan_named(str(path), Settings({"context": 2048}))
    assert load.plan is not None
    if detect().accelerator != "cpu":
        pytest.skip("on this machine the processor computes nothing")
    return load.options.spec.placement.layout


def test_a_model_faster_in_its_stored_layout_keeps_it_and_kernels_are_timed_once(
    tmp_path: Path, timings: list[str]
) -> None:
    path = sparse_gguf.write(
        SHAPE, tmp_path, lambda writer, _n_tokens: tiny_gguf.vocabulary(writer)
    )
    named = path.rename(path.with_name("Wide-Q4_K_M.gguf"))
    assert [layout_of(named), layout_of(named)] == ["stored", "stored"]
    assert timings == ["Q4_K", "Q6_K"]


def test_a_small_model_uses_the_automatic_layout_without_timing(
    smollm2: Path, timings: list[str]
) -> None:
    assert layout_of(smollm2) == "auto"
    assert timings == []
