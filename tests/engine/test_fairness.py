"""Tenants share an engine evenly: a tenant with 200 queued long requests does not delay another
tenant's short chat."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drive import GREEDY, Outcome, prompt_tokens, run
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Finish, Generation, Request, Text
from localllm.engine.scheduler import CREDIT_TOKENS, Shares
from localllm_backends.contract import LoadSpec
from support.examples import examples
from support.scripted_backend import ScriptedBackend

LONG = "a long text that goes on and on " * 8


def asked(id_: str, prompt: str, tenant: str, n_tokens: int, **more: int) -> Request:
    generation = Generation(
        sampling=GREEDY, max_tokens=n_tokens, tenant=tenant, ignore_eos=True, **more
    )
    return Request(id_, prompt, generation)


def crowded(engine: Engine, n: int, n_tokens: int = 400, n_steps: int = 40) -> Outcome:
    """Queue `n` long requests of the tenant `greedy`, run some steps, and return the outcome."""
    outcome = Outcome()
    for i in range(n):
        request = asked(f"greedy {i}", f"{i} {LONG}", "greedy", n_tokens)
        outcome.take(engine.submit(request, prompt_tokens(engine, request)))
    for _ in range(n_steps):
        outcome.take(engine.step())
    return outcome


def steps_to_first_token(
    engine: Engine, outcome: Outcome, request: Request, most: int = 400
) -> int:
    outcome.take(engine.submit(request, prompt_tokens(engine, request)))
    for n in range(1, most):
        events = engine.step()
        outcome.take(events)
        if any(isinstance(e, Text) and e.id == request.id for e in events):
            return n
    raise AssertionError("no token came")


def drain(engine: Engine, outcome: Outcome, most: int = 100_000) -> None:
    for _ in range(most):
        if not engine.has_work:
            return
        outcome.take(engine.step())
    raise AssertionError("the engine does not come to an end")


def scripted(**settings_: int) -> Engine:
    backend = ScriptedBackend(n_ctx=4096, n_seq_max=8)
    return Engine(backend, EngineSettings(queue_limit=256, headroom_bytes=0, **settings_))


def test_a_short_chat_waits_one_step_despite_two_hundred_long_requests() -> None:
    """All slots are taken and 192 requests wait. The newcomer joins the next step, so it needs at
    most one step more than alone."""
    prompt = "a short question?"
    alone = steps_to_first_token(scripted(), Outcome(), asked("b", prompt, "other", 8))
    engine = scripted()
    outcome = crowded(engine, 200)
    assert len(engine.jobs.running) == 8
    assert steps_to_first_token(engine, outcome, asked("b", prompt, "other", 8)) <= alone + 1
    engine.check_integrity()
    for _ in range(20):
        outcome.take(engine.step())
    assert isinstance(outcome.finish("b"), Finish)


def test_prompts_of_a_new_tenant_are_prefilled_first() -> None:
    """No request decodes yet; all are prefilling long prompts."""
    engine = scripted()
    outcome = crowded(engine, 20, n_steps=1)
    request = asked("b", "x" * 60, "other", 4)
    assert steps_to_first_token(engine, outcome, request) <= 3


def test_a_tenants_tokens_from_before_others_arrived_do_not_count() -> None:
    """Tokens from a time when no other tenant had requests do not count against a newcomer."""
    engine = scripted()
    for i in range(8):
        run(engine, asked(f"before {i}", f"earlier {i} {LONG}", "other", 40))
    outcome = crowded(engine, 8, n_steps=1)
    request = asked("b", "x" * 60, "other", 4)
    assert steps_to_first_token(engine, outcome, request) <= 4


def test_cached_prefixes_of_a_newcomer_come_before_those_of_a_crowd() -> None:
    """All requests import KV from the cache while one request decodes."""
    engine = scripted()
    outcome = crowded(engine, 8, n_tokens=4, n_steps=0)
    drain(engine, outcome)
    run(engine, asked("a", "a question with a long beginning", "other", 4))
    crowd = crowded(engine, 60, n_tokens=4, n_steps=0)
    drain(engine, crowd)
    one = asked("decoding", "y", "greedy", 400)
    outcome.take(engine.submit(one, prompt_tokens(engine, one)))
    for _ in range(5):
        outcome.take(engine.step())
    for i in range(7):
        request = asked(f"again {i}", f"{i} {LONG}", "greedy", 40)
        outcome.take(engine.submit(request, prompt_tokens(engine, request)))
    outcome.take(engine.step())
    newcomer = asked("b", "a question with a long beginning", "other", 1)
    restored = engine.pool.restored_tokens
    n = steps_to_first_token(engine, outcome, newcomer)
    assert engine.pool.restored_tokens > restored
    assert n <= 2


@pytest.mark.parametrize(("tenant", "most"), [("", 128), ("named", 64)])
def test_prefill_steps_of_one_tenant_are_short_enough_for_another_to_wait(
    tenant: str, most: int
) -> None:
    """128 tokens take longer than the target duration of a step, but less than its limit."""
    backend = ScriptedBackend(n_ctx=4096, n_seq_max=8, n_batch=128)
    ticks = itertools.count(0.0, 0.2)
    engine = Engine(backend, EngineSettings(headroom_bytes=0), clock=lambda: next(ticks))
    read = []
    for i in range(6):
        request = asked(f"r{i}", f"{i} {LONG}", tenant, 1)
        engine.submit(request, prompt_tokens(engine, request))
    while engine.has_work:
        before = engine.metrics.prefilled_tokens
        engine.step()
        read.append(engine.metrics.prefilled_tokens - before)
    assert max(read[2:]) == most


def test_a_short_prompt_does_not_wait_for_a_long_one_on_a_slow_machine() -> None:
    """Both requests have the same tenant, and 128 tokens take longer than the age that the order
    takes into account."""
    ticks = itertools.count(0.0, 1.0)
    backend = ScriptedBackend(n_ctx=4096, n_seq_max=8, n_batch=128)
    engine = Engine(backend, EngineSettings(headroom_bytes=0), clock=lambda: next(ticks))
    outcome = Outcome()
    long = asked("long", "x" * 3000, "", 4)
    outcome.take(engine.submit(long, prompt_tokens(engine, long)))
    for _ in range(5):
        outcome.take(engine.step())
    assert steps_to_first_token(engine, outcome, asked("b", "a short question?", "", 1)) <= 2


def test_a_request_parked_for_another_tenant_keeps_its_answer() -> None:
    alone = run(scripted(), asked("greedy 7", f"7 {LONG}", "greedy", 60))
    engine = scripted()
    outcome = crowded(engine, 12, n_tokens=60, n_steps=20)
    for i in range(4):
        request = asked(f"b{i}", f"question {i}", "other", 6)
        outcome.take(engine.submit(request, prompt_tokens(engine, request)))
    drain(engine, outcome)
    engine.check_integrity()
    assert engine.metrics.parked > 0
    assert outcome.tokens["greedy 7"] == alone.tokens["greedy 7"]
    assert {i: len(e) for i, e in outcome.ends.items()} == dict.fromkeys(outcome.ends, 1)
    assert len(outcome.ends) == 16


def test_two_busy_tenants_get_equal_shares() -> None:
    engine = scripted()
    outcome = crowded(engine, 16, n_tokens=80, n_steps=1)
    for i in range(16):
        request = asked(f"other {i}", f"{i} {LONG}", "other", 80)
        outcome.take(engine.submit(request, prompt_tokens(engine, request)))
    for _ in range(160):
        outcome.take(engine.step())
    said = {
        t: sum(len(x) for i, x in outcome.tokens.items() if i.startswith(t))
        for t in ("greedy", "other")
    }
    assert min(said.values()) >= 0.6 * max(said.values()), said
    assert engine.metrics.parked <= 12


@pytest.mark.parametrize("n_steps", [0, 1, 7])
@pytest.mark.parametrize("n_choices", [2, 8, 16])
def test_choices_of_one_request_make_room_for_a_newcomer(n_choices: int, n_steps: int) -> None:
    """The choices make room for any newcomer as requests of one tenant do for another tenant."""
    engine = scripted()
    outcome = Outcome()
    for i in range(n_choices):
        generation = Generation(sampling=GREEDY, max_tokens=400, ignore_eos=True, choices_of="one")
        request = Request(f"choice {i}", LONG, generation)
        outcome.take(engine.submit(request, prompt_tokens(engine, request)))
    for _ in range(n_steps):
        outcome.take(engine.step())
    newcomer = asked("b", "a short question?", "", 1)
    assert steps_to_first_token(engine, outcome, newcomer) <= 2
    engine.check_integrity()


@pytest.mark.parametrize("had", [0, CREDIT_TOKENS // 2, CREDIT_TOKENS])
def test_a_request_of_a_heavy_tenant_gets_a_slot_before_further_choices(had: int) -> None:
    """A request without a slot comes before the next choice of another request, even if that choice
    is due by token count."""
    engine = scripted()
    outcome = Outcome()
    busy = asked("busy", "a question", "", CREDIT_TOKENS)
    outcome.take(engine.submit(busy, prompt_tokens(engine, busy)))
    for _ in range(had):
        outcome.take(engine.step())
    for i in range(16):
        generation = Generation(sampling=GREEDY, max_tokens=400, ignore_eos=True, choices_of="one")
        request = Request(f"choice {i}", LONG, generation)
        outcome.take(engine.submit(request, prompt_tokens(engine, request)))
    outcome.take(engine.step())
    outcome.take(engine.cancel("busy"))
    newcomer = asked("b", "a short question?", "", 1)
    assert steps_to_first_token(engine, outcome, newcomer) <= 10
    engine.check_integrity()


def test_choices_get_no_more_than_the_share_of_their_tenant() -> None:
    """For any number of such requests of one tenant, the other tenant gets its half."""
    shares = Shares()
    for i in range(8):
        shares.add_requester(("greedy", f"request {i}"))
        shares.charge(("greedy", f"request {i}"), 100)
    shares.add_requester(("other", ""))
    running = [("greedy", f"request {i}") for i in range(8)]
    assert shares.unit_to_preempt(("other", ""), running) == ("greedy",)
    assert shares.tokens_computed(("greedy", "request 1")) == 800


def test_a_full_queue_refuses_only_the_tenant_that_filled_it() -> None:
    engine = Engine(ScriptedBackend(n_ctx=4096), EngineSettings(queue_limit=2, headroom_bytes=0))
    outcome = crowded(engine, 4, n_tokens=9, n_steps=0)
    assert outcome.failure("greedy 3").code == "server_busy"
    request = asked("b", "hi", "other", 2)
    assert steps_to_first_token(engine, outcome, request) <= 2


def test_low_priority_requests_wait_for_normal_ones_of_every_tenant() -> None:
    engine = scripted()
    outcome = crowded(engine, 20)
    request = asked("b", "hi", "other", 4, priority=-1)
    outcome.take(engine.submit(request, prompt_tokens(engine, request)))
    for _ in range(20):
        outcome.take(engine.step())
    assert "b" not in outcome.text


Events = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 5000), st.booleans()), max_size=60
)


@given(Events)
@settings(max_examples=examples(60))
def test_an_absent_tenant_gains_at_most_the_credit_limit(
    events: list[tuple[str, int, bool]],
) -> None:
    shares = Shares()
    here: set[str] = set()
    for tenant, tokens, leaves in events:
        if tenant not in here and here:
            least = min(shares.computed[t] for t in here)
            shares.add_requester(tenant)
            assert shares.computed[tenant] >= least - CREDIT_TOKENS
        shares.add_requester(tenant)
        here.add(tenant)
        shares.charge(tenant, tokens)
        if leaves:
            here.discard(tenant)
            shares.keep_only(here)
        assert shares.shared == (len(here) > 1)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=16), st.sampled_from("abcde"))
def test_a_preempted_tenant_cannot_preempt_the_newcomer_back(
    running: list[str], newcomer: str
) -> None:
    """The tenant that gave up a slot would not get it back at once."""
    shares = Shares()
    for tenant in (*running, newcomer):
        shares.add_requester(tenant)
    gives = shares.unit_to_preempt(newcomer, running)
    if gives is not None:
        after = [*running, newcomer]
        after.remove(gives)
        assert shares.unit_to_preempt(gives, after) != newcomer


@pytest.mark.long
def test_smollm2_serves_a_short_chat_during_two_hundred_long_requests(smollm2: Path) -> None:
    from localllm_backends.llamacpp import backend_type as llamacpp

    def engine() -> Engine:
        return Engine(
            llamacpp.load(LoadSpec(path=str(smollm2), n_ctx=8192, n_seq_max=8)),
            EngineSettings(queue_limit=256, headroom_bytes=0),
        )

    prompt = "<|im_start|>user\nName the capital of France.<|im_end|>\n<|im_start|>assistant\n"
    lone = engine()
    alone = steps_to_first_token(lone, Outcome(), asked("b", prompt, "other", 8))
    lone.close()
    busy = engine()
    outcome = crowded(busy, 200, n_steps=60)
    steps = steps_to_first_token(busy, outcome, asked("b", prompt, "other", 8))
    busy.close()
    print(f"steps to the first token: {alone} alone, {steps} beside 200 queued requests")
    assert steps <= alone + 1
