"""The parent's end of the pipe to a worker process, JSON lines (child_pipe.py is the other), and how
such processes are started.

The child is asked and answers; what it says unasked reaches a callback: a StreamReader and a task
between them would cost a turn of the loop more for every token.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from localllm import errors
from localllm.paths import worker_log

Hear = Callable[[dict[str, Any]], None]
# A process that was told to close and hasn't ended after this long is killed. It may have half a
# gigabyte to write.
STOP_GRACE_S = 10.0
# What json.loads calls in the end; the way there is longer than a short message.
_decode = json.JSONDecoder().raw_decode


class JsonProcess(asyncio.SubprocessProtocol):
    """A running child. What it says before somebody listens is kept."""

    def __init__(self) -> None:
        self._first: asyncio.Future[dict[str, Any] | None] = (
            asyncio.get_running_loop().create_future()
        )
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_message: Hear = self._hear_first
        self._on_end: Callable[[], None] = lambda: None
        self._on_progress: Hear = lambda _: None
        self._unheard: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._closing = False
        self._hangs = ""
        self._pieces: list[bytes] = []
        self._process: asyncio.SubprocessTransport | None = None

    @classmethod
    async def spawn(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        log_path: Path | None = None,
    ) -> JsonProcess:
        """Run `command`, which reads its code until it is told what to `load`. Its stderr is
        appended to `log_path`, or dropped."""
        log = log_path.open("ab") if log_path is not None else None
        try:
            _, process = await asyncio.get_running_loop().subprocess_exec(
                cls,
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log if log is not None else asyncio.subprocess.DEVNULL,
                env=None if environment is None else dict(environment),
            )
        finally:
            if log is not None:
                log.close()
        return process

    async def load(
        self, order: Mapping[str, Any], *, loads: str, on_progress: Hear | None = None
    ) -> dict[str, Any]:
        """Send it `order`, and wait for its {"ready": …}; other messages before that go to
        `on_progress`. Where that fails it is ended. Raises the LocalLLMError of its {"fatal": …},
        or WorkerDiedError when it ends without a word while it loads `loads`."""
        if on_progress is not None:
            self._on_progress = on_progress
        try:
            self.send(order)
            message = await self._first
            if message is None:
                raise errors.WorkerDiedError(
                    f"the engine's process ended while loading {loads!r} "
                    f"({exit_reason(self.returncode)})",
                    hint="the file may be damaged or too large for this machine; "
                    "see `localllm doctor`",
                )
            if "fatal" in message:
                await self.wait()
                raise errors.by_code(**message["fatal"])
            return message
        except BaseException:
            self.kill()
            await self.wait()
            raise

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.get_pid()

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        assert self._process is not None
        return self._process.get_returncode()

    @property
    def hears(self) -> bool:
        """False once nothing can be sent to it: a process that was killed stops hearing before its
        end is noticed."""
        return not self._ended.done() and not self._stdin.is_closing()

    async def wait(self) -> None:
        await asyncio.shield(self._ended)

    def listen(self, on_message: Hear, on_end: Callable[[], None]) -> None:
        """From now on `on_message` is called with each message that is no reply, and `on_end` once,
        after the last one, when the process has ended and its output is read to the end; at once,
        for what has come already."""
        unheard = self._unheard
        self._unheard = []
        for message in unheard:
            on_message(message)
        self._on_message = on_message
        self._on_end = on_end
        if self._ended.done():
            on_end()

    def send(self, message: Mapping[str, Any]) -> bool:
        """Queue a message for it; False when it can't hear any more."""
        if not self.hears:
            return False
        self._stdin.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        return True

    async def ask(self, message: Mapping[str, Any]) -> Any:
        """Send `message` and wait for the value that answers it. Raises the LocalLLMError it is
        answered with, or WorkerDiedError when the process ends first."""
        number = next(self._numbers)
        if not self.send({**message, "n": number}):
            raise self.death()
        self._replies[number] = asyncio.get_running_loop().create_future()
        return await self._replies[number]

    @property
    def has_waiters(self) -> bool:
        """True while a question is unanswered and somebody still waits for it."""
        return any(not reply.done() for reply in self._replies.values())

    def kill_hung(self, why: str) -> None:
        """End it because it hangs: `why` is what those who wait are told."""
        self._hangs = why
        self.kill()

    def death(self) -> errors.WorkerDiedError:
        if self._closing:
            return errors.WorkerDiedError("the model was unloaded")
        if self._hangs:
            return errors.WorkerDiedError(f"the engine's process hung and was ended: {self._hangs}")
        return errors.WorkerDiedError(
            f"the engine's process ended in mid-request ({exit_reason(self.returncode)})"
        )

    async def close(self) -> None:
        """Order it to end, and wait: it finishes what it is at, and is killed if that takes too
        long."""
        self._closing = True
        self.close_input()
        try:
            await asyncio.wait_for(self.wait(), STOP_GRACE_S)
        except TimeoutError:
            self.kill()
            await self.wait()

    def close_input(self) -> None:
        """Say nothing more: the end of its input is its order to close."""
        self._stdin.close()

    def kill(self) -> None:
        assert self._process is not None
        if self.returncode is None:
            self._process.send_signal(
                signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM
            )

    def _hear_first(self, message: dict[str, Any]) -> None:
        if self._first.done():
            self._unheard.append(message)
        elif "ready" not in message and "fatal" not in message:
            self._on_progress(message)
        else:
            self._first.set_result(message)

    def _take_reply(self, message: dict[str, Any]) -> None:
        reply = self._replies.pop(message["re"], None)
        if reply is None or reply.done():  # whoever asked is gone
            return
        if "error" in message:
            reply.set_exception(errors.by_code(**message["error"]))
        else:
            reply.set_result(message["value"])

    # --- what asyncio calls -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._process = cast("asyncio.SubprocessTransport", transport)
        self._stdin = cast("asyncio.WriteTransport", self._process.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Some of its output: any number of lines, the last perhaps in part."""
        lines = data.split(b"\n")
        if len(lines) == 1:
            self._pieces.append(data)
            return
        lines[0] = b"".join((*self._pieces, lines[0]))
        last = lines.pop()
        self._pieces = [last] if last else []
        try:
            for line in lines:
                message = _parsed(line)
                if "re" in message:
                    self._take_reply(message)
                else:
                    self._on_message(message)
        except ValueError:
            # What it says can't be trusted any more.
            self.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended, and its output is at the end."""
        self._ended.set_result(None)
        assert self._process is not None
        self._process.close()
        if not self._first.done():
            self._first.set_result(None)
        replies = self._replies
        self._replies = {}
        for reply in replies.values():
            if not reply.done():
                reply.set_exception(self.death())
        self._on_end()


def _parsed(line: bytes) -> dict[str, Any]:
    """The message of one line without space around it; raises ValueError."""
    text = line.decode()
    message, end = _decode(text)
    if end != len(text) or type(message) is not dict:
        raise ValueError("a line is not one JSON object")
    return message


def exit_reason(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "no exit code"
    if code < 0:
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


# --- how workers are started -----------------------------------------------------------------------

# GNU OpenMP's threads spin for milliseconds while they wait for each other, by default: harmless on
# an idle machine, ruinous when anybody else needs a core. Measured with SmolLM2 on two cores: with
# 1,000 turns decode is as fast as ever alone (0.93 of a bare loop through HTTP) and 42 tok/s beside
# one busy process, where the default falls to 8; with 300 it is 50, but 0.88 through HTTP; sleeping
# at once costs 60 % alone. Every thread that allocates gets a heap of its own, and every sliced
# prefill is a thread: over 1,500 mixed requests the worker grew by 10 %, with two heaps for all by
# 0.2 % (mallopt(3), M_ARENA_MAX).
# Sampling's sums are too short for numpy's threads to share, and to start those took half of the time
# in which numpy is imported.
_WORKER_ENVIRONMENT = {
    "GOMP_SPINCOUNT": "1000",
    "MALLOC_ARENA_MAX": "2",
    "OPENBLAS_NUM_THREADS": "1",
}
# Large allocations (weights that are laid out anew, KV, buffers) ask Linux for pages of 2 MiB,
# where it gives them only to who asks (transparent_hugepage/enabled is `madvise` on most
# distributions). Measured with llama-bench, with and without in turn: gpt-oss-20b is loaded in 6.6
# and 7.5 s for 12.7 and 29.2, since 2.5 million page faults are 5,000; 8B Q4 decodes 5 to 12 %
# faster, as fewer translations of addresses are missed. glibc's tunable, unknown to other C
# libraries.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# With pages of 64 KiB (some ARM kernels) a huge one has 512 MiB, and whoever touches a byte of it
# pays for them all.
_USUAL_PAGE_BYTES = 4096


def worker_environment() -> dict[str, str]:
    """The environment of every worker: this process's, and what native code reads there unless
    somebody chose it."""
    huge = {}
    if sys.platform == "linux" and os.sysconf("SC_PAGE_SIZE") == _USUAL_PAGE_BYTES:
        huge = _HUGE_PAGES
    return {**_WORKER_ENVIRONMENT, **huge, **os.environ}


# Those that wait to be told what they load, by their logs.
_ahead: dict[Path | None, JsonProcess] = {}
_WRITES_TEXT = "localllm.engine.worker.worker"


async def spawn(module: str, log_path: Path | None) -> JsonProcess:
    """Run the worker's `module`, which reads its code until it is told what to load."""
    command = (sys.executable, "-m", module)
    return await JsonProcess.spawn(command, worker_environment(), log_path)


async def start_ahead() -> None:
    """Start one that writes text; the next load of such a model takes it."""
    log = worker_log()
    _ahead[log] = await spawn(_WRITES_TEXT, log)


async def take(log_path: Path | None) -> JsonProcess:
    """One that writes text: what was started ahead, else a new one."""
    process = _ahead.pop(log_path, None)
    if process is not None and process.hears:
        return process
    return await spawn(_WRITES_TEXT, log_path)


async def end_ahead() -> None:
    """End what was started ahead and nobody took."""
    while _ahead:
        _, process = _ahead.popitem()
        # Where a kill is a wish (no SIGKILL), the end of its input ends it.
        process.close_input()
        process.kill()
        await process.wait()
