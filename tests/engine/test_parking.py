"""Requests that together outgrow the context take turns, and always come to an end."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.drive import GREEDY, run
from localllm.engine.core import Engine, EngineSettings
from support.requests import request_for
from support.scripted_backend import ScriptedBackend


@settings(deadline=None, max_examples=80)
@given(
    n_ctx=st.sampled_from([64, 96, 128, 160]),
    sizes=st.lists(st.tuples(st.integers(5, 40), st.integers(3, 60)), min_size=2, max_size=4),
    draft=st.sampled_from(["off", "ngram"]),
)
# One with few tokens left was parked, let in again at once, found no cell for its next token, was parked …
@example(n_ctx=96, sizes=[(23, 14), (22, 17), (28, 8)], draft="off")
@example(n_ctx=128, sizes=[(13, 32), (29, 22), (5, 52), (34, 12)], draft="off")
def test_requests_that_outgrow_the_context_together_take_turns_and_end(
    n_ctx: int, sizes: list[tuple[int, int]], draft: str
) -> None:
    engine = Engine(ScriptedBackend(n_ctx=n_ctx), EngineSettings(headroom_bytes=0, draft=draft))
    requests = [
        request_for(str(i), "abcd"[i] * prompt, max_tokens=min(n, n_ctx - prompt), sampling=GREEDY, ignore_eos=True)
        for i, (prompt, n) in enumerate(sizes)
    ]
    outcome = run(engine, *requests, most=600)
    assert [outcome.finish(r.id).usage.completion_tokens for r in requests] == [
        r.generation.max_tokens for r in requests
    ]


def test_one_that_was_parked_comes_back_with_its_tokens() -> None:
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


def test_one_that_shares_nothing_is_parked_without_a_trace() -> None:
    engine = Engine(ScriptedBackend(n_ctx=400), EngineSettings(headroom_bytes=0))
    requests = [
        request_for(key, key * 20, max_tokens=250, sampling=GREEDY, ignore_eos=True, cache_prompt=False) for key in "xy"
    ]
    together = run(engine, *requests)
    assert engine.metrics.parked
    assert engine.residency.cache.held_bytes == 0
    for request in requests:
        alone = run(Engine(ScriptedBackend(n_ctx=400), EngineSettings(headroom_bytes=0)), request)
        assert together.tokens[request.id] == alone.tokens[request.id]
