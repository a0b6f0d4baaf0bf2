"""The pipe to a worker process: whole messages in order however the bytes arrive, and one end, after the last."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from localllm import errors
from localllm.engine.pipe import JsonProcess

_ECHO = (
    "import sys; print('{\"ready\": 1}', flush=True)\nfor line in sys.stdin: sys.stdout.write(line); sys.stdout.flush()"
)


def _child(program: str) -> tuple[str, str, str]:
    return (sys.executable, "-c", program)


async def _ended(process: JsonProcess) -> list[dict[str, Any]]:
    """What it says until its end."""
    heard: list[dict[str, Any]] = []
    process.listen(heard.append, lambda: None)
    await process.wait()
    return heard


def test_messages_of_any_size_come_whole_and_in_order() -> None:
    """A line longer than a pipe's buffer arrives in many pieces, and many short ones in one."""

    async def talk() -> None:
        process, ready = await JsonProcess.start(_child(_ECHO), {"n": 0}, loads="it")
        heard: list[dict[str, Any]] = []
        process.listen(heard.append, lambda: None)
        sent = [{"n": 0}] + [{"n": i, "text": "é" * size} for i, size in enumerate([1, 3_000_000, 0, 70_000, 5], 1)]
        for message in sent[1:]:
            assert process.send(message)
        process.hang_up()
        await process.wait()
        assert ready == {"ready": 1}
        assert heard == sent
        assert process.returncode == 0
        assert not process.send({"n": 9})

    asyncio.run(talk())


def test_the_end_comes_once_after_the_last_message() -> None:
    program = "print('{\"ready\": 1}', flush=True); input(); [print('{\"n\": %d}' % i) for i in range(5000)]"

    async def talk() -> None:
        process, _ = await JsonProcess.start(_child(program), {"n": 0}, loads="it")
        order: list[str] = []
        process.listen(lambda message: order.append(str(message["n"])), lambda: order.append("end"))
        await process.wait()
        assert order == [*map(str, range(5000)), "end"]

    asyncio.run(talk())


@pytest.mark.parametrize("nonsense", ["not json", '{"n": 1} {"n": 2}', "", '{"n": '])
def test_a_process_that_writes_nonsense_is_ended(nonsense: str) -> None:
    says = f"print('{{\"ready\": 1}}', {nonsense!r}, sep='\\n', flush=True)"
    program = f"{says}; import time; time.sleep(600)"

    async def talk() -> None:
        process, _ = await JsonProcess.start(_child(program), {}, loads="it")
        assert await _ended(process) == []
        assert process.returncode is not None
        assert process.returncode < 0

    asyncio.run(asyncio.wait_for(talk(), 60))


def test_half_a_line_before_death_is_no_message() -> None:
    program = 'print(\'{"ready": 1}\\n{"n": 1}\\n{"n": \', end=\'\', flush=True); import os; os.abort()'

    async def talk() -> None:
        process, _ = await JsonProcess.start(_child(program), {}, loads="it")
        assert await _ended(process) == [{"n": 1}]
        assert process.returncode == -6

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("program", "error", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", errors.WorkerDiedError, "signal SIGKILL"),
        ("raise SystemExit(7)", errors.WorkerDiedError, "exit code 7"),
        ('print(\'{"fatal": {"code": "does_not_fit", "message": "too large"}}\')', errors.DoesNotFitError, "too large"),
    ],
)
def test_a_process_that_never_gets_ready_says_why(program: str, error: type[Exception], words: str) -> None:
    async def talk() -> None:
        with pytest.raises(error, match=words):
            await JsonProcess.start(_child(program), {}, loads="it")

    asyncio.run(talk())


def test_giving_up_while_it_loads_ends_the_process() -> None:
    async def talk() -> None:
        said = asyncio.Event()
        process: list[int] = []

        def progress(message: dict[str, Any]) -> None:
            process.append(message["pid"])
            said.set()

        program = "import os, time; print('{\"pid\": %d}' % os.getpid(), flush=True); time.sleep(600)"
        start = asyncio.create_task(JsonProcess.start(_child(program), {}, loads="it", on_progress=progress))
        await said.wait()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        import psutil

        assert not psutil.pid_exists(process[0])

    asyncio.run(asyncio.wait_for(talk(), 60))


def test_what_is_said_before_anybody_listens_is_kept() -> None:
    program = 'print(\'{"ready": 1}\\n{"n": 1}\\n{"n": 2}\', flush=True)'

    async def talk() -> None:
        process, _ = await JsonProcess.start(_child(program), {}, loads="it")
        await process.wait()
        heard: list[Any] = []
        process.listen(heard.append, lambda: heard.append("end"))
        assert heard == [{"n": 1}, {"n": 2}, "end"]

    asyncio.run(talk())
