"""No token is prefilled twice, and reuse never changes an answer: for every kind of memory, random
histories and tiny caches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drive import GREEDY, Outcome, run, settle
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Prefill
from support.examples import examples
from support.requests import request_for
from support.scripted_backend import TURN, ScriptedBackend

SHAPES: dict[str, Callable[..., ScriptedBackend]] = {
    "any": lambda **k: ScriptedBackend(**k),
    "bounded": lambda **k: ScriptedBackend(rewind="bounded", rewind_tokens=16, segments=False, **k),
    "recurrent": lambda **k: ScriptedBackend(rewind="none", segments=False, **k),
    "states": lambda **k: ScriptedBackend(rewind="none", states=True, **k),
    "windows": lambda **k: ScriptedBackend(rewind="bounded", rewind_tokens=16, states=True, **k),
}


@pytest.fixture(params=SHAPES)
def make(request: pytest.FixtureRequest) -> Callable[..., ScriptedBackend]:
    return SHAPES[request.param]


def turn(text: str, fill: int = 0) -> list[int]:
    """Return one message: a control token, then the text, then `fill` more tokens."""
    return [TURN, *(3 + b for b in text.encode()), *[40] * fill]


def ask(engine: Engine, key: str, prompt: list[int], n: int = 8) -> tuple[list[int], int]:
    """Return (prompt + answer, number of cached tokens)."""
    outcome = run(engine, request_for(key, prompt, max_tokens=n, sampling=GREEDY, ignore_eos=True))
    return prompt + outcome.tokens[key], outcome.finish(key).usage.cached_tokens


def test_the_next_turn_costs_only_its_new_tokens(make: Callable[..., ScriptedBackend]) -> None:
    engine = Engine(make(n_ctx=2048))
    line, _ = ask(engine, "1", turn("system", 100) + turn("user", 50) + turn("bot"))
    for settled in (False, True):
        if settled:
            settle(engine)
        grown, cached = ask(engine, f"next-{settled}", line + turn("again", 20) + turn("bot"))
        # The answer's last token has no KV: it was sampled, but never computed.
        assert cached >= len(line) - 1
        line = grown


def test_the_same_prompt_again_costs_next_to_nothing(make: Callable[..., ScriptedBackend]) -> None:
    engine = Engine(make(n_ctx=2048))
    prompt = turn("system", 200) + turn("question") + turn("bot")
    first, cached = ask(engine, "1", prompt)
    assert cached == 0
    again, cached = ask(engine, "2", prompt)
    assert again == first
    assert cached >= len(prompt) - len(turn("bot"))


def test_a_changed_last_turn_keeps_everything_before_it(
    make: Callable[..., ScriptedBackend],
) -> None:
    engine = Engine(make(n_ctx=2048))
    head = turn("system", 200) + turn("one", 40) + turn("bot", 30)
    ask(engine, "1", head + turn("question", 20) + turn("bot"))
    settle(engine)
    _, cached = ask(engine, "2", head + turn("another", 20) + turn("bot"))
    assert cached >= len(head)


def test_interleaved_chats_sharing_a_system_prompt_prefill_nothing_twice() -> None:
    backend = ScriptedBackend(n_ctx=4096)
    engine = Engine(backend)
    system = turn("system", 500)
    lines = {k: system + turn(k, 20) + turn("bot") for k in "abc"}
    new = len(system)
    for i in range(4):
        for key, line in lines.items():
            before = backend.computed_tokens
            grown, _ = ask(engine, f"{key}{i}", line)
            new += (
                8 + len(turn(key, 20) + turn("bot"))
                if i == 0
                else 8 + len(turn("more", 20) + turn("bot"))
            )
            assert backend.computed_tokens - before < 600
            ask(engine, f"title-{key}{i}", turn("make a title", 5) + turn("bot"))
            new += 8 + len(turn("make a title", 5) + turn("bot")) if (key, i) == ("a", 0) else 9
            lines[key] = grown + turn("more", 20) + turn("bot")
    # At most one or two tokens per request beyond the new ones: an answer's last token is computed
    # in the next turn.
    assert backend.computed_tokens <= new + 3 * 4 * 2


def test_two_requests_with_one_long_prefix_compute_it_once() -> None:
    backend = ScriptedBackend(n_ctx=8192, n_batch=64)
    engine = Engine(backend)
    system = turn("system", 2000)
    run(
        engine,
        *(
            request_for(
                f"r{i}", system + turn(f"q{i}") + turn("bot"), max_tokens=4, sampling=GREEDY
            )
            for i in range(4)
        ),
    )
    assert backend.computed_tokens < len(system) + 4 * 40


def test_a_short_chat_is_not_slowed_by_a_long_idle_one() -> None:
    backend = ScriptedBackend(n_ctx=8192, n_batch=512)
    engine = Engine(backend)
    ask(engine, "long", turn("system", 4000) + turn("bot"))
    settle(engine)
    ask(engine, "short", turn("hi") + turn("bot"), n=20)
    assert backend.cells_free() > 8192 - 200, "the long prefix is still resident"
    _, cached = ask(engine, "long-again", turn("system", 4000) + turn("bot"))
    assert cached > 3990


def test_misses_are_explained() -> None:
    engine = Engine(ScriptedBackend(n_ctx=2048))
    prompt = turn("system", 100) + turn("question") + turn("bot")
    first = run(engine, request_for("1", prompt, max_tokens=2, sampling=GREEDY)).finish("1").usage
    assert "no beginning with earlier prompts" in first.cache_miss
    changed = [*prompt[:50], 99, *prompt[51:]]
    second = run(engine, request_for("2", changed, max_tokens=2, sampling=GREEDY)).finish("2").usage
    assert "token 50" in second.cache_miss
    assert second.cached_tokens == 50
    third = run(engine, request_for("3", prompt, max_tokens=2, sampling=GREEDY)).finish("3").usage
    assert third.cache_miss == ""


def test_no_kv_is_kept_of_a_request_with_cache_prompt_off(
    make: Callable[..., ScriptedBackend],
) -> None:
    engine = Engine(make(n_ctx=2048))
    prompt = turn("secret", 100) + turn("and", 30) + turn("bot")
    run(engine, request_for("1", prompt, max_tokens=2, sampling=GREEDY, cache_prompt=False))
    settle(engine)
    assert engine.pool.cache.held_bytes == 0
    _, cached = ask(engine, "2", prompt)
    assert cached == 0


def test_no_kv_is_reused_by_a_request_with_cache_prompt_off(
    make: Callable[..., ScriptedBackend],
) -> None:
    engine = Engine(make(n_ctx=2048))
    prompt = turn("system", 100) + turn("question", 30) + turn("bot")
    said, _ = ask(engine, "1", prompt)
    outcome = run(engine, request_for("2", prompt, 8, GREEDY, ignore_eos=True, cache_prompt=False))
    usage = outcome.finish("2").usage
    assert prompt + outcome.tokens["2"] == said
    assert (usage.cached_tokens, usage.cache_miss) == (0, "the request disabled the cache")
    _, cached = ask(engine, "3", [*said, *turn("more")])
    assert cached > 100, "what was cached before still is"


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_no_request_waits_for_a_prefix_that_will_not_be_shared(first: bool, second: bool) -> None:
    engine = Engine(ScriptedBackend(n_ctx=4096, n_batch=64))
    prompt = turn("system", 1000) + turn("bot")
    engine.submit(request_for("a", prompt, 2, GREEDY, cache_prompt=first), prompt)
    engine.step()
    engine.submit(request_for("b", prompt, 2, GREEDY, cache_prompt=second), prompt)
    begun = any(isinstance(event, Prefill) and event.id == "b" for event in engine.step())
    assert begun != (first and second), (
        "two that share compute the prefix once, others begin at once"
    )


def test_if_the_context_is_full_the_youngest_request_is_parked_and_later_answered() -> None:
    backend = ScriptedBackend(n_ctx=512, n_batch=64)
    engine = Engine(backend)
    requests = [
        request_for(f"r{i}", turn(f"q{i}", 30), max_tokens=300, sampling=GREEDY, ignore_eos=True)
        for i in range(3)
    ]
    outcome = run(engine, *requests)
    assert engine.metrics.parked > 0
    for request in requests:
        assert isinstance(request.prompt, list)
        alone = run(
            Engine(ScriptedBackend(n_ctx=512)),
            request_for("x", request.prompt, max_tokens=300, sampling=GREEDY, ignore_eos=True),
        )
        assert outcome.tokens[request.id] == alone.tokens["x"]


prompts = st.lists(
    st.sampled_from([turn("s", 30), turn("a", 9), turn("b", 17), turn("c", 3)]),
    min_size=1,
    max_size=5,
)


@settings(max_examples=examples(60))
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    mix=st.lists(
        st.tuples(prompts, st.integers(1, 25), st.integers(0, 12), st.booleans()),
        min_size=1,
        max_size=10,
    ),
    cache_bytes=st.sampled_from([200, 2000, 10**7]),
    n_ctx=st.sampled_from([256, 1024]),
)
def test_random_histories_change_no_answer(
    shape: str, mix: list[tuple[list[list[int]], int, int, bool]], cache_bytes: int, n_ctx: int
) -> None:
    """With arrivals at random steps, cancellations, branches and evictions, each answer equals the
    isolated one."""
    engine = Engine(SHAPES[shape](n_ctx=n_ctx, n_batch=32), EngineSettings(cache_bytes=cache_bytes))
    outcome = Outcome()
    asked: dict[str, tuple[list[int], int, bool]] = {}
    for i, (parts, n, wait, cancel) in enumerate(mix):
        prompt = [t for part in parts for t in part]
        asked[f"r{i}"] = (prompt, n, cancel)
        outcome.take(
            engine.submit(
                request_for(f"r{i}", prompt, max_tokens=n, sampling=GREEDY, ignore_eos=True), prompt
            )
        )
        for _ in range(wait):
            outcome.take(engine.step())
            engine.check_integrity()
        if cancel:
            outcome.take(engine.cancel(f"r{i}"))
    for _ in range(3000):
        if engine.has_work:
            outcome.take(engine.step())
            engine.check_integrity()
    assert not engine.has_work, "the engine does not come to an end"
    settle(engine)
    for key, (prompt, n, cancelled) in asked.items():
        assert len(outcome.ends[key]) == 1
        alone = run(
            Engine(ScriptedBackend(n_ctx=n_ctx)),
            request_for("x", prompt, max_tokens=n, sampling=GREEDY, ignore_eos=True),
        )
        expected, got = alone.tokens["x"], outcome.tokens.get(key, [])
        assert got == (expected[: len(got)] if cancelled else expected)


def test_a_long_sequence_without_a_copy_is_not_truncated_for_a_short_request() -> None:
    """A short request shares its first tokens with the long sequence. That is not worth truncating
    the rest."""
    backend = ScriptedBackend(n_ctx=2048, n_seq_max=4, rewind="none", states=True)
    engine = Engine(backend, EngineSettings(cache_bytes=0, headroom_bytes=0))
    line, _ = ask(engine, "long", [TURN, *[40] * 600, TURN])
    settle(engine)
    ask(engine, "short", [TURN, 40, *range(60, 90)])
    settle(engine)
    _, cached = ask(engine, "next", [*line, TURN, 5])
    assert cached == len(line) - 1


def test_a_turn_copies_no_more_than_its_own_tokens_and_states() -> None:
    """It does not copy the complete sequence up to three times, as indivisible snapshots would."""
    backend = ScriptedBackend(n_ctx=8192, n_seq_max=4, n_batch=256, rewind="none", states=True)
    engine = Engine(backend, EngineSettings(headroom_bytes=0))
    exported: list[int] = []
    export = backend.export_range

    def counted(sequence: int, start: int, stop: int) -> bytes:
        exported.append(stop - start)
        return export(sequence, start, stop)

    backend.export_range = counted  # type: ignore[method-assign]
    line, _ = ask(engine, "first", [TURN, *[40] * 3000, TURN])
    settle(engine)
    for n in range(4):
        exported.clear()
        line, cached = ask(engine, f"turn {n}", [*line, TURN, *[50 + n] * 60, TURN])
        settle(engine)
        assert cached > 3000
        assert sum(exported) < 100


def test_an_edit_within_a_history_recomputes_only_later_tokens() -> None:
    """This also holds if the prompt arrived as a whole and the position of the edit was unknown."""
    backend = ScriptedBackend(n_ctx=16384, n_seq_max=4, n_batch=256, rewind="none", states=True)
    engine = Engine(backend, EngineSettings(headroom_bytes=0))
    history = [token for n in range(40) for token in (TURN, *[60 + n] * 149)]
    ask(engine, "first", [*history, TURN])
    settle(engine)
    for at in (3000, 1500, 4500):
        _, cached = ask(engine, f"edit {at}", [*history[:at], TURN, 5, *history[at + 20 :], TURN])
        settle(engine)
        assert at - cached <= 512 + 150
    # A later edit at the same position reuses everything before it.
    _, cached = ask(engine, "again", [*history[:3000], TURN, 6, *history[3020:], TURN])
    assert cached >= 3000
