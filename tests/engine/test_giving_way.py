"""Decoding uses the cores that other programs leave idle, one thread for each, and uses all cores
again once they are free."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.contention import CpuContention, ThreadThrottle
from localllm.engine.messages import Sampling
from localllm.engine.worker.client import WorkerOptions
from localllm_backends.contract import Chunk, LoadSpec
from localllm_backends.llamacpp import backend_type
from localllm_backends.llamacpp.native import start_native
from localllm_backends.llamacpp.threads import usable_cores
from support.requests import events_of, request_for
from support.scripted_backend import ScriptedBackend

STEP_S = 0.02


class Threaded(ScriptedBackend):
    """A backend that records its thread limit."""

    most = 1000

    def use_threads(self, most: int) -> None:
        self.most = most


@dataclass
class Machine:
    """A machine with `cores` cores and a process that decodes on them while others compute."""

    cores: int
    now: float = 0.0
    taken_s: float = 0.0
    backend: Threaded = field(default_factory=Threaded)

    def __post_init__(self) -> None:
        self.others = CpuContention(lambda: self.taken_s, self.cores, lambda: self.now)
        self.giving_way = ThreadThrottle([self.backend], self.others)

    def steps(self, seconds: float, busy: float, step_s: float = STEP_S) -> int:
        """Decode for `seconds` while others keep `busy` cores busy; return the final number of
        threads."""
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            self.taken_s += busy * step_s
            self.giving_way.stepped(step_s)
        return min(self.backend.most, self.cores)


@given(
    cores=st.integers(1, 64), busy=st.integers(0, 80), step_s=st.sampled_from([0.005, 0.05, 3.0])
)
def test_each_core_used_by_other_programs_reduces_the_threads_by_one(
    cores: int, busy: int, step_s: float
) -> None:
    machine = Machine(cores)
    busy = min(busy, cores)
    assert machine.steps(12.0, busy, step_s) == max(1, cores - busy)
    assert machine.steps(12.0, 0.0, step_s) == cores


@given(cores=st.integers(2, 32), shares=st.lists(st.floats(0.0, 0.39), min_size=1, max_size=20))
def test_a_small_load_of_other_programs_does_not_reduce_the_threads(
    cores: int, shares: list[float]
) -> None:
    machine = Machine(cores)
    for share in shares:
        assert machine.steps(0.5, share) == cores


@given(cores=st.integers(2, 32), busy=st.integers(1, 31), wobble=st.floats(0.0, 0.19))
def test_the_thread_count_is_stable_under_a_steady_load(
    cores: int, busy: int, wobble: float
) -> None:
    machine = Machine(cores)
    busy = min(busy, cores - 1)
    told = {machine.steps(1.0, busy - 0.1 + sign * wobble / 2) for sign in (0, 1, -1, 1, -1)}
    assert told == {cores - busy}


def test_load_of_other_programs_between_steps_does_not_reduce_the_threads() -> None:
    machine = Machine(4)
    machine.steps(1.0, 0.0)
    machine.now += 60.0
    machine.taken_s += 4 * 60.0
    assert machine.steps(2.0, 0.0) == 4


@given(cores=st.sampled_from([2, 4, 8, 16]))
def test_two_engines_that_yield_to_each_other_share_the_cores(cores: int) -> None:
    machines = [Machine(cores), Machine(cores)]
    threads = [cores, cores]
    for _ in range(20):
        # Each process gets a fair share of the cores that it wants.
        wanted = sum(threads)
        has = [min(1.0, cores / wanted) * n for n in threads]
        threads = [m.steps(0.5, has[1 - i]) for i, m in enumerate(machines)]
    assert threads == [cores // 2, cores // 2]


@pytest.mark.usefixtures("all_threads")
def test_a_short_step_with_fewer_threads_gives_the_same_answer(
    few_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context is far shorter than the 512 tokens from which attention is split among threads
    (ops.cpp)."""
    backend = backend_type.load(LoadSpec(str(few_layers), n_ctx=256))
    assert backend.capabilities.threaded
    tokens = backend.tokenize(
        "The tide turned before dawn, and the boats went out in a long line. " * 4
    )
    rows = []
    llama, threads = start_native(), [0]
    give = llama.llama_set_n_threads

    def counted(context: object, *n_threads: int) -> None:
        threads[:] = n_threads
        give(context, *n_threads)

    monkeypatch.setattr(llama, "llama_set_n_threads", counted)
    loaded = usable_cores()
    for most in (1000, 1):
        backend.use_threads(most)
        sequence = backend.new_sequence()
        backend.step([Chunk(sequence, tokens[:40])])
        assert threads == [loaded] * 2, "a long step takes all there are"
        for token in tokens[40:50]:
            row = np.array(backend.step([Chunk(sequence, [token])]).logits(0)).reshape(-1)
        assert threads == [min(most, loaded)] * 2
        backend.drop(sequence)
        rows.append(row)
    backend.close()
    assert np.array_equal(rows[0], rows[1])


@contextmanager
def busy_neighbours(n: int) -> Iterator[None]:
    """Run `n` processes that do nothing but compute."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.skipif(
    (os.cpu_count() or 1) < 2, reason="with one processor there is nothing to leave"
)
@pytest.mark.usefixtures("all_threads")
def test_a_worker_on_a_busy_machine_uses_one_thread(few_layers: Path) -> None:
    async def main() -> list[float]:
        client = await WorkerOptions(
            LoadSpec(str(few_layers), n_ctx=4096), engine={"yields_threads": True}
        ).start()
        seen = []
        try:
            with busy_neighbours(os.cpu_count() or 1):
                for i in range(40):
                    prompt = await client.tokenize(f"Tell a story about number {i}.", add_bos=True)
                    request = request_for(
                        f"r{i}", prompt, 400, Sampling(temperature=0.0), ignore_eos=True
                    )
                    async for _ in events_of(client, request):
                        pass
                    seen.append((await client.snapshot())["decode_threads_most"])
                    if seen[-1] == 1:
                        break
        finally:
            await client.close()
        return seen

    assert asyncio.run(main())[-1] == 1
