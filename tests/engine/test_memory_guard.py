"""The system keeps its headroom: no load that would take it, a cache that gives back, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.crowds import isolated
from engine.drive import GREEDY, Outcome, prompt_tokens, run, settle
from localllm.engine.client import WorkerClient, WorkerOptions
from localllm.engine.core import Engine, EngineSettings
from localllm.engine.memory_guard import (
    MemoryGuard,
    Pressure,
    SystemMemory,
    check_load,
    headroom_bytes,
    judge,
    process_and_children,
    return_to_system,
)
from localllm.engine.messages import Failure, Finish, Request, Text
from localllm.engine.prefix_cache import MemoryBlock, PrefixCache
from localllm.engine.supervisor import Supervisor
from localllm.errors import DoesNotFitError
from localllm_backends.contract import LoadSpec, MemoryReport
from localllm_backends.llamacpp import backend_type as llamacpp
from support.requests import request_for
from support.scripted_backend import ScriptedBackend

MB = 10**6
GIB = 2**30
HEADROOM = 100 * MB


# --- the rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "kept"),
    [(None, 0), (GIB, GIB // 8), (8 * GIB, GIB // 2), (24 * GIB, 24 * GIB // 20), (128 * GIB, 128 * GIB // 20)],
)
def test_the_system_keeps_5_percent_at_least_half_a_gib_and_never_over_an_eighth(total: int | None, kept: int) -> None:
    assert headroom_bytes(total) == pytest.approx(kept, abs=1)


def test_levels_start_at_their_marks_and_end_a_quarter_above() -> None:
    story = [120, 99, 110, 124, 126, 99, 51, 49, 60, 74, 76, 124, 125, None]
    level: Pressure = "none"
    levels = [level := judge(now, 100, level) for now in story]
    assert levels == [
        "none", "shrink", "shrink", "shrink", "none", "shrink", "shrink", "hold", "hold", "hold", "shrink", "shrink",
        "none", "none",
    ]  # fmt: skip


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.sampled_from(["none", "shrink", "hold"]))
def test_more_memory_is_never_more_pressure(available: int, more: int, before: Any) -> None:
    order = ["hold", "shrink", "none"]
    headroom = 10**11
    assert order.index(judge(available, headroom, before)) <= order.index(judge(available + more, headroom, before))


def test_unknown_memory_is_no_pressure_and_no_headroom_is_no_guard() -> None:
    assert judge(None, HEADROOM, "hold") == "none"
    guard = MemoryGuard(lambda: pytest.fail("nobody asked for a guard"), 0)
    assert not guard.look(0.0)
    assert guard.snapshot() == {"headroom_bytes": 0, "pressure": "none"}


def test_the_system_is_asked_at_most_four_times_a_second() -> None:
    looks: list[float] = []
    now = 0.0
    guard = MemoryGuard(lambda: looks.append(now) or GIB, HEADROOM)  # type: ignore[func-returns-value]
    for i in range(2001):
        now = i / 1000
        guard.look(now)
    assert looks == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]


def test_a_load_must_leave_the_headroom_and_the_refusal_has_all_figures() -> None:
    check_load("m", 900 * MB, 1000 * MB, 100 * MB)
    check_load("m", 0, 1, 100 * MB)  # nobody knows what it takes
    check_load("m", 900 * MB, None, 100 * MB)  # nobody knows what is free: the plan decides
    with pytest.raises(DoesNotFitError) as refused:
        check_load("m.gguf", 901 * MB, 1000 * MB, 100 * MB)
    assert refused.value.message == (
        "m.gguf needs 0.90 GB, and 0.90 GB are free for it now: 1.00 GB available, of which 0.10 GB stay with the system"
    )
    assert "close other programs" in refused.value.hint


# --- reading the system ----------------------------------------------------------------------------------------------

MEMINFO = "MemTotal:       16000 kB\nMemFree:          100 kB\nMemAvailable:   12000 kB\n"
KIB = 1024


def system(files: dict[str, str], users: tuple[int, ...] = ()) -> SystemMemory:
    return SystemMemory(lambda: users, {"/proc/meminfo": MEMINFO, **files}.get)


def test_page_cache_is_available_but_not_the_weights_that_a_worker_has_mapped() -> None:
    assert system({}).total_bytes == 16000 * KIB
    assert system({}).available_bytes() == 12000 * KIB
    page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
    loaded = system({"/proc/7/statm": "900 500 100 1 0 300 0", "/proc/8/statm": "9 5 10 1 0 3 0"}, (7, 8, 9))
    assert loaded.available_bytes() == 12000 * KIB - 110 * page  # 9 has ended


def test_a_containers_limit_counts_and_its_page_cache_is_available() -> None:
    group = "/sys/fs/cgroup/box"
    inside = system(
        {
            "/proc/self/cgroup": "0::/box/inner\n",
            f"{group}/memory.max": "8000000\n",
            f"{group}/memory.current": "7000000\n",
            f"{group}/memory.stat": "anon 1000000\ninactive_file 2000000\nactive_file 4000000\nslab 7\n",
            "/sys/fs/cgroup/box/inner/memory.max": "max\n",
        }
    )
    assert inside.total_bytes == 8_000_000
    assert inside.available_bytes() == 7_000_000


def test_the_older_cgroups_are_read_too_and_no_limit_is_none() -> None:
    root = "/sys/fs/cgroup/memory"
    v1 = {
        "/proc/self/cgroup": "12:cpu,cpuacct:/x\n5:memory:/docker/abc\n",
        f"{root}/memory.limit_in_bytes": "9223372036854771712",
        f"{root}/memory.usage_in_bytes": "1",
    }
    assert system(v1).total_bytes == 16000 * KIB
    v1[f"{root}/docker/abc/memory.limit_in_bytes"] = "4096000"
    v1[f"{root}/docker/abc/memory.usage_in_bytes"] = "4000000"
    v1[f"{root}/docker/abc/memory.stat"] = "total_inactive_file 1000\ntotal_active_file 2000"
    assert system(v1).available_bytes() == 99_000


def test_a_system_that_does_not_say_is_unknown() -> None:
    assert SystemMemory(read={"/proc/meminfo": "MemTotal: 100 kB"}.get).available_bytes() is None


def test_this_machine_answers() -> None:
    memory = SystemMemory(process_and_children)
    available, total = memory.available_bytes(), memory.total_bytes
    assert available is not None
    assert total is not None
    assert 0 < available < total


def test_freed_blocks_go_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc")
    keepers, blocks = [], []
    for _ in range(600):
        blocks.append(os.urandom(100_000))
        keepers.append(os.urandom(5_000))  # between them, so that freeing alone can't shrink the heap
    full = resident()
    blocks.clear()
    return_to_system()
    assert full - resident() > 40 * MB


# --- the cache gives back --------------------------------------------------------------------------------------------


@dataclass
class FiledBlock(MemoryBlock):
    """A block with a copy on disk: demoting it works once."""

    demoted: bool = False

    def demote(self) -> bool:
        self.demoted = True
        return True

    @property
    def held_bytes(self) -> int:
        return 0 if self.demoted else len(self.data)


def put(cache: PrefixCache, line: list[int], *, filed: bool = False, size: int = 10) -> bool:
    start = 0 if cache.whole else cache.covered(line)
    return start < len(line) and cache.insert(
        line, (FiledBlock if filed else MemoryBlock)(bytes(size), start, len(line))
    )


def test_the_longest_unused_goes_first_and_what_is_used_stays() -> None:
    cache = PrefixCache(whole=False, capacity_bytes=1000)
    for line in ([1, 2], [1, 2, 3], [5, 6], [7, 8]):
        put(cache, line)
    cache.match([1, 2, 3])
    assert cache.shrink(15) == 20
    assert [cache.covered(line) for line in ([1, 2, 3], [5, 6], [7, 8])] == [3, 0, 0]
    assert cache.shrink(10) == 10
    assert cache.covered([1, 2, 3]) == 2  # from the end: a beginning is of use alone, an end is not
    cache.check_integrity()


def test_what_is_on_disk_loses_only_its_memory_all_the_way_up() -> None:
    cache = PrefixCache(whole=False, capacity_bytes=1000)
    for n in (2, 4, 6):
        put(cache, list(range(n)), filed=True)
    assert cache.shrink(30) == 30
    assert cache.held_bytes == 0
    assert cache.covered(list(range(6))) == 6
    cache.check_integrity()


def test_what_hangs_on_a_beginning_without_a_copy_stays_behind_a_gap() -> None:
    cache = PrefixCache(whole=False, capacity_bytes=1000)
    put(cache, [1, 2])
    put(cache, [1, 2, 3], filed=True)
    assert cache.shrink(20) == 20
    assert cache.covered([1, 2, 3]) == 0
    assert cache.peek([1, 2, 3]).saved == 1
    cache.check_integrity()


line_lists = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=10), st.booleans()), max_size=20)


@settings(deadline=None)
@given(line_lists, st.booleans(), st.integers(0, 300), st.lists(st.integers(0, 2), max_size=10))
def test_shrinking_gives_what_is_asked_for_or_all_but_what_is_held(
    stored: list[tuple[list[int], bool]], whole: bool, ask: int, held_line: list[int]
) -> None:
    cache = PrefixCache(whole=whole, capacity_bytes=10**6)
    for line, filed in stored:
        put(cache, line, filed=filed)
    match = cache.match(held_line)
    cache.lock(match)
    before = cache.held_bytes
    freed = cache.shrink(ask)
    cache.check_integrity()
    assert freed == before - cache.held_bytes
    possible = freed + cache.shrink(before)
    assert freed >= min(ask, possible)
    # All that is left lies on the way to what is held.
    assert cache.held_bytes <= 10 * match.length
    assert cache.match(held_line).length == match.length
    cache.unlock(match)
    assert cache.shrink(before) + possible == before
    assert cache.held_bytes == 0
    cache.check_integrity()


# --- the engine under pressure ---------------------------------------------------------------------------------------


class KvAtLoad(ScriptedBackend):
    """Its KV is allocated with the model, as llama.cpp's is; the plain scripted one's grows, as MLX's does."""

    def memory(self) -> MemoryReport:
        return MemoryReport(0, 1000, 0, 0, 0)


