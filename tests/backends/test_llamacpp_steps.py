"""Steps of llama.cpp: they are complete when they return, even if no logits are read, and the first
step computes like every later one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm_backends.contract import Chunk, InterruptedStepError, LoadSpec
from localllm_backends.llamacpp import backend_type
from localllm_backends.llamacpp.native import start_native
from models import tiny_gguf


@pytest.mark.parametrize("outputs", [0, 1])
def test_a_step_waits_for_its_device(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, outputs: int
) -> None:
    """Reading logits waits for the device. Without logits, a GPU's queue accepts a step within
    microseconds, so the step must wait."""
    calls: list[str] = []
    llama = start_native()

    def called(name: str, real: Any, *args: Any) -> Any:
        calls.append(name)
        return real(*args)

    for name in ("llama_decode", "llama_synchronize", "llama_get_logits"):
        monkeypatch.setattr(llama, name, partial(called, name, getattr(llama, name)))
    backend = backend_type.load(LoadSpec(str(tiny_model), n_ctx=256))
    sequence = backend.new_sequence()
    calls.clear()
    result = backend.step([Chunk(sequence, list(range(3, 43)), outputs)])
    assert calls == ["llama_decode", *["llama_synchronize"] * (not outputs)], (
        "with logits only their reader waits"
    )
    result.logits(0)
    backend.close()
    assert calls == ["llama_decode", "llama_get_logits" if outputs else "llama_synchronize"]


def test_the_first_step_of_a_mixture_uses_the_experts_chosen_by_its_router(tmp_path: Path) -> None:
    """llama.cpp's own warm-up uses all experts, and a step of the same shape after it would be
    computed in the same way."""
    backend = backend_type.load(
        LoadSpec(str(tiny_gguf.write_moe(tmp_path / "moe.gguf")), n_ctx=256, n_threads=1)
    )

    def logits_of_one_token() -> np.ndarray[Any, Any]:
        sequence = backend.new_sequence()
        logits = backend.step([Chunk(sequence, [7], outputs=1)]).rows[0].copy()
        backend.drop(sequence)
        return logits

    first = logits_of_one_token()
    between = backend.new_sequence()
    backend.step([Chunk(between, list(range(3, 43)), outputs=1)])
    backend.drop(between)
    later = logits_of_one_token()
    backend.close()
    assert np.array_equal(first, later)


def test_a_gpu_step_has_several_micro_batches_and_can_be_interrupted(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits equal those of single micro-batches. If a step is interrupted after some of its
    micro-batches, none of them remains. (The CPU stands in for a GPU.)"""
    prompt = [3 + i * 7 % 250 for i in range(1500)]
    spec = LoadSpec(str(tiny_model), n_ctx=4096, n_threads=1)
    monkeypatch.setattr("localllm_backends.llamacpp.context.has_gpu", lambda: False)
    narrow = backend_type.load(spec)
    monkeypatch.setattr("localllm_backends.llamacpp.context.has_gpu", lambda: True)
    wide = backend_type.load(spec)
    assert (narrow.info.n_batch, wide.info.n_batch) == (512, 2048)
    sequence = narrow.new_sequence()
    for start in range(0, len(prompt), 512):
        right = (
            narrow.step([Chunk(sequence, prompt[start : start + 512], outputs=1)])
            .logits(0)[-1]
            .copy()
        )
    llama = start_native()
    sequence, decode = wide.new_sequence(), llama.llama_decode
    with monkeypatch.context() as patch:
        patch.setattr(llama, "llama_decode", lambda *args: decode(*args) or 2)
        with pytest.raises(InterruptedStepError):
            wide.step([Chunk(sequence, prompt, outputs=1)])
    assert wide.length(sequence) == 0
    assert np.allclose(
        wide.step([Chunk(sequence, prompt, outputs=1)]).logits(0)[-1], right, atol=1e-3
    )
    wide.check_integrity()
    for backend in (narrow, wide):
        backend.close()


def test_a_sliding_window_model_computes_one_micro_batch_per_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm_backends.llamacpp.context.has_gpu", lambda: True)
    backend = backend_type.load(
        LoadSpec(str(tiny_gguf.write_sliding(tmp_path / "windows.gguf")), n_ctx=2048, n_threads=1)
    )
    assert backend.info.n_batch == 512
    backend.close()
