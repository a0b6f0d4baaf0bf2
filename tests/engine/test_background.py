"""Requests of low priority next to another request: they make room for it, run in few of its steps,
and finish with the answers that they give alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.drive import GREEDY, Outcome, prompt_tokens, run
from localllm.engine import EngineSettings
from localllm.engine.background import BackgroundTurns, urgent
from localllm.engine.core import Engine
from localllm.engine.messages import Finish, Generation, Request, Text
from localllm.engine.step_costs import StepCost
from localllm_backends.contract import LoadSpec
from localllm_backends.llamacpp import backend_type as llamacpp
from support.scripted_backend import ScriptedBackend

N_BACKGROUND = 6


def asked(id_: str, n_tokens: int, priority: int = 0) -> Request:
    generation = Generation(
        sampling=GREEDY, max_tokens=n_tokens, ignore_eos=True, priority=priority
    )
    return Request(id_, f"the prompt of {id_}: " + "words " * 20, generation)


def with_background(engine: Engine, n_steps: int) -> Outcome:
    """Submit six requests of low priority and run some steps."""
    outcome = Outcome()
    for i in range(N_BACKGROUND):
        request = asked(f"background {i}", 60, -1)
        outcome.take(engine.submit(request, prompt_tokens(engine, request)))
    for _ in range(n_steps):
        outcome.take(engine.step())
    return outcome


def beside(engine: Engine, outcome: Outcome, request: Request) -> list[set[str]]:
    """Return the ids of the requests with text in each step until `request` has ended."""
    outcome.take(engine.submit(request, prompt_tokens(engine, request)))
    steps: list[set[str]] = []
    while request.id not in outcome.ends:
        events = engine.step()
        outcome.take(events)
        steps.append({event.id for event in events if isinstance(event, Text)})
    return steps


def scripted(n_seq_max: int) -> Engine:
    backend = ScriptedBackend(n_ctx=4096, n_seq_max=n_seq_max)
    return Engine(backend, EngineSettings(headroom_bytes=0))


@pytest.mark.parametrize("n_seq_max", [1, 3, 8])
@pytest.mark.parametrize("n_before", [0, 2, 9])
def test_a_user_request_joins_every_step_despite_background_requests(
    n_seq_max: int, n_before: int
) -> None:
    alone = len(beside(scripted(n_seq_max), Outcome(), asked("user", 80)))
    engine = scripted(n_seq_max)
    outcome = with_background(engine, n_before)
    steps = beside(engine, outcome, asked("user", 80))
    assert len(steps) <= alone + 2
    others = [step for step in steps if step - {"user"}]
    assert len(others) <= 0.05 * len(steps) + 1
    engine.check_integrity()
    while engine.has_work:
        outcome.take(engine.step())
    for i in range(N_BACKGROUND):
        assert isinstance(outcome.finish(f"background {i}"), Finish)
    engine.check_integrity()


@dataclass(frozen=True)
class Job:
    """The fields of a running request that the scheduler's choice reads."""

    id: str
    background: bool
    prefilling: bool = False
    draft: tuple[int, ...] = ()


def test_background_requests_take_turns_in_the_free_rows() -> None:
    cost = StepCost()
    cost.set({1: 1.0, 2: 1.1, 4: 2.0})
    turns = BackgroundTurns(cost)
    jobs: list[Any] = [Job("user", False), *(Job(f"b{i}", True) for i in range(3))]
    seen = [{job.id for job in turns.choose_requests(jobs)} - {"user"} for _ in range(6)]
    assert [len(step) for step in seen] == [1] * 6
    assert set.union(*seen) == {"b0", "b1", "b2"}
    assert [job.id for job in urgent(jobs)] == ["user"]
    assert turns.choose_requests(jobs[1:]) == jobs[1:]
    prompt: list[Any] = [Job("user", False, prefilling=True), *jobs[1:]]
    assert [job.id for job in turns.choose_requests(prompt)] == ["user"]


def test_background_priority_does_not_change_a_real_models_answer(few_layers: Path) -> None:
    def loaded() -> Engine:
        backend = llamacpp.load(LoadSpec(str(few_layers), n_ctx=1024, n_seq_max=4))
        return Engine(backend, EngineSettings(headroom_bytes=0))

    requests = [asked("user", 24), *(asked(f"background {i}", 8, -1) for i in range(3))]
    alone = {}
    engine = loaded()
    for request in requests:
        alone[request.id] = run(engine, request).text[request.id]
    engine.close()
    engine = loaded()
    outcome = Outcome()
    for request in reversed(requests):
        outcome.take(engine.submit(request, prompt_tokens(engine, request)))
        outcome.take(engine.step())
    while engine.has_work:
        outcome.take(engine.step())
    engine.close()
    assert {r.id: outcome.text[r.id] for r in requests} == alone


@dataclass
class Clock:
    """A clock that stands still until a test increases `now_s`."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("n_seq_max", [1, 2, 8])
@pytest.mark.parametrize("n_tokens", [1, 12])
def test_endless_normal_prompts_delay_a_low_priority_request_by_half_a_minute(
    n_seq_max: int, n_tokens: int
) -> None:
    """There are always more prompts of normal priority than slots. With steps of 0.5 s, the
    low-priority request gets its first token after half a minute and ends soon after."""
    clock = Clock()
    backend = ScriptedBackend(n_ctx=4096, n_seq_max=n_seq_max)
    engine = Engine(backend, EngineSettings(headroom_bytes=0), clock=clock)
    outcome = Outcome()
    title = asked("title", n_tokens, -1)
    outcome.take(engine.submit(title, prompt_tokens(engine, title)))
    n_users = 0
    first_s = None
    while "title" not in outcome.ends:
        while n_users - (len(outcome.ends) - ("title" in outcome.ends)) <= n_seq_max:
            user = asked(f"user {n_users}", 2)
            outcome.take(engine.submit(user, prompt_tokens(engine, user)))
            n_users += 1
        clock.now_s += 0.5
        outcome.take(engine.step())
        if first_s is None and "title" in outcome.tokens:
            first_s = clock.now_s
        assert clock.now_s < 300
    assert first_s is not None
    assert first_s >= 30
    assert clock.now_s < 90
    engine.check_integrity()
