"""A worker that hangs is replaced with a clear error. A worker that computes is not, however long
it takes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from engine.drive import GREEDY
from localllm.engine.messages import Event, Failure, Finish
from localllm.engine.worker.child_pipe import Pulse
from localllm.engine.worker.client import WorkerClient, WorkerOptions
from localllm.engine.worker.embedding import EmbeddingEngine, EmbeddingOptions
from localllm.engine.worker.pipe import JsonProcess
from localllm.engine.worker.supervisor import Supervisor, Watchdog, effort_of
from localllm.errors import WorkerDiedError
from localllm_backends.contract import LoadSpec
from models.tiny_bert import write_bert
from support.requests import events_of, request_for

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="the odd worker stops itself by POSIX's means"
)


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def verdicts(
    looks: list[tuple[Pulse, float]], every_s: float = 15.0, patience_s: float = 300.0
) -> str:
    """Return the first non-empty verdict of a series of looks with pauses between them, or an empty
    string."""
    clock = Clock()
    dog = Watchdog(patience_s, clock)
    for pulse, effort in looks:
        clock.now += every_s
        if said := dog.verdict(pulse, effort):
            return said
    return ""


def still(
    n: int, *, steps: int = 0, longest_s: float = 0.0, effort_s: float = 0.0
) -> list[tuple[Pulse, float]]:
    """Return `n` looks at one call that never ends; between two looks `effort_s` more work was
    done."""
    return [(Pulse(15.0 * (i + 1), steps, longest_s), 50.0 + effort_s * i) for i in range(n)]


def test_a_call_without_activity_counts_as_hung_after_the_time_limit() -> None:
    assert verdicts(still(19)) == ""
    assert "without any progress" in verdicts(still(25))


def test_threads_waiting_for_the_gil_do_not_count_as_activity() -> None:
    """Such threads request the lock 200 times a second. A silent process that reads or computes
    shows more activity."""

    def silent(effort_s: float) -> list[tuple[Pulse, float]]:
        return [
            (replace(pulse, silent=True), effort) for pulse, effort in still(60, effort_s=effort_s)
        ]

    assert "without any progress" in verdicts(silent(0.3))
    assert verdicts(silent(1.5)) == ""


@pytest.mark.parametrize("effort_s", [0.05, 1.0, 15.0])
def test_a_first_step_may_take_any_time_if_it_is_active(effort_s: float) -> None:
    """A first step may take hours, even on a machine so busy that it gets a three-hundredth of a
    core."""
    assert verdicts(still(1000, effort_s=effort_s)) == ""


def test_reading_a_model_from_a_slow_disk_counts_as_activity(tmp_path: Path) -> None:
    """Pages are read with almost no CPU time."""
    file = tmp_path / "pages"
    file.write_bytes(os.urandom(8_000_000))
    before = effort_of(os.getpid())
    counters = (
        psutil.Process().io_counters().read_bytes if hasattr(psutil.Process, "io_counters") else 0
    )
    os.sync()
    fd = os.open(file, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    while os.read(fd, 1_000_000):
        pass
    os.close(fd)
    if psutil.Process().io_counters().read_bytes == counters:
        pytest.skip("this file system does not count what is read")
    assert effort_of(os.getpid()) - before > 4


def test_a_spinning_step_counts_as_hung_after_a_hundred_times_the_longest_step() -> None:
    spinning = still(60, steps=500, longest_s=2.0, effort_s=15.0)
    assert "no earlier call lasted more than 2.0 s" in verdicts(spinning)
    assert verdicts(spinning[:39]) == ""
    slow = still(200, steps=500, longest_s=40.0, effort_s=15.0)
    assert verdicts(slow) == ""


def test_a_suspended_machine_does_not_make_a_worker_count_as_hung() -> None:
    assert verdicts([(Pulse(7200.0 * (i + 1)), 50.0) for i in range(4)], every_s=7200.0) == ""


def test_many_short_calls_do_not_count_as_one_long_call() -> None:
    assert verdicts([(Pulse(0.01, i, 0.02), 50.0) for i in range(100)]) == ""


@dataclass(frozen=True)
class OddOptions:
    """Options that start the worker of odd_worker.py."""

    what: str
    hang_s: float = 1.5

    def check_memory(self, available: object = None) -> None:
        """Accept: there is enough memory."""

    async def start(self, on_loading: Callable[[float], None] | None = None) -> WorkerClient:
        command = (sys.executable, "-m", "engine.odd_worker")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = await JsonProcess.spawn(command, environment)
        return WorkerClient(process, await process.load({"what": self.what}, model_name="odd"))


def story(what: str, hang_s: float = 1.5) -> tuple[Event, int, int]:
    """Send one request to an odd worker, then another one. Return the first one's end and the
    process ids of both workers."""

    async def main() -> tuple[Event, int, int]:
        supervisor = Supervisor(OddOptions(what, hang_s))
        try:
            async with asyncio.timeout(120):
                engine = await supervisor.engine()
                request = request_for("a", "hello", max_tokens=10, sampling=GREEDY, ignore_eos=True)
                *_, end = [event async for event in events_of(engine, request)]
                again = await supervisor.engine()
                assert await again.tokenize("abc")
                return end, engine.pid, again.pid
        finally:
            await supervisor.close()

    return asyncio.run(main())


@pytest.mark.parametrize("what", ["hang", "lock", "stop"])
def test_a_worker_that_hangs_ends_its_requests_with_the_reason_and_is_replaced(what: str) -> None:
    end, first, second = story(what)
    assert isinstance(end, Failure)
    assert end.code == "worker_died"
    assert "hung" in end.message
    assert first != second
    assert not psutil.pid_exists(first)


def test_a_long_active_step_is_not_ended() -> None:
    end, first, second = story("work")
    assert isinstance(end, Finish)
    assert first == second


def test_a_worker_with_a_time_limit_of_zero_is_not_watched() -> None:
    end, first, second = story("work", hang_s=0)
    assert isinstance(end, Finish)
    assert first == second


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="waits for a death without its loop hearing")
def test_a_killed_worker_is_replaced_before_its_end_is_noticed() -> None:
    """The first question breaks the pipe, and the second can't be sent. Its sender tries again at
    once, and must get a new worker."""

    async def main() -> None:
        supervisor = Supervisor(OddOptions("fine"))
        try:
            engine = await supervisor.engine()
            os.kill(engine.pid, signal.SIGKILL)
            with suppress(ChildProcessError):  # another thread already knows of its end
                os.waitid(os.P_PID, engine.pid, os.WEXITED | os.WNOWAIT)
            questions = [asyncio.create_task(engine.tokenize("abc")) for _ in range(2)]
            await asyncio.wait(questions, return_when=asyncio.FIRST_COMPLETED)
            again = await supervisor.engine()
            assert again is not engine
            assert await again.tokenize("abc")
            for question in questions:
                with pytest.raises(WorkerDiedError):
                    await question
        finally:
            await supervisor.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_failed_housekeeping_fails_no_request() -> None:
    end, first, second = story("untidy")
    assert isinstance(end, Finish)
    assert first == second


def test_an_embedding_worker_is_watched_too(tmp_path: Path) -> None:
    async def main() -> None:
        host: Supervisor[EmbeddingEngine] = Supervisor(
            EmbeddingOptions(str(write_bert(tmp_path / "bert.gguf")), hang_s=1.5)
        )
        try:
            async with asyncio.timeout(60):
                engine = await host.engine()
                assert isinstance(engine, EmbeddingEngine)
                psutil.Process(engine.pid).suspend()
                with pytest.raises(WorkerDiedError, match="hung"):
                    await engine.embed(["hello"])
                assert (await host.engine()).pid != engine.pid
        finally:
            await host.close()

    asyncio.run(main())


def test_the_models_options_carry_the_setting() -> None:
    assert WorkerOptions(LoadSpec("x")).hang_s == EmbeddingOptions("x").hang_s == 300.0
