"""The composition of a step: invariants of the scheduler for any mix of requests."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.scheduler import (
    Grant,
    Limits,
    StepDemand,
    admission_order,
    arrival,
    plan_step,
)
from localllm.engine.step_costs import PROMPT_STEP_S, SINGLE_STEP_S, STALL_RATIO, ChunkSizer

TINY = 16  # a prompt with at most this many tokens left is as urgent as a decoding stream


@st.composite
def wants(draw: st.DrawFn) -> list[StepDemand]:
    n = draw(st.integers(0, 12))
    found = []
    for i in range(n):
        prefill = draw(st.integers(0, 3000))
        decode = 0 if prefill else draw(st.integers(1, 17))
        found.append(StepDemand(f"r{i}", prefill, decode, draw(st.floats(0, 100))))
    return found


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    n_batch = draw(st.integers(32, 512))
    return Limits(
        n_batch,
        draw(st.integers(16, 64)),
        draw(st.integers(16, n_batch)),
        draw(st.integers(min(128, n_batch), n_batch)),
    )


@given(wants(), limits())
def test_a_step_keeps_its_limits_and_grants_only_requested_tokens(
    asked: list[StepDemand], within: Limits
) -> None:
    by_key = {w.key: w for w in asked}
    grants = plan_step(asked, within)
    assert len({g.key for g in grants}) == len(grants)
    assert sum(g.n_tokens for g in grants) <= within.n_batch
    rows = 0
    for g in grants:
        want = by_key[g.key]
        assert 1 <= g.n_tokens <= (want.prefill or want.decode)
        assert g.prefill == bool(want.prefill)
        rows += (g.n_tokens == want.prefill) if g.prefill else g.n_tokens
    assert rows <= within.n_outputs


@given(wants(), limits())
def test_every_decoding_request_gets_a_token_and_no_step_is_empty(
    asked: list[StepDemand], within: Limits
) -> None:
    grants = plan_step(asked, within)
    decoding = [w for w in asked if not w.prefill]
    assert {g.key for g in grants} >= {w.key for w in decoding}
    assert bool(grants) == bool(asked)


@given(wants(), limits())
def test_prefill_in_a_step_is_limited_by_the_other_requests(
    asked: list[StepDemand], within: Limits
) -> None:
    grants = plan_step(asked, within)
    by_key = {w.key: w for w in asked}
    long = sum(g.n_tokens for g in grants if g.prefill and by_key[g.key].prefill > TINY)
    if any(not g.prefill for g in grants):
        assert long <= within.chunk
    else:
        assert sum(g.n_tokens for g in grants) <= within.prompt_only


def test_age_beats_length() -> None:
    """The shortest prompt goes first, until another one has waited half a minute."""
    fresh = [StepDemand("long", 2000, 0, 1.0), StepDemand("short", 100, 0, 0.0)]
    aged = [StepDemand("long", 2000, 0, 30.0), StepDemand("short", 100, 0, 0.0)]
    within = Limits(128, 8, 128, 128)
    assert plan_step(fresh, within)[0] == Grant("short", 100, prefill=True)
    assert Grant("long", 64, prefill=True) in plan_step(aged, within)
    assert admission_order(
        [StepDemand("long", 2000, 0, 1.0), StepDemand("short", 100, 0, 0.0)]
    ) == [
        "short",
        "long",
    ]
    assert admission_order(
        [StepDemand("long", 2000, 0, 30.0), StepDemand("short", 100, 0, 0.0)]
    ) == [
        "long",
        "short",
    ]


@given(st.integers(0, 120), st.integers(1, 4000), st.integers(1, 4000))
def test_the_oldest_and_the_shortest_prompt_are_both_in_the_step(
    waited_s: int, long: int, short: int
) -> None:
    """On a slow machine, a prompt's prefill takes longer than any allowance for age."""
    demands = [StepDemand("long", short + long, 0, waited_s), StepDemand("short", short, 0, 0.0)]
    got = {g.key: g.n_tokens for g in plan_step(demands, Limits(128, 8, 128, 128))}
    assert got["short"] >= min(short, 64)
    long_is_first = waited_s * 500 > long
    if long_is_first and short > TINY:
        assert got["long"] >= min(short + long, 64)


@pytest.mark.parametrize("streams", [0, 3])
def test_a_prompt_is_computed_without_prompts_of_a_later_tenant(streams: int) -> None:
    """The newcomer's first token comes after as many tokens as if it were alone."""
    decoding = [StepDemand(f"stream {i}", 0, 1, 0.0, 9000) for i in range(streams)]
    crowd = [StepDemand(f"crowd {i}", 40 + i, 0, 9.0, 9000) for i in range(5)]
    newcomer = StepDemand("newcomer", 70, 0, 0.0, 100)
    demands = [*decoding, *crowd, newcomer]
    grants = plan_step(demands, Limits(512, 16, 100, 128))
    assert grants[streams:] == [Grant("newcomer", 70, prefill=True)]
    with_others = plan_step(demands, Limits(512, 16, 100, 128, joining=24))
    assert with_others[streams:] == [*grants[streams:], Grant("crowd 0", 24, prefill=True)]
    long = plan_step(
        [*decoding, *crowd, StepDemand("long", 700, 0, 0.0, 100)], Limits(512, 16, 100, 128)
    )
    assert [g.key for g in long[streams:]] == ["long"]


