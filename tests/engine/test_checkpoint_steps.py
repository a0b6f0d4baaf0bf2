"""A point where a state is kept ends a step before its prompt does: the end of a short turn is not cut for one."""

from __future__ import annotations

import pytest

from engine.drive import GREEDY, run, settle
from localllm.engine.core import Engine
from support.requests import request_for
from support.scripted_backend import ScriptedBackend


def words(n: int, seed: int) -> list[int]:
    return [3 + (i * 7 + seed * 31) % 250 for i in range(n)]


@pytest.mark.parametrize(("tail", "steps"), [(20, 1), (60, 2)])
def test_a_short_turn_behind_what_is_known_is_read_in_one_step(tail: int, steps: int) -> None:
    backend = ScriptedBackend(n_ctx=2048, n_batch=256, rewind="none", states=True)
    engine = Engine(backend)
    head = words(600, 1)
    for key, prompt in (("first", head + words(30, 2)), ("second", head + words(30, 3))):
        run(engine, request_for(key, prompt, 4, GREEDY, ignore_eos=True))
        settle(engine)
    before = len(backend.steps)
    outcome = run(engine, request_for("turn", head + words(tail, 4), 1, GREEDY, ignore_eos=True))
    assert outcome.finish("turn").usage.cached_tokens >= 600 - 16
    assert len(backend.steps) - before == steps
