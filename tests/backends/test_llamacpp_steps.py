"""A step of llama.cpp is over when it returns, also where nobody asks for its logits: its time is what the step took."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from localllm_backends.contract import Chunk, LoadSpec
from localllm_backends.llamacpp import backend_type


@pytest.mark.parametrize("outputs", [0, 1])
def test_a_step_waits_for_its_device(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, outputs: int) -> None:
    """Reading logits waits by itself; a GPU's queue takes a step without them in microseconds."""
    calls: list[str] = []

    def called(name: str, real: Any, *args: Any) -> Any:
        calls.append(name)
        return real(*args)

    for name in ("llama_decode", "llama_synchronize", "llama_get_logits"):
        monkeypatch.setattr(llama_cpp, name, partial(called, name, getattr(llama_cpp, name)))
    backend = backend_type.load(LoadSpec(str(tiny_model), n_ctx=256))
    sequence = backend.new_sequence()
    calls.clear()
    backend.step([Chunk(sequence, list(range(3, 43)), outputs)])
    backend.close()
    assert calls == ["llama_decode", "llama_get_logits" if outputs else "llama_synchronize"]