def test_a_low_priority_prompt_gets_no_tokens_of_a_full_step() -> None:
    demands = [StepDemand("long", 2000, 0, 1.0), StepDemand("later", 30, 0, -29.0)]
    assert plan_step(demands, Limits(128, 8, 128, 128)) == [Grant("long", 128, prefill=True)]


def test_a_single_prompt_uses_the_full_batch_only_on_a_fast_machine() -> None:
    """A machine that prefills 2,000 tokens/s uses full batches. A machine with 100 tokens/s never
    blocks for seconds."""
    fast, slow = ChunkSizer(512), ChunkSizer(512)
    assert fast.prompt_tokens(0.35) == slow.prompt_tokens(1.0) == 128  # no speed is known yet
    for n_tokens in (128, 256, 512):
        fast.observe(decoded=0, prefilled=n_tokens, seconds=n_tokens / 2000)
    slow.observe(decoded=0, prefilled=128, seconds=128 / 100)
    assert fast.prompt_tokens(0.35) == 512
    assert slow.prompt_tokens(0.35) == slow.prompt_tokens(1.0) == 128
    middle = ChunkSizer(512)
    for n_tokens in (128, 256, 128, 256):
        middle.observe(decoded=0, prefilled=n_tokens, seconds=n_tokens / 700)
    assert middle.prompt_tokens(0.35) == 192, "no tile of the attention is filled in part"
    assert middle.prompt_tokens(1.0) == 512


def test_steps_are_shorter_if_another_tenant_may_wait_for_them() -> None:
    sizer, fast = ChunkSizer(512), ChunkSizer(512)
    sizer.observe(decoded=0, prefilled=128, seconds=0.6)
    fast.observe(decoded=0, prefilled=128, seconds=0.1)
    assert sizer.prompt_tokens(PROMPT_STEP_S) == 128
    assert sizer.prompt_tokens(PROMPT_STEP_S, several_keys=True) == 64
    assert sizer.prompt_tokens(SINGLE_STEP_S, several_keys=True) > 128
    assert fast.prompt_tokens(PROMPT_STEP_S, several_keys=True) > 128
    assert sizer.prompt_tokens(0.0, several_keys=True) == 128, "the same bits again"


@pytest.mark.parametrize("token_s", [0.0005, 0.002, 0.004, 0.012, 0.03])
def test_a_newcomer_waits_two_seconds_at_most_for_a_step_of_one_prompt(token_s: float) -> None:
    sizer = ChunkSizer(4096)
    for _ in range(20):
        sizer.observe(decoded=0, prefilled=128, seconds=128 * token_s)
    assert sizer.prompt_tokens(SINGLE_STEP_S) * token_s <= 2.0


def test_a_prefill_step_during_decoding_takes_at_most_seven_decode_steps() -> None:
    sizer = ChunkSizer(512)
    sizer.observe(decoded=1, prefilled=0, seconds=0.01)
    sizer.observe(decoded=0, prefilled=128, seconds=0.128)
    assert 0.9 <= (1 + sizer.chunk) * 0.001 / (STALL_RATIO * 0.01) <= 1.1


def test_a_prompt_that_gets_dearer_with_depth_stays_within_its_steps() -> None:
    """Each token costs more at greater depth because of attention. The sizer soon forgets the lower
    costs at smaller depth."""
    sizer, depth, worst = ChunkSizer(512), 0, 0.0
    sizer.observe(decoded=1, prefilled=0, seconds=0.08)
    while depth < 3000:
        chunk = sizer.chunk
        seconds = 0.08 + chunk * (0.0035 + 0.000005 * depth)
        sizer.observe(decoded=1, prefilled=chunk, seconds=seconds)
        depth += chunk
        worst = max(worst, seconds / 0.08)
    assert worst < 1.25 * STALL_RATIO


def test_one_slow_decode_step_allows_no_larger_stall() -> None:
    """The step in which a batch forms takes ten times as long as those before and after it."""
    sizer = ChunkSizer(512)
    sizer.observe(decoded=0, prefilled=128, seconds=1.28)
    for _ in range(3):
        sizer.observe(decoded=1, prefilled=0, seconds=0.08)
    before = sizer.chunk
    sizer.observe(decoded=2, prefilled=0, seconds=0.8)
    assert sizer.chunk <= 1.25 * before
    sizer.observe(decoded=2, prefilled=0, seconds=0.08)
    assert sizer.chunk <= 1.1 * before