class Machine:
    """Scripted time and memory: every look at the clock takes a tenth of a second."""

    def __init__(self, free_mb: float | None = 1000) -> None:
        self.free_mb = free_mb
        self.now = 0.0

    def clock(self) -> float:
        self.now += 0.1
        return self.now

    def available(self) -> int | None:
        return None if self.free_mb is None else int(self.free_mb * MB)

    def engine(self, backend: ScriptedBackend, **values: Any) -> Engine:
        return Engine(
            backend, EngineSettings(headroom_bytes=HEADROOM, **values), clock=self.clock, available=self.available
        )


def ask(name: str, text: str = "", n: int = 8) -> Request:
    return request_for(
        name, text or f"a story about {name} and the sea", max_tokens=n, sampling=GREEDY, ignore_eos=True
    )


def test_a_pressed_cache_gives_back_what_is_missing_and_grows_again_afterwards() -> None:
    machine = Machine()
    engine = machine.engine(KvAtLoad(n_ctx=1024))
    run(engine, *(ask(str(i)) for i in range(6)))
    settle(engine)
    held, full = engine.pool.cache.held_bytes, engine.pool.cache.capacity_bytes
    assert held > 100
    free = HEADROOM - 50
    machine.available = engine.guard.available = lambda: free  # type: ignore[method-assign]
    machine.now += 1
    engine.idle()
    shrunk = engine.pool.cache.held_bytes
    assert 50 <= held - shrunk < held
    snapshot = engine.snapshot()
    assert (snapshot["pressure"], snapshot["available_bytes"]) == ("shrink", HEADROOM - 50)
    free = 110 * MB  # enough, but not by a quarter: no growth yet
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


