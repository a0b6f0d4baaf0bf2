"""Quantised KV types on MLX: their bytes are planned, their loss is measured, and a slow type is
replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.mlx_lines import alone, line, start
from localllm.planner import kv_sizes
from localllm.planner.types import RunSettings
from localllm_backends import registry
from localllm_backends.contract import Chunk, LoadError, LoadSpec
from localllm_backends.mlx import backend_type
from localllm_catalog import catalog
from localllm_catalog.layers.full import Full
from localllm_catalog.types import Layer
from models import tiny_mlx

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(backend_type.available() is not None, reason=str(backend_type.available())),
]

GROUPS = ["q8_0", "q6_0", "q5_0", "q4_0", "q3_0", "q2_0"]
TURBO = ["turbo4", "turbo3", "turbo2"]


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama model in float16, because published models have 16 bits."""
    import mlx.core as mx

    folder = tiny_mlx.write_llama(tmp_path_factory.mktemp("halves") / "model")
    for file in folder.glob("*.safetensors"):
        weights: Any = mx.load(str(file))
        half = {name: array.astype(mx.float16) for name, array in weights.items()}
        mx.save_safetensors(str(file), half, {"format": "mlx"})
    return folder


def loaded(folder: Path, kind: Any, **spec: Any) -> Any:
    spec = {"n_ctx": 4096, "n_seq_max": 4, "n_batch": 512, **spec}
    return backend_type.load(LoadSpec(str(folder), kv_type_k=kind, kv_type_v=kind, **spec))


@pytest.mark.parametrize("kind", ["f16", *GROUPS, *TURBO])
def test_the_plan_counts_every_type_to_the_byte(halves: Path, kind: str) -> None:
    known = catalog.load().get("qwen3-8b")
    assert known is not None
    full = Full(n_kv_heads=1, head_dim_k=64, head_dim_v=64)
    model = replace(known, layers=(Layer(full), Layer(full)), variants=())
    assert kv_sizes.kv_type_allowed(model, kind, registry.declared("mlx"))
    planned_bytes = kv_sizes.mlx_kv_bytes(model, RunSettings(256).with_kv_type(kind))
    backend = loaded(halves, kind)
    sequence, _ = start(backend, line(60))
    before_bytes = backend.memory().kv_bytes
    # Buffers grow by 256 tokens.
    for seed in range(4):
        backend.step([Chunk(sequence, line(64, seed), outputs=0)])
    assert backend.memory().kv_bytes - before_bytes == planned_bytes
    assert backend.info.kv_type_k == kind
    backend.close()


def test_the_loss_of_each_type_is_measured(load: Callable[..., Any]) -> None:
    backend = load()
    kinds = [*GROUPS, *TURBO, "iq4_nl"]
    found = {f.k: f for f in backend.compare_kv([(kind, kind) for kind in kinds], line(60))}
    assert list(found) == [*GROUPS, *TURBO], "a type that MLX lacks is left out"
    for ordered in (GROUPS, TURBO):
        losses = [found[kind].mean_kl for kind in ordered]
        assert losses == sorted(losses)
        assert losses[0] > 0
    assert found["turbo4"].mean_kl < found["q3_0"].mean_kl


def test_turboquant_kv_can_be_forked_and_stored(load: Callable[..., Any]) -> None:
    backend = load(n_ctx=2048, kv_type_k="turbo4", kv_type_v="turbo4")
    tokens = line(320)
    expected = alone(backend, [*tokens, 7])
    source, _ = start(backend, tokens)
    fork = backend.fork(source, 320)
    moved = backend.new_sequence()
    backend.import_range(moved, backend.export_range(source, 0, 320), 0, 320)
    result = backend.step([Chunk(sequence, [7]) for sequence in (source, fork, moved)])
    for i in range(3):
        assert np.abs(result.logits(i)[0] - expected).max() <= 2e-2 * np.abs(expected).max()


def test_a_type_without_its_library_is_refused(
    halves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "mlx_vlm" else find(name)
    )
    with pytest.raises(LoadError, match="needs mlx-vlm"):
        loaded(halves, "turbo4")


def test_a_type_that_is_slow_here_is_replaced(halves: Path) -> None:
    from localllm_backends.mlx.kv_fidelity import fast_enough, step_seconds
    from localllm_backends.mlx.load import probe, read_model

    model, _ = read_model(halves)
    own, wanted = probe(model, LoadSpec(str(halves), kv_type_k="q4_0", kv_type_v="q4_0"), 64)
    assert fast_enough(model, own, wanted, lambda _, shapes: 1.0) == (wanted, "")
    used, why = fast_enough(model, own, wanted, lambda _, shapes: 1.0 + (shapes is wanted))
    assert used is own
    assert "q4_0 was replaced by f16" in why
    assert step_seconds(model, wanted, 32) > 0
