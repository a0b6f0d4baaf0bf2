"""MLX models with windows or recurrent layers store KV in blocks and their state at checkpoints. A
shared prefix is stored once, and is restored from disk up to the end of an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.drive import GREEDY, run, settle
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm_backends.contract import LoadSpec
from localllm_backends.mlx import backend_type as mlx
from models import tiny_mlx
from support.requests import request_for

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(mlx.available() is not None, reason=str(mlx.available())),
]


def line(n: int, seed: int) -> list[int]:
    return [7 + (i * 31 + seed * 17 + i * i % 13) % 200 for i in range(n)]


@pytest.mark.parametrize("shape", ["sliding", "hybrid"])
def test_branches_store_their_prompt_once_and_are_restored_after_a_restart(
    shape: str, tmp_path: Path
) -> None:
    spec = LoadSpec(
        str(tiny_mlx.SHAPES[shape](tmp_path / "model")), n_ctx=2048, n_seq_max=4, n_batch=64
    )
    options = EngineSettings(headroom_bytes=0, disk_dir=str(tmp_path / "kv"), disk_bytes=10**9)
    engine = Engine(mlx.load(spec), options)
    assert engine.backend.capabilities.states
    prompt, lines, held = line(600, 1), [], []
    for i in range(3):
        branch = [*prompt, *line(20, 2 + i)]
        said = run(engine, request_for(f"r{i}", branch, 6, GREEDY, ignore_eos=True))
        lines.append([*branch, *said.tokens[f"r{i}"]])
        settle(engine)
        held.append(int(engine.snapshot()["cache_bytes"]))
        engine.check_integrity()
    assert held[2] - held[1] < held[0] / 2, "what is common is not there again"
    fresh = Engine(mlx.load(spec), EngineSettings(headroom_bytes=0))
    expected = [
        run(fresh, request_for(f"f{i}", [*x, 9, 11], 6, GREEDY, ignore_eos=True)).tokens[f"f{i}"]
        for i, x in enumerate(lines)
    ]
    fresh.close()
    engine.close()
    again = Engine(mlx.load(spec), options)
    for i, known in enumerate(lines):
        end = run(again, request_for(f"a{i}", [*known, 9, 11], 6, GREEDY, ignore_eos=True))
        assert end.finish(f"a{i}").usage.cached_tokens >= len(known) - 1
        assert end.tokens[f"a{i}"] == expected[i]
    again.check_integrity()
    again.close()