def test_when_memory_is_nearly_gone_nobody_joins_but_everybody_is_served() -> None:
    machine = Machine(40)
    most, outcome = most_at_once(machine.engine(KvAtLoad(n_ctx=1024)), *(ask(str(i)) for i in range(4)))
    assert most == 1
    plain, expected = most_at_once(Machine().engine(KvAtLoad(n_ctx=1024)), *(ask(str(i)) for i in range(4)))
    assert plain == 4
    assert outcome.tokens == expected.tokens
    assert all(isinstance(outcome.finish(str(i)), Finish) for i in range(4))


def test_those_who_run_go_on_when_memory_goes() -> None:
    machine = Machine()
    engine = machine.engine(KvAtLoad(n_ctx=1024))
    seen: list[int] = []

    def between(n: int) -> None:
        machine.free_mb = 1000 if n < 4 else 10
        seen.append(int(engine.snapshot()["running"]))

    outcome = run(engine, *(ask(str(i), n=30) for i in range(3)), between=between)
    assert seen[10] == 3
    assert [outcome.finish(str(i)).reason for i in range(3)] == ["length"] * 3


def test_where_kv_grows_a_request_that_nothing_of_ours_can_make_room_for_is_refused_as_busy() -> None:
    machine = Machine()
    engine = machine.engine(ScriptedBackend(n_ctx=1024))
    run(engine, ask("before"))
    settle(engine)
    machine.free_mb, machine.now = 40, machine.now + 1
    outcome = run(engine, ask("a"), ask("b"))
    for name in ("a", "b"):
        failure = outcome.failure(name)
        assert failure.code == "server_busy"
        assert failure.message == "this machine has 0.04 GB of memory left and 0.10 GB are kept for the system"
        assert "close other programs" in failure.hint
    assert engine.pool.cache.held_bytes == 0
    assert engine.pool.residents == 0
    machine.free_mb, machine.now = 1000, machine.now + 1
    assert run(engine, ask("c")).finish("c").reason == "length"


