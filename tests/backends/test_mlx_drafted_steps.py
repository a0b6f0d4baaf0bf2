"""A step with drafts continues the step that MLX started early. Its logits equal those of a backend
that starts no steps early."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from localllm_backends.contract import Chunk, LoadSpec
from localllm_backends.mlx import backend_type
from models import tiny_mlx

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(backend_type.available() is not None, reason=str(backend_type.available())),
]


@pytest.mark.parametrize("n_streams", [1, 3])
@pytest.mark.parametrize("shape", ["llama", "sliding", "hybrid"])
def test_drafts_after_an_early_step_have_the_same_logits(
    shape: str, n_streams: int, tmp_path: Path
) -> None:
    path = str(tiny_mlx.SHAPES[shape](tmp_path / "m"))
    rng = random.Random(n_streams)
    backends, lines = [], []
    for early in (True, False):
        spec = LoadSpec(
            path, n_ctx=1024, n_seq_max=3, n_batch=256, n_rewind=4, starts_steps_early=early
        )
        backends.append(backend_type.load(spec))
        lines.append([backends[-1].new_sequence() for _ in range(n_streams)])
    new = [[rng.randrange(3, 250) for _ in range(rng.randint(5, 60))] for _ in range(n_streams)]
    n_outputs = [1] * n_streams
    for _ in range(30):
        results = []
        for backend, line in zip(backends, lines, strict=True):
            chunks = [Chunk(*each) for each in zip(line, new, n_outputs, strict=True)]
            results.append(backend.step(chunks))
        following = []
        for i in range(n_streams):
            _, best = (result.argmax(i) for result in results)
            rows, expected_rows = (result.logits(i) for result in results)
            np.testing.assert_allclose(rows, expected_rows, atol=1e-3 * float(expected_rows.std()))
            # Some of the drafts are accepted, and sometimes the next token is not the best one.
            kept = rng.randint(1, n_outputs[i])
            for backend, line in zip(backends, lines, strict=True):
                backend.truncate(line[i], backend.length(line[i]) - n_outputs[i] + kept)
            token = best[kept - 1] if rng.random() < 0.8 else rng.randrange(3, 250)
            drafts = [rng.randrange(3, 250) for _ in range(rng.choice([0, 0, 1, 4]))]
            following.append([token, *drafts])
        new = following
        n_outputs = [len(tokens) for tokens in new]
        backends[0].check_integrity()
    for backend in backends:
        backend.close()
