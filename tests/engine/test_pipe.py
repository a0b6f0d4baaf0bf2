"""The pipe to a worker process delivers complete messages in order for any split of the bytes, one
answer or error per question, and one end after the last message."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from localllm import errors
from localllm.engine.worker import pipe
from localllm.engine.worker.pipe import JsonProcess

_ECHO = (
    "import sys; print('{\"ready\": 1}', flush=True)\nfor line in sys.stdin: "
    "sys.stdout.write(line); sys.stdout.flush()"
)


def _child(program: str) -> tuple[str, str, str]:
    return (sys.executable, "-c", program)


async def _started(
    command: Sequence[str], order: dict[str, Any], **more: Any
) -> tuple[JsonProcess, dict[str, Any]]:
    process = await JsonProcess.spawn(command)
    return process, await process.load(order, **more)


async def _ended(process: JsonProcess) -> list[dict[str, Any]]:
    """Return the process's messages until its end."""
    heard: list[dict[str, Any]] = []
    process.listen(heard.append, lambda: None)
    await process.wait()
    return heard


def test_messages_of_any_size_come_whole_and_in_order() -> None:
    """A JSON message longer than a pipe's buffer arrives in many pieces, and many short ones arrive
    in one."""

    async def talk() -> None:
        process, ready = await _started(_child(_ECHO), {"n": 0}, model_name="it")
        heard: list[dict[str, Any]] = []
        process.listen(heard.append, lambda: None)
        sent = [{"n": 0}] + [
            {"n": i, "text": "é" * size} for i, size in enumerate([1, 3_000_000, 0, 70_000, 5], 1)
        ]
        for message in sent[1:]:
            assert process.send(message)
        process.close_input()
        await process.wait()
        assert ready == {"ready": 1}
        assert heard == sent
        assert process.returncode == 0
        assert not process.send({"n": 9})

    asyncio.run(talk())


def test_the_end_is_reported_once_after_the_last_message() -> None:
    program = (
        "print('{\"ready\": 1}', flush=True); input(); [print('{\"n\": %d}' % i) for i in "
        "range(5000)]"
    )

    async def talk() -> None:
        process, _ = await _started(_child(program), {"n": 0}, model_name="it")
        order: list[str] = []
        process.listen(lambda message: order.append(str(message["n"])), lambda: order.append("end"))
        await process.wait()
        assert order == [*map(str, range(5000)), "end"]

    asyncio.run(talk())


@pytest.mark.parametrize(
    "nonsense", ["not json", '{"n": 1} {"n": 2}', "", '{"n": ', "1", '"re"', "[]"]
)
def test_a_process_that_writes_nonsense_is_ended(nonsense: str) -> None:
    says = f"print('{{\"ready\": 1}}', {nonsense!r}, sep='\\n', flush=True)"
    program = f"{says}; import time; time.sleep(600)"

    async def talk() -> None:
        process, _ = await _started(_child(program), {}, model_name="it")
        assert await _ended(process) == []
        assert process.returncode is not None
        assert process.returncode < 0

    asyncio.run(asyncio.wait_for(talk(), 60))


def test_a_partial_message_before_a_crash_is_ignored() -> None:
    program = (
        'print(\'{"ready": 1}\\n{"n": 1}\\n{"n": \', end=\'\', flush=True); import os; os.abort()'
    )

    async def talk() -> None:
        process, _ = await _started(_child(program), {}, model_name="it")
        assert await _ended(process) == [{"n": 1}]
        assert process.returncode == -6

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("program", "error", "words"),
    [
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            errors.WorkerDiedError,
            "signal SIGKILL",
        ),
        ("raise SystemExit(7)", errors.WorkerDiedError, "exit code 7"),
        (
            'print(\'{"fatal": {"code": "does_not_fit", "message": "too large"}}\')',
            errors.DoesNotFitError,
            "too large",
        ),
    ],
)
def test_a_process_that_never_becomes_ready_gives_its_reason(
    program: str, error: type[Exception], words: str
) -> None:
    async def talk() -> None:
        with pytest.raises(error, match=words):
            await _started(_child(program), {}, model_name="it")

    asyncio.run(talk())


def test_a_crash_by_illegal_instruction_suggests_another_engine() -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"

    async def talk() -> None:
        with pytest.raises(errors.WorkerDiedError) as raised:
            await _started(_child(program), {}, model_name="it")
        assert "localllm setup --engine latest" in raised.value.hint

    asyncio.run(talk())


