"""A backend whose forks copy: the cells of a fork are counted before a request is admitted, so that
no request is parked because of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.drive import GREEDY, Outcome
from localllm.engine.core import Engine
from localllm_backends.contract import LoadSpec
from localllm_backends.mlx import backend_type as mlx
from models import tiny_mlx
from support.requests import request_for

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(mlx.available() is not None, reason=str(mlx.available())),
]


def test_no_request_is_parked_for_a_fork_that_copies_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx

    def own_attention(q: Any, k: Any, v: Any, *, cache: Any, **options: Any) -> Any:
        return mx.fast.scaled_dot_product_attention(q, k, v, **options)

    path = tiny_mlx.SHAPES["llama"](tmp_path / "model")
    # A model with its own attention, which can't be computed in parts.
    monkeypatch.setattr("mlx_lm.models.llama.scaled_dot_product_attention", own_attention)
    # Room for the first request (190 tokens) or for two prompts (300), but not for the answers of
    # both.
    engine = Engine(mlx.load(LoadSpec(str(path), n_ctx=310, n_seq_max=4, n_batch=64)))
    assert not engine.backend.capabilities.shares_cells
    prompt = [5 + i % 200 for i in range(150)]
    outcome = Outcome()
    for key, n_tokens in (("first", 40), ("second", 10)):
        request = request_for(key, prompt, max_tokens=n_tokens, sampling=GREEDY, ignore_eos=True)
        outcome.take(engine.submit(request, prompt))
        for _ in range(5):
            outcome.take(engine.step())
    while engine.has_work:
        outcome.take(engine.step())
        engine.check_integrity()
    assert [outcome.finish(key).reason for key in ("first", "second")] == ["length", "length"]
    assert engine.snapshot()["parked"] == 0
    engine.close()
