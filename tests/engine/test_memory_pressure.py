"""When memory runs short the prefix cache gives memory back first, and the engine admits only
requests that it can serve."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drive import GREEDY, Outcome, prompt_tokens, run, settle
from localllm.engine import EngineSettings
from localllm.engine.cache.eviction import Block
from localllm.engine.cache.tree import PrefixCache
from localllm.engine.core import Engine
from localllm.engine.messages import Failure, Finish, Request
from localllm_backends.contract import MemoryReport
from support.examples import examples
from support.machine_memory import HEADROOM, MB, Machine
from support.requests import request_for
from support.scripted_backend import ScriptedBackend

# --- the cache gives memory back ------------------------------------------------------------------


@dataclass(eq=False)
class FiledBlock(Block):
    """A block with a copy on disk; it can be demoted once."""

    demoted: bool = False

    def demote(self) -> bool:
        self.demoted = True
        return True

    @property
    def held_bytes(self) -> int:
        return 0 if self.demoted else self.size_bytes


def put(cache: PrefixCache, line: list[int], *, filed: bool = False, size: int = 10) -> bool:
    start = 0 if cache.indivisible else cache.peek(line).length
    return start < len(line) and cache.insert(
        line, (FiledBlock if filed else Block)(bytes(size), start, len(line))
    )


def test_the_least_recently_used_block_is_evicted_first_and_used_blocks_stay() -> None:
    cache = PrefixCache(capacity_bytes=1000)
    for line in ([1, 2], [1, 2, 3], [5, 6], [7, 8]):
        put(cache, line)
    cache.match([1, 2, 3])
    assert cache.budget.shrink(15) == 20
    assert [cache.peek(line).length for line in ([1, 2, 3], [5, 6], [7, 8])] == [3, 0, 0]
    assert cache.budget.shrink(10) == 10
    # from the end: a prefix is useful without its continuation, but not the reverse
    assert cache.peek([1, 2, 3]).length == 2
    cache.check_integrity()


def test_shrinking_keeps_the_disk_copies_of_a_complete_path() -> None:
    cache = PrefixCache(capacity_bytes=1000)
    for n in (2, 4, 6):
        put(cache, list(range(n)), filed=True)
    assert cache.budget.shrink(30) == 30
    assert cache.held_bytes == 0
    assert cache.peek(list(range(6))).length == 6
    cache.check_integrity()


def test_shrinking_keeps_a_block_on_disk_after_evicting_its_parent() -> None:
    cache = PrefixCache(capacity_bytes=1000)
    put(cache, [1, 2])
    put(cache, [1, 2, 3], filed=True)
    assert cache.budget.shrink(20) == 20
    assert cache.peek([1, 2, 3]).length == 0
    assert cache.peek([1, 2, 3]).saved == 1
    cache.check_integrity()


line_lists = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=10), st.booleans()), max_size=20
)


@given(line_lists, st.booleans(), st.integers(0, 300), st.lists(st.integers(0, 2), max_size=10))
def test_shrinking_frees_the_requested_bytes_or_all_unlocked_blocks(
    stored: list[tuple[list[int], bool]], whole: bool, ask: int, held_line: list[int]
) -> None:
    cache = PrefixCache("state" if whole else "kv", capacity_bytes=10**6)
    for line, filed in stored:
        put(cache, line, filed=filed)
    match = cache.match(held_line)
    cache.lock(match)
    before = cache.held_bytes
    freed = cache.budget.shrink(ask)
    cache.check_integrity()
    assert freed == before - cache.held_bytes
    possible = freed + cache.budget.shrink(before)
    assert freed >= min(ask, possible)
    # All remaining blocks are on the path to the locked prefix.
    assert cache.held_bytes <= 10 * match.length
    assert cache.match(held_line).length == match.length
    cache.unlock(match)
    assert cache.budget.shrink(before) + possible == before
    assert cache.held_bytes == 0
    cache.check_integrity()


# --- the engine under pressure --------------------------------------------------------------------


class KvAtLoad(ScriptedBackend):
    """A backend that allocates its KV with the model, as llama.cpp does. The plain scripted
    backend's KV grows, as MLX's does."""

    def memory(self) -> MemoryReport:
        return MemoryReport(0, 1000, 0, 0, 0)


def ask(name: str, text: str = "", n: int = 8) -> Request:
    return request_for(
        name,
        text or f"a story about {name} and the sea",
        max_tokens=n,
        sampling=GREEDY,
        ignore_eos=True,
    )


def test_under_pressure_a_cache_frees_the_missing_bytes_and_grows_again_later() -> None:
    machine = Machine()
    engine = machine.engine(KvAtLoad(n_ctx=1024))
    run(engine, *(ask(str(i)) for i in range(6)))
    settle(engine)
    held, full = engine.pool.cache.held_bytes, engine.pool.cache.budget.capacity_bytes
    assert held > 100
    free = HEADROOM - 50
    machine.available = engine.guard.available = lambda: free  # type: ignore[method-assign]
    machine.now += 1
    engine.idle()
    shrunk = engine.pool.cache.held_bytes
    assert 50 <= held - shrunk < held
    snapshot = engine.snapshot()
    assert (snapshot["pressure"], snapshot["available_bytes"]) == ("shrink", HEADROOM - 50)
    free = 110 * MB  # enough, but without the margin of a quarter: no growth yet
    run(engine, *(ask(f"more {i}") for i in range(4)))
    settle(engine)
    assert engine.pool.cache.held_bytes <= shrunk
    free = 1000 * MB
    run(engine, *(ask(f"most {i}") for i in range(4)))
    settle(engine)
    assert engine.pool.cache.held_bytes > shrunk
    assert engine.snapshot()["cache_capacity_bytes"] == full
    assert engine.snapshot()["pressure"] == "none"


def most_at_once(engine: Engine, *requests: Request) -> tuple[int, Outcome]:
    most = 0

    def look(_: int) -> None:
        nonlocal most
        most = max(most, int(engine.snapshot()["running"]))

    outcome = run(engine, *requests, between=look)
    return most, outcome


def test_with_kv_allocated_at_load_admission_is_never_refused_for_memory() -> None:
    most, outcome = most_at_once(
        Machine(40).engine(KvAtLoad(n_ctx=1024)), *(ask(str(i)) for i in range(4))
    )
    assert most == 4
    assert all(isinstance(outcome.finish(str(i)), Finish) for i in range(4))


def test_with_growing_kv_requests_wait_under_pressure_and_all_are_served() -> None:
    machine = Machine()
    engine = machine.engine(ScriptedBackend(n_ctx=1024))
    requests = [ask(str(i)) for i in range(4)]
    outcome = Outcome()
    outcome.take(engine.submit(requests[0], prompt_tokens(engine, requests[0])))
    outcome.take(engine.step())
    machine.free_mb = 40
    for request in requests[1:]:
        outcome.take(engine.submit(request, prompt_tokens(engine, request)))
    while "0" not in outcome.ends:
        outcome.take(engine.step())
        assert len(engine.jobs.running) <= 1
    machine.free_mb = 1000
    while engine.has_work:
        outcome.take(engine.step())
    plain, expected = most_at_once(
        Machine().engine(ScriptedBackend(n_ctx=1024)), *(ask(str(i)) for i in range(4))
    )
    assert plain == 4
    assert outcome.tokens == expected.tokens
    assert all(isinstance(outcome.finish(str(i)), Finish) for i in range(4))


def test_running_requests_continue_under_memory_pressure() -> None:
    machine = Machine()
    engine = machine.engine(KvAtLoad(n_ctx=1024))
    seen: list[int] = []

    def between(n: int) -> None:
        machine.free_mb = 1000 if n < 4 else 10
        seen.append(int(engine.snapshot()["running"]))

    outcome = run(engine, *(ask(str(i), n=30) for i in range(3)), between=between)
    assert seen[10] == 3
    assert [outcome.finish(str(i)).reason for i in range(3)] == ["length"] * 3


def test_with_growing_kv_a_request_is_refused_as_busy_if_we_can_free_no_memory() -> None:
    machine = Machine()
    engine = machine.engine(ScriptedBackend(n_ctx=1024))
    run(engine, ask("before"))
    settle(engine)
    machine.free_mb, machine.now = 40, machine.now + 1
    outcome = run(engine, ask("a"), ask("b"))
    for name in ("a", "b"):
        failure = outcome.failure(name)
        assert failure.code == "server_busy"
        assert failure.message == (
            "this machine has 0.04 GB of memory left, but 0.10 GB are reserved for the system"
        )
        assert "close other programs" in failure.hint
    assert engine.pool.cache.held_bytes == 0
    assert len(engine.pool.idle) == 0
    machine.free_mb, machine.now = 1000, machine.now + 1
    assert run(engine, ask("c")).finish("c").reason == "length"


def test_with_growing_kv_memory_freed_by_the_cache_admits_the_request() -> None:
    machine = Machine()
    engine = machine.engine(ScriptedBackend(n_ctx=1024))
    run(engine, ask("before"))
    settle(engine)
    cache = engine.pool.cache
    given = cache.held_bytes
    machine.available = lambda: 40 * MB if cache.held_bytes == given else 90 * MB  # type: ignore[method-assign]
    engine.guard.available = machine.available
    machine.now += 1
    assert run(engine, ask("a")).finish("a").reason == "length"


def test_a_request_parked_within_its_answer_is_never_refused() -> None:
    machine = Machine()
    engine = machine.engine(ScriptedBackend(n_ctx=400))

    def between(_: int) -> None:
        if engine.metrics.parked:
            machine.free_mb = 10

    outcome = run(engine, ask("a", "x" * 20, 250), ask("b", "y" * 20, 250), between=between)
    assert engine.metrics.parked
    assert {outcome.finish("a").reason, outcome.finish("b").reason} == {"length"}


def test_unknown_memory_changes_nothing_and_cancelling_the_queue_under_pressure_ends_it() -> None:
    most, _ = most_at_once(
        Machine(None).engine(ScriptedBackend(n_ctx=1024)), *(ask(str(i)) for i in range(4))
    )
    assert most == 4
    engine = Machine(40).engine(KvAtLoad(n_ctx=1024))
    outcome = Outcome()
    for name in ("a", "b"):
        outcome.take(engine.submit(ask(name), prompt_tokens(engine, ask(name))))
    outcome.take(engine.step())
    outcome.take(engine.cancel("b"))
    assert outcome.finish("b").reason == "cancelled"
    while engine.has_work:
        outcome.take(engine.step())
    assert outcome.finish("a").reason == "length"


@settings(max_examples=examples(60))
@given(
    frees=st.lists(st.sampled_from([None, 0, 30, 60, 90, 110, 130, 1000]), min_size=1, max_size=12),
    kv_at_load=st.booleans(),
    requests=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=8),
)
def test_every_request_ends_once_and_exactly_under_any_memory_pressure(
    frees: list[int | None], kv_at_load: bool, requests: list[tuple[int, int]]
) -> None:
    make: Callable[..., ScriptedBackend] = KvAtLoad if kv_at_load else ScriptedBackend
    machine = Machine()
    engine = machine.engine(make(n_ctx=160), cache_bytes=600)
    script = itertools.cycle(frees)

    def between(n: int) -> None:
        if n % 3 == 0:
            machine.free_mb = next(script)
        engine.check_integrity()

    asked = [
        ask(str(i), "shared beginning " + "xyz"[kind], n) for i, (kind, n) in enumerate(requests)
    ]
    outcome = run(engine, *asked, between=between)
    for request in asked:
        (end,) = outcome.ends[request.id]
        if isinstance(end, Failure):
            assert not kv_at_load
            assert end.code == "server_busy"
            continue
        alone = run(Engine(make(n_ctx=160), EngineSettings(headroom_bytes=0)), request)
        if end.reason == "length" and end.usage.completion_tokens == request.generation.max_tokens:
            assert outcome.tokens[request.id] == alone.tokens[request.id]