def test_slower_decoding_that_lasts_is_learned() -> None:
    """More streams make decode steps permanently more expensive, and the chunks grow
    accordingly."""
    sizer = ChunkSizer(512)
    sizer.observe(decoded=0, prefilled=128, seconds=1.28)
    sizer.observe(decoded=1, prefilled=0, seconds=0.08)
    for _ in range(20):
        sizer.observe(decoded=8, prefilled=0, seconds=0.16)
    assert sizer.chunk >= 0.95 * (STALL_RATIO - 1) * 0.16 / 0.01


@given(st.floats(0.001, 1.0), st.floats(0.0, 20.0))
def test_a_slice_leaves_time_for_the_next_step_but_has_a_minimum_length(
    decode_s: float, last_steps: float
) -> None:
    sizer = ChunkSizer(512)
    assert 0.0 < sizer.slice_s(0.0) < 0.1, "before anything is known: a moment"
    sizer.observe(decoded=1, prefilled=0, seconds=decode_s)
    whole = sizer.slice_s(0.0)
    slice_s = sizer.slice_s(last_steps * decode_s)
    assert 5 * decode_s <= slice_s + 1e-9
    assert slice_s + last_steps * decode_s <= max(whole, (5 + last_steps) * decode_s) + 1e-9
    assert whole < 12 * decode_s


Asked = tuple[float, int, float]
"""Seconds after the one before it, priority, seconds it takes."""


@given(
    st.lists(
        st.tuples(st.floats(0, 20), st.integers(-1, 1), st.floats(0.1, 20)), min_size=1, max_size=30
    ),
    st.randoms(),
)
def test_higher_priority_is_first_and_no_request_is_overtaken_forever(
    asked: list[Asked], chance: random.Random
) -> None:
    """One server, requests of equal work. The next one is the waiting request with the earliest
    arrival, where one level of priority counts as 30 s. So no request is overtaken by one that
    arrived more than 30 s per level later."""
    came: list[tuple[float, int, float]] = []
    now = 0.0
    for gap, priority, takes in asked:
        now += gap
        came.append((now, priority, takes))
    pending, served, now = list(range(len(came))), [], 0.0
    while pending:
        waiting = [i for i in pending if came[i][0] <= now]
        if not waiting:
            now = min(came[i][0] for i in pending)
            continue
        chance.shuffle(waiting)
        first, *_ = admission_order(
            [StepDemand(str(i), 100, 0, now - arrival(came[i][0], came[i][1])) for i in waiting]
        )
        assert came[int(first)][0] - 30 * came[int(first)][1] == pytest.approx(
            min(came[i][0] - 30 * came[i][1] for i in waiting), abs=1e-6
        )
        served.append(int(first))
        pending.remove(int(first))
        now += came[int(first)][2]
    place = {i: n for n, i in enumerate(served)}
    for i, (at, priority, _) in enumerate(came):
        passed_by = [j for j in range(len(came)) if came[j][0] > at + 1e-6 and place[j] < place[i]]
        for j in passed_by:
            assert came[j][1] > priority
            assert came[j][0] - at <= 30 * (came[j][1] - priority) + 1e-6


def test_a_faster_device_uses_larger_prefill_steps_when_no_stream_decodes() -> None:
    for tok_s, most in ((2000.0, 2048), (300.0, 1152), (50.0, 512)):
        sizer = ChunkSizer(2048, on_device=True)
        assert sizer.prompt_tokens(PROMPT_STEP_S) == 512, "before its speed is known"
        for n_tokens in (512, 1024) * 8:
            sizer.observe(decoded=0, prefilled=n_tokens, seconds=n_tokens / tok_s)
        assert sizer.prompt_tokens(PROMPT_STEP_S) == pytest.approx(most, abs=64)
        assert sizer.prompt_tokens(PROMPT_STEP_S) % 64 == 0
    assert ChunkSizer(2048).prompt_tokens(PROMPT_STEP_S) == 128, "a processor's"


@given(
    fixed_s=st.floats(0.0, 0.02),
    token_s=st.floats(1e-5, 1e-3),
    streams=st.integers(1, 32),
    unlucky=st.floats(1.0, 10.0),
)
def test_a_chunk_is_as_large_as_a_step_s_gap_allows_whatever_its_fixed_part(
    fixed_s: float, token_s: float, streams: int, unlucky: float
) -> None:
    """This also holds if the first steps took longer than all later ones: the chunks do not stay
    small."""

    def takes(n_tokens: int) -> float:
        return fixed_s + n_tokens * token_s

    sizer = ChunkSizer(2048, on_device=True, gap_s=0.02)
    for _ in range(5):
        sizer.observe(decoded=streams, prefilled=0, seconds=takes(streams))
    for n in range(60):
        chunk, longer = sizer.chunk, unlucky if n < 2 else 1.0
        sizer.observe(decoded=streams, prefilled=chunk, seconds=longer * takes(streams + chunk))
    allowed_s = takes(streams) + max(0.02, takes(streams))
    right = min(2048, (allowed_s - fixed_s) / token_s - streams)
    assert 0.85 * right - 8 <= sizer.chunk <= max(16, 1.1 * right + 8)