def test_cancelling_a_load_ends_the_process() -> None:
    async def talk() -> None:
        said = asyncio.Event()
        process: list[int] = []

        def progress(message: dict[str, Any]) -> None:
            process.append(message["pid"])
            said.set()

        program = (
            "import os, time; print('{\"pid\": %d}' % os.getpid(), flush=True); time.sleep(600)"
        )
        start = asyncio.create_task(
            _started(_child(program), {}, model_name="it", on_progress=progress)
        )
        await said.wait()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        import psutil

        assert not psutil.pid_exists(process[0])

    asyncio.run(asyncio.wait_for(talk(), 60))


def test_messages_before_the_first_listener_are_kept() -> None:
    program = 'print(\'{"ready": 1}\\n{"n": 1}\\n{"n": 2}\', flush=True)'

    async def talk() -> None:
        process, _ = await _started(_child(program), {}, model_name="it")
        await process.wait()
        heard: list[Any] = []
        process.listen(heard.append, lambda: heard.append("end"))
        assert heard == [{"n": 1}, {"n": 2}, "end"]

    asyncio.run(talk())


# A process that answers no question.
_DEAF = "import sys; print('{\"ready\": 1}', flush=True); sys.stdin.read()"
# A process that dies of the first question.
_MORTAL = "import os; input(); print('{\"ready\": 1}', flush=True); input(); os.abort()"
# A process that answers three questions at once, the last one first.
_LATE = """
import json
def say(**message): print(json.dumps(message), flush=True)
input()
say(ready=1)
first, second, third = (json.loads(input()) for _ in range(3))
say(re=third["n"], error={"code": "context_length_exceeded", "message": "too long", "hint": "cut it"})
say(unasked=1)
say(re=second["n"], value=second["word"])
say(re=second["n"], value="again")
say(re=first["n"], value=first["word"])
"""


def _loses_nothing(story: Callable[[], Awaitable[None]]) -> None:
    """Run `story` and check that no unretrieved exception remains."""
    lost: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
        await asyncio.wait_for(story(), 60)
        gc.collect()

    asyncio.run(run())
    assert lost == []


def test_each_call_gets_its_own_answer_in_any_order() -> None:
    async def story() -> None:
        process, _ = await _started(_child(_LATE), {}, model_name="it")
        heard: list[Any] = []
        process.listen(heard.append, lambda: heard.append("end"))
        answers = [asyncio.create_task(process.ask({"word": word})) for word in "abc"]
        assert [await a for a in answers[:2]] == ["a", "b"]
        with pytest.raises(errors.ContextLengthError, match="too long") as refused:
            await answers[2]
        assert refused.value.hint == "cut it"
        await process.wait()
        assert heard == [{"unasked": 1}, "end"]

    _loses_nothing(story)


def test_every_pending_call_gets_one_error_with_the_cause_if_the_process_dies() -> None:
    async def story() -> None:
        process, _ = await _started(_child(_MORTAL), {}, model_name="it")
        waiting = [asyncio.create_task(process.ask({"op": "x"})) for _ in range(3)]
        waiting[1].cancel()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(e) for e in ends] == [
            errors.WorkerDiedError,
            asyncio.CancelledError,
            errors.WorkerDiedError,
        ]
        assert "signal SIGABRT" in str(ends[0])
        with pytest.raises(errors.WorkerDiedError, match="signal SIGABRT"):
            await process.ask({"op": "too late"})

    _loses_nothing(story)


def test_a_call_that_cannot_be_sent_fails_exactly_once() -> None:
    """The process's input is closed while it still runs. The question fails with that error, and
    the process's end adds no second error."""

    async def story() -> None:
        process, _ = await _started(_child(_DEAF), {}, model_name="it")
        process.close_input()
        with pytest.raises(errors.WorkerDiedError):
            await process.ask({"op": "x"})
        await process.wait()

    _loses_nothing(story)


def test_closing_ends_pending_calls_and_kills_a_process_that_does_not_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        polite, _ = await _started(_child(_DEAF), {}, model_name="it")
        waiting = asyncio.create_task(polite.ask({"op": "x"}))
        await asyncio.sleep(0)
        await polite.close()
        assert polite.returncode == 0
        with pytest.raises(errors.WorkerDiedError, match="the model was unloaded"):
            await waiting
        stubborn, _ = await _started(
            _child(f"{_DEAF}; import time; time.sleep(600)"), {}, model_name="it"
        )
        monkeypatch.setattr(pipe, "STOP_GRACE_S", 0.1)
        await stubborn.close()
        assert stubborn.returncode == -9

    _loses_nothing(story)
