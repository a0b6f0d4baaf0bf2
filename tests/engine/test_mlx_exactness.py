"""Exactness on MLX: batching, caching, parking and the disk change no greedy answer, for every kind
of memory.

MLX's kernels for one row and for several round differently too, so the bounds are the same
(crowds.py)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.crowds import crowds_equal_isolated_runs
from engine.drive import settle
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.speculation.mtp import MtpDrafter
from localllm_backends.contract import LoadSpec
from localllm_backends.mlx import backend_type as mlx
from models import tiny_mlx

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(mlx.available() is not None, reason=str(mlx.available())),
]

ROUTER_FLIPS = {"moe": 0.05, "recurrent": 0.05}
MIXES = 12
SHAPES = ("llama", "sliding", "moe", "mla", "hybrid", "recurrent", "4bit")


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("shape", SHAPES)
def test_random_mixes_equal_isolated_runs(shape: str, kv_type: str, tmp_path: Path) -> None:
    if kv_type == "q8_0" and shape != "llama":
        pytest.skip("one shape shows quantised rows in batches")
    path = tiny_mlx.SHAPES[shape](tmp_path / "model")
    spec = LoadSpec(
        str(path), n_ctx=768, n_seq_max=4, n_batch=64, kv_type_k=kv_type, kv_type_v=kv_type
    )  # type: ignore[arg-type]
    alone = mlx.load(spec)
    settings = EngineSettings(cache_bytes=600_000, disk_dir=str(tmp_path / "kv"), disk_bytes=10**8)
    engine = Engine(mlx.load(spec), settings)
    crowds_equal_isolated_runs(
        engine, alone, shape, MIXES, router_flips=ROUTER_FLIPS.get(shape, 0.0)
    )
    engine.close()
    alone.close()


@pytest.mark.parametrize("shape", ["mimo", "qwen"])
def test_random_mixes_with_draft_heads_equal_isolated_undrafted_runs(
    shape: str, tmp_path: Path
) -> None:
    """Heads that are right about one time in three and draft whenever they have any chance, with
    caching, parking and disk."""
    path = tiny_mlx.write_mtp(tmp_path / "model", shape, likeness=0.35)
    spec = LoadSpec(str(path), n_ctx=768, n_seq_max=4, n_batch=64)
    alone = mlx.load(spec)
    settings = EngineSettings(
        draft="mtp",
        cache_bytes=600_000,
        disk_dir=str(tmp_path / "kv"),
        disk_bytes=10**8,
        headroom_bytes=0,
    )
    restored = 0
    # The second engine finds the first one's prefixes on disk, together with the head's KV.
    for mixes in (4, 3):
        engine = Engine(mlx.load(replace(spec, mtp=True)), settings)
        settle(engine)
        (drafter,) = engine.speculator.drafters.values()
        assert isinstance(drafter, MtpDrafter)
        assert drafter.token_s > 0, "measured while idle"
        # The clock stands still, and a drafted token and a further row cost almost nothing.
        engine.speculator.cost.set({1: 1.0, 32: 1.01})
        engine.speculator.cost.observe = lambda *_: None  # type: ignore[method-assign]
        drafter.clock, drafter.token_s = (lambda: 0.0), 1e-9
        crowds_equal_isolated_runs(engine, alone, shape, mixes, router_flips=0.0)
        settle(engine)
        snapshot = engine.snapshot()
        restored = int(snapshot["restored_tokens"])
        assert 5 < int(snapshot["accepted_mtp_tokens"]) < int(snapshot["drafted_mtp_tokens"])
        engine.close()
    assert restored > 100
    alone.close()
