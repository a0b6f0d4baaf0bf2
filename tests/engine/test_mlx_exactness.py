"""The same promise on MLX: batching, caching, parking and disk change no greedy answer, whatever the memory's shape.

MLX's kernels for one row and for several round differently too, so the bounds are those of test_exactness.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.drive import GREEDY, Outcome, settle
from engine.test_exactness import NEAR_TIE, isolated, message
from localllm.engine.core import Engine, EngineSettings
from localllm_backends.contract import LoadSpec
from localllm_backends.mlx import backend_type as mlx
from models import tiny_mlx
from support.requests import request_for

pytestmark = [pytest.mark.mlx, pytest.mark.skipif(mlx.available() is not None, reason=str(mlx.available()))]

ROUTER_FLIPS = {"moe": 0.05, "recurrent": 0.05}
MIXES = 12
SHAPES = ("llama", "sliding", "moe", "mla", "hybrid", "recurrent", "4bit")


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("shape", SHAPES)
def test_random_mixes_equal_isolated_runs(shape: str, kv_type: str, tmp_path: Path) -> None:
    if kv_type == "q8_0" and shape != "llama":
        pytest.skip("one shape shows quantised rows in batches")
    path = tiny_mlx.SHAPES[shape](tmp_path / "model")
    spec = LoadSpec(str(path), n_ctx=768, n_seq_max=4, n_batch=64, kv_type_k=kv_type, kv_type_v=kv_type)  # type: ignore[arg-type]
    alone = mlx.load(spec)
    settings = EngineSettings(cache_bytes=600_000, disk_dir=str(tmp_path / "kv"), disk_bytes=10**8)
    engine = Engine(mlx.load(spec), settings)
    rng = random.Random(shape)
    histories = [message(rng) for _ in range(3)]
    ties = flips = requests = 0
    for mix in range(MIXES):
        outcome = Outcome()
        asked: dict[str, tuple[list[int], int, bool]] = {}
        for i in range(rng.randint(1, 5)):
            prompt = [*rng.choice(histories)[: rng.choice([40, 150, 300])], *message(rng)]
            key, n, cancel = f"{mix}-{i}", rng.randint(1, 20), rng.random() < 0.2
            asked[key] = (prompt, n, cancel)
            outcome.take(
                engine.submit(request_for(key, prompt, max_tokens=n, sampling=GREEDY, ignore_eos=True), prompt)
            )
            for _ in range(rng.randint(0, 4)):
                outcome.take(engine.step())
                engine.check_integrity()
            if cancel:
                outcome.take(engine.cancel(key))
        while engine.has_work:
            outcome.take(engine.step())
        engine.check_integrity()
        if rng.random() < 0.5:
            settle(engine)
        for key, (prompt, n, cancel) in asked.items():
            assert len(outcome.ends[key]) == 1
            requests += 1
            got = outcome.tokens.get(key, [])
            expected, gaps = isolated(alone, prompt, n)
            assert cancel or len(got) == n
            at = next((j for j, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
            if at is not None:
                clear = gaps[at] > NEAR_TIE
                assert not clear or shape in ROUTER_FLIPS, (
                    f"{key}: another token at {at}, where {gaps[at]:.3f} was clear"
                )
                ties, flips = ties + (not clear), flips + clear
            elif not cancel:
                histories[rng.randrange(3)] = [*prompt, *got][:400]
    assert flips <= ROUTER_FLIPS.get(shape, 0.0) * requests
    print(f"{shape}: {ties} near ties, {flips} router flips in {requests} requests")
    engine.close()
    alone.close()