def test_where_kv_grows_what_the_cache_gives_back_admits_the_request() -> None:
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


def test_one_parked_in_mid_answer_is_never_refused() -> None:
    machine = Machine()
    engine = machine.engine(ScriptedBackend(n_ctx=400))

    def between(_: int) -> None:
        if engine.metrics.parked:
            machine.free_mb = 10

    outcome = run(engine, ask("a", "x" * 20, 250), ask("b", "y" * 20, 250), between=between)
    assert engine.metrics.parked
    assert {outcome.finish("a").reason, outcome.finish("b").reason} == {"length"}


def test_unknown_memory_changes_nothing_and_cancelling_the_queue_under_pressure_ends_it() -> None:
    most, _ = most_at_once(Machine(None).engine(ScriptedBackend(n_ctx=1024)), *(ask(str(i)) for i in range(4)))
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


@settings(deadline=None, max_examples=60)
@given(
    frees=st.lists(st.sampled_from([None, 0, 30, 60, 90, 110, 130, 1000]), min_size=1, max_size=12),
    kv_at_load=st.booleans(),
    requests=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=8),
)
def test_whatever_memory_does_every_request_ends_once_and_exactly(
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

    asked = [ask(str(i), "shared beginning " + "xyz"[kind], n) for i, (kind, n) in enumerate(requests)]
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


# --- a real model ----------------------------------------------------------------------------------------------------

SYSTEM = "<|im_start|>system\nYou are a lighthouse keeper who answers in short sentences about the sea.<|im_end|>\n"


def turn(name: str, n: int = 24) -> Request:
    prompt = f"{SYSTEM}<|im_start|>user\nTell me about {name}.<|im_end|>\n<|im_start|>assistant\n"
    return request_for(name, prompt, max_tokens=n, sampling=GREEDY, ignore_eos=True)


NAMES = ("storms", "ships", "whales", "storms again", "the lamp", "ships again")
# Where llama.cpp's rounding may choose another token: tests/engine/crowds.py.
NEAR_TIE = 0.3


def test_smollm2_answers_the_same_tokens_while_its_cache_shrinks(smollm2: Path, tmp_path: Path) -> None:
    backend = llamacpp.load(LoadSpec(str(smollm2), n_ctx=1024, n_seq_max=2))
    expected = {name: isolated(backend, backend.tokenize(str(turn(name).prompt)), 24) for name in NAMES}
    machine = Machine()
    engine = machine.engine(backend, disk_dir=str(tmp_path), disk_bytes=10**9)
    held: list[int] = []
    ties = 0
    for name, free_mb in zip(NAMES, (1000, 99, 60, 1000, 30, 97), strict=True):
        machine.free_mb, machine.now = free_mb, machine.now + 1
        got = run(engine, turn(name)).tokens[name]
        settle(engine)
        held.append(engine.pool.cache.held_bytes)
        tokens, gaps = expected[name]
        at = next((i for i, (a, b) in enumerate(zip(got, tokens, strict=True)) if a != b), None)
        if at is not None:
            assert gaps[at] <= NEAR_TIE, f"{name}: another token at {at}, where {gaps[at]:.3f} was clear"
            ties += 1
    assert ties <= 2
    # More than the few megabytes held were missing each time; in between it grew.
    assert [bool(h) for h in held] == [True, False, False, True, False, False]
    assert engine.metrics.cached_tokens > 60, "what has left memory is read back from disk"
    assert engine.snapshot()["pressure"] == "shrink"
    engine.close()


def worker_options(path: Path, **engine: Any) -> WorkerOptions:
    return WorkerOptions(LoadSpec(str(path), n_ctx=512, n_seq_max=2), engine=engine)


async def say(engine: WorkerClient, request: Request) -> list[int]:
    tokens: list[int] = []
    async for event in engine.submit(request):
        if isinstance(event, Text):
            tokens += event.tokens
        assert not isinstance(event, Failure), event
    return tokens


def test_a_load_that_would_take_the_headroom_never_starts_a_process_and_one_that_fits_later_does(
    smollm2: Path,
) -> None:
    async def story() -> None:
        free = 100 * MB
        supervisor = Supervisor(
            worker_options(smollm2, planned_bytes=150 * MB, headroom_bytes=HEADROOM), available=lambda: free
        )
        try:
            with pytest.raises(DoesNotFitError, match=r"SmolLM2.* needs 0\.15 GB, and 0\.00 GB are free for it now"):
                await supervisor.engine()
            assert supervisor.client is None
            assert supervisor.loads == 0
            free = 1000 * MB
            engine = await supervisor.engine()
            # Other programs came, then the worker crashed: it is not loaded over them.
            free = 200 * MB
            assert await supervisor.engine() is engine
            os.kill(engine.pid, signal.SIGKILL)
            await engine.died.wait()
            with pytest.raises(DoesNotFitError, match=r"0\.20 GB available, of which 0\.10 GB stay with the system"):
                await supervisor.engine()
            free = 251 * MB
            assert await (await supervisor.engine()).tokenize("back again")
        finally:
            await supervisor.close()

    asyncio.run(story())


def test_a_real_worker_looks_at_this_machine_and_serves_even_when_it_is_full(smollm2: Path) -> None:
    async def story(**engine_settings: Any) -> tuple[list[list[int]], dict[str, Any]]:
        supervisor = Supervisor(worker_options(smollm2, **engine_settings))
        try:
            engine = await supervisor.engine()
            tokens = [await say(engine, turn(name)) for name in NAMES[:3]]
            tokens += await asyncio.gather(*(say(engine, turn(f"{name} tomorrow")) for name in NAMES[:3]))
            return tokens, await engine.snapshot()
        finally:
            await supervisor.close()

    plain, free = asyncio.run(story())
    assert free["pressure"] == "none"
    assert free["available_bytes"] > free["headroom_bytes"] > 0
    # A headroom that no machine has: to this worker every machine is full.
    full, snapshot = asyncio.run(story(headroom_bytes=10**15))
    assert snapshot["pressure"] == "hold"
    assert snapshot["headroom_bytes"] == 10**15
    assert snapshot["cache_bytes"] == 0 < free["cache_bytes"]
    assert full[:3] == plain[:3]
    assert [len(t) for t in full] == [24] * 6
