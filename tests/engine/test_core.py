"""The engine's loop with the scripted backend: order, ends, limits, text, failures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, permutations

import pytest

from engine.drive import GREEDY, Outcome, run, settle
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Prefill, Sampling
from localllm_backends.contract import Chunk, StepResult
from support.requests import request_for
from support.scripted_backend import END, ScriptedBackend, row_after


def reference(backend: ScriptedBackend, prompt: list[int], n: int) -> list[int]:
    """Return the greedy tokens after `prompt`, computed without an engine."""
    line = list(prompt)
    for _ in range(n):
        token = int(row_after(line).argmax())
        if token == END:
            break
        line.append(token)
    return line[len(prompt) :]


def test_greedy_output_is_the_models_own() -> None:
    backend = ScriptedBackend()
    engine = Engine(backend)
    outcome = run(engine, request_for("a", "hello", max_tokens=50, sampling=GREEDY))
    expected = reference(backend, backend.tokenize("hello"), 50)
    assert outcome.tokens["a"] == expected
    assert outcome.text["a"] == backend.detokenize(expected)


def test_requests_share_steps_and_do_not_disturb_each_other() -> None:
    backend = ScriptedBackend(n_ctx=1024)
    prompts = {f"r{i}": f"prompt number {i} " * (i + 1) for i in range(4)}
    outcome = run(
        Engine(backend),
        *(
            request_for(k, p, max_tokens=20, sampling=GREEDY, ignore_eos=True)
            for k, p in prompts.items()
        ),
    )
    assert any(len(step) == 4 for step in backend.steps)
    for key, prompt in prompts.items():
        alone = run(
            Engine(ScriptedBackend(n_ctx=1024)),
            request_for("x", prompt, max_tokens=20, sampling=GREEDY, ignore_eos=True),
        )
        assert outcome.tokens[key] == alone.tokens["x"]


def test_more_requests_than_sequences_all_end() -> None:
    backend = ScriptedBackend(n_ctx=2048)
    requests = [
        request_for(f"r{i}", f"question {i}", max_tokens=10, sampling=GREEDY) for i in range(20)
    ]
    outcome = run(Engine(backend), *requests)
    assert all(outcome.finish(r.id).usage.prompt_tokens == len(f"{r.prompt}") for r in requests)


def test_max_tokens_and_context_end_with_length() -> None:
    engine = Engine(ScriptedBackend(n_ctx=64))
    outcome = run(
        engine, request_for("a", "x" * 10, max_tokens=5, sampling=GREEDY, ignore_eos=True)
    )
    assert outcome.finish("a").reason == "length"
    assert outcome.finish("a").usage.completion_tokens == 5
    outcome = run(engine, request_for("b", "y" * 10, sampling=GREEDY, ignore_eos=True))
    assert outcome.finish("b").reason == "length"
    assert outcome.finish("b").usage.completion_tokens == 54


def test_max_tokens_beyond_the_context_is_reduced_to_the_free_tokens() -> None:
    asked = request_for("a", "x" * 60, max_tokens=32_000, sampling=GREEDY, ignore_eos=True)
    end = run(Engine(ScriptedBackend(n_ctx=64)), asked).finish("a")
    assert (end.reason, end.usage.completion_tokens) == ("length", 4)


@pytest.mark.parametrize(("prompt", "max_tokens"), [("x" * 64, None), ("x" * 65, 1)])
def test_a_prompt_larger_than_the_context_is_refused_at_once_with_both_counts(
    prompt: str, max_tokens: int | None
) -> None:
    backend = ScriptedBackend(n_ctx=64)
    outcome = run(Engine(backend), request_for("a", prompt, max_tokens=max_tokens))
    assert outcome.failure("a").code == "context_length_exceeded"
    assert "64" in outcome.failure("a").message
    assert str(len(prompt)) in outcome.failure("a").message
    assert not backend.steps


def test_the_queue_is_bounded() -> None:
    engine = Engine(ScriptedBackend(), EngineSettings(queue_limit=2))
    outcome = Outcome()
    for i in range(3):
        outcome.take(engine.submit(request_for(f"r{i}", "hi", max_tokens=2), [50, 51]))
    assert outcome.failure("r2").code == "server_busy"


def test_stop_strings_are_cut_and_named() -> None:
    backend = ScriptedBackend()
    text = backend.detokenize(reference(backend, backend.tokenize("go"), 60))
    stop = text[8:11]
    outcome = run(
        Engine(backend), request_for("a", "go", max_tokens=60, sampling=GREEDY, stop=(stop,))
    )
    assert outcome.text["a"] == text[: text.index(stop)]
    assert outcome.finish("a").reason == "stop"
    assert outcome.finish("a").stop == stop


def test_the_same_seed_gives_the_same_text_whatever_shares_the_batch() -> None:
    sampling = Sampling(temperature=1.0, seed=7)
    alone = run(
        Engine(ScriptedBackend()),
        request_for("a", "story", max_tokens=30, sampling=sampling, ignore_eos=True),
    )
    crowd = [
        request_for(f"x{i}", f"other {i}", max_tokens=25, sampling=Sampling(seed=i))
        for i in range(3)
    ]
    together = run(
        Engine(ScriptedBackend(n_ctx=1024)),
        *crowd,
        request_for("a", "story", max_tokens=30, sampling=sampling, ignore_eos=True),
    )
    assert together.tokens["a"] == alone.tokens["a"]


def test_cancel_ends_within_the_step_and_frees_everything() -> None:
    backend = ScriptedBackend()
    engine = Engine(backend)
    outcome = Outcome()
    outcome.take(
        engine.submit(
            request_for("a", "long story", sampling=GREEDY, ignore_eos=True, cache_prompt=False),
            [40] * 12,
        )
    )
    for _ in range(3):
        outcome.take(engine.step())
    steps = len(backend.steps)
    outcome.take(engine.cancel("a"))
    assert outcome.finish("a").reason == "cancelled"
    assert not engine.has_work
    engine.step()
    assert len(backend.steps) == steps
    assert backend.cells_free() == backend.info.n_ctx
    assert engine.cancel("a") == []


def test_a_failing_step_fails_its_requests_and_the_engine_continues() -> None:
    backend = ScriptedBackend()
    engine = Engine(backend)
    outcome = Outcome()
    outcome.take(engine.submit(request_for("a", "one", max_tokens=5), [40, 41]))
    backend.fail_next_step = "the device was lost"
    outcome.take(engine.step())
    assert outcome.failure("a").code == "backend_error"
    assert "device was lost" in outcome.failure("a").message
    run(engine, request_for("b", "two", max_tokens=5, sampling=GREEDY))
    settle(engine)


def test_a_time_limit_ends_a_request() -> None:
    now = [0.0]
    engine = Engine(ScriptedBackend(), clock=lambda: now[0])

    def tick(_: int) -> None:
        now[0] += 1.0

    outcome = run(
        engine,
        request_for("a", "x", sampling=GREEDY, ignore_eos=True, time_limit_s=3.5),
        between=tick,
    )
    assert outcome.finish("a").reason == "length"
    assert outcome.finish("a").usage.completion_tokens == 5


def test_events_arrive_in_order() -> None:
    seconds = count()
    engine = Engine(ScriptedBackend(n_batch=8), clock=lambda: float(next(seconds)))
    events = engine.submit(
        request_for("a", "z" * 30, max_tokens=2, sampling=GREEDY, ignore_eos=True), [70] * 30
    )
    while engine.has_work:
        events += engine.step()
    assert [e.kind for e in events] == ["queued", *["prefill"] * 4, "text", "text", "finish"]
    # Thirty tokens in batches of eight. The last batch is followed by the first token.
    read = [e for e in events if isinstance(e, Prefill)]
    assert [(e.done, e.total) for e in read] == [(0, 30), (8, 30), (16, 30), (24, 30)]


def test_logprobs_are_the_models_distribution() -> None:
    backend = ScriptedBackend()
    engine = Engine(backend)
    events = engine.submit(
        request_for("a", "q", max_tokens=3, sampling=GREEDY, logprobs=2, ignore_eos=True), [80]
    )
    while engine.has_work:
        events += engine.step()
    (first, *_) = [e.logprobs[0] for e in events if e.kind == "text" and e.logprobs]
    row = row_after([80]).astype(float)
    best = int(row.argmax())
    import numpy as np

    assert first.token == best
    assert first.logprob == pytest.approx(row[best] - np.log(np.exp(row).sum()))
    assert [t for _, t, _ in first.top] == list(np.argsort(-row)[:2])


def test_a_long_prompt_does_not_freeze_a_running_stream() -> None:
    """While one stream decodes, every step includes its token, and prefill runs in bounded
    chunks."""
    now = [0.0]
    backend = ScriptedBackend(n_ctx=4096, n_batch=512)
    engine = Engine(backend, clock=lambda: now[0])

    def cost() -> None:
        decode_s, token_s = 0.007, 0.0018
        sizes = [n for _, n in backend.steps[-1]]
        now[0] += decode_s + token_s * (sum(sizes) - sizes.count(1))

    step = backend.step

    def timed(chunks):  # type: ignore[no-untyped-def]
        result = step(chunks)
        cost()
        return result

    backend.step = timed  # type: ignore[method-assign]
    gaps: list[float] = []
    last = [0.0]
    outcome = Outcome()
    outcome.take(
        engine.submit(
            request_for("s", "stream", max_tokens=300, sampling=GREEDY, ignore_eos=True), [60] * 6
        )
    )
    sent = False
    while engine.has_work:
        events = engine.step()
        outcome.take(events)
        if any(e.kind == "text" and e.id == "s" for e in events):
            gaps.append(now[0] - last[0])
            last[0] = now[0]
        if not sent and len(outcome.tokens.get("s", [])) == 20:
            sent = True
            outcome.take(
                engine.submit(request_for("l", "long", max_tokens=1, sampling=GREEDY), [61] * 3000)
            )
    assert outcome.finish("l").usage.prompt_tokens == 3000
    assert max(gaps[5:]) <= 12 * 0.007


def test_an_idle_sequence_leaves_the_context_before_the_next_request_starts() -> None:
    """KV cells after those of an idle sequence would make every step of an answer more
    expensive."""
    backend = ScriptedBackend(n_ctx=4096)
    engine = Engine(backend)
    run(engine, request_for("long", "x" * 3000, max_tokens=4, sampling=GREEDY, ignore_eos=True))
    settle(engine)
    assert len(engine.pool.idle) == 1, "it stays for its next turn"
    free: list[int] = []
    step = backend.step

    def looking(chunks: Sequence[Chunk]) -> StepResult:
        free.append(backend.cells_free())
        return step(chunks)

    backend.step = looking  # type: ignore[method-assign]
    run(engine, request_for("short", "hello", max_tokens=4, sampling=GREEDY, ignore_eos=True))
    assert free[0] == 4096
    settle(engine)
    again = run(
        engine, request_for("again", "x" * 3000 + "y", max_tokens=4, sampling=GREEDY)
    ).finish("again")
    assert again.usage.cached_tokens >= 3000


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_waiting_requests_are_served_by_priority_in_any_order_of_arrival(
    order: tuple[int, ...],
) -> None:
    """All arrive within half a minute. The running request of low priority makes room, and
    continues before the waiting one of low priority."""
    tick = count()
    engine = Engine(ScriptedBackend(n_seq_max=1, n_ctx=512), clock=lambda: next(tick) / 1000)
    tiers = [0, 1, -1, 0]
    asked = [
        request_for(
            str(i),
            f"question {i}",
            max_tokens=3,
            sampling=GREEDY,
            ignore_eos=True,
            priority=tiers[i],
        )
        for i in order
    ]
    first = request_for(
        "first", "question x", max_tokens=30, sampling=GREEDY, ignore_eos=True, priority=-1
    )
    outcome = Outcome()
    outcome.take(engine.submit(first, engine.backend.tokenize("question x")))
    outcome.take(engine.step())
    for request in asked:
        outcome.take(engine.submit(request, engine.backend.tokenize(str(request.prompt))))
    while engine.has_work:
        outcome.take(engine.step())
    usual = [str(i) for i in order if tiers[i] == 0]
    assert list(outcome.ends) == ["1", *usual, "first", "2"]
