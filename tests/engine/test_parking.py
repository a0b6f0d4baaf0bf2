"""Requests that together outgrow the context take turns, and always finish."""

from __future__ import annotations

import random
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.drive import GREEDY, Outcome, run
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm_backends.contract import LoadSpec
from localllm_backends.llamacpp import backend_type as llamacpp
from models.tiny_gguf import write_sliding
from support.examples import examples
from support.requests import request_for
from support.scripted_backend import ScriptedBackend


@settings(max_examples=examples(80))
@given(
    n_ctx=st.sampled_from([64, 96, 128, 160]),
    sizes=st.lists(st.tuples(st.integers(5, 40), st.integers(3, 60)), min_size=2, max_size=4),
    draft=st.sampled_from(["off", "ngram"]),
)
# Regression: a request with few tokens left was parked and readmitted at once, found no cell for
# its next token, and was parked again without end.
@example(n_ctx=96, sizes=[(23, 14), (22, 17), (28, 8)], draft="off")
@example(n_ctx=128, sizes=[(13, 32), (29, 22), (5, 52), (34, 12)], draft="off")
def test_requests_that_outgrow_the_context_together_take_turns_and_end(
    n_ctx: int, sizes: list[tuple[int, int]], draft: str
) -> None:
    engine = Engine(ScriptedBackend(n_ctx=n_ctx), EngineSettings(headroom_bytes=0, draft=draft))
    requests = [
        request_for(
            str(i),
            "abcd"[i] * prompt,
            max_tokens=min(n, n_ctx - prompt),
            sampling=GREEDY,
            ignore_eos=True,
        )
        for i, (prompt, n) in enumerate(sizes)
    ]
    outcome = run(engine, *requests, most=600)
    assert [outcome.finish(r.id).usage.completion_tokens for r in requests] == [
        r.generation.max_tokens for r in requests
    ]


def test_a_parked_request_resumes_with_its_tokens() -> None:
    sizes = [(20, 250), (20, 250)]
    engine = Engine(ScriptedBackend(n_ctx=400), EngineSettings(headroom_bytes=0))
    requests = [
        request_for(str(i), "xy"[i] * p, max_tokens=n, sampling=GREEDY, ignore_eos=True)
        for i, (p, n) in enumerate(sizes)
    ]
    together = run(engine, *requests)
    assert engine.metrics.parked
    for request in requests:
        alone = run(Engine(ScriptedBackend(n_ctx=400), EngineSettings(headroom_bytes=0)), request)
        assert together.tokens[request.id] == alone.tokens[request.id]


def test_parking_a_request_without_prompt_cache_stores_no_kv() -> None:
    engine = Engine(ScriptedBackend(n_ctx=400), EngineSettings(headroom_bytes=0))
    requests = [
        request_for(
            key, key * 20, max_tokens=250, sampling=GREEDY, ignore_eos=True, cache_prompt=False
        )
        for key in "xy"
    ]
    together = run(engine, *requests)
    assert engine.metrics.parked
    assert engine.pool.cache.held_bytes == 0
    for request in requests:
        alone = run(Engine(ScriptedBackend(n_ctx=400), EngineSettings(headroom_bytes=0)), request)
        assert together.tokens[request.id] == alone.tokens[request.id]


def test_cells_of_a_sliding_window_that_sequences_share_are_freed_when_a_step_finds_none(
    tmp_path: Path,
) -> None:
    # llama.cpp overwrites the cells before a window unless two sequences hold them. Forks of one
    # long sequence fill its small cache while the engine's accounting still counts free cells.
    # Regression: the step was repeated forever, and no cells were freed for it.
    spec = LoadSpec(
        str(write_sliding(tmp_path / "model.gguf")), n_ctx=1024, n_seq_max=4, n_batch=64
    )
    engine = Engine(llamacpp.load(spec), EngineSettings(cache_bytes=1))
    rng = random.Random(5)
    line = [510, *(rng.randrange(3, 250) for _ in range(252))]
    outcome = Outcome()

    def ask(key: str, prompt: list[int], n: int) -> None:
        request = request_for(key, prompt, max_tokens=n, sampling=GREEDY, ignore_eos=True)
        outcome.take(engine.submit(request, prompt))

    def answer(key: str) -> list[int]:
        return outcome.tokens.get(key, [])

    ask("a", line, 6)
    while len(answer("a")) < 4:
        outcome.take(engine.step())
    # Two requests that extend the first one's current tokens share all of its cells.
    ask("b", [*line, *answer("a"), 300], 40)
    ask("c", [*line, *answer("a"), 301], 40)
    for _ in range(300):
        outcome.take(engine.step())
        if not engine.has_work:
            break
    assert [len(answer(key)) for key in "abc"] == [6, 40, 40]
    engine.check_integrity()
    engine.close()
