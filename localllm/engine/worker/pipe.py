"""The parent's end of the pipe to a worker process, with JSON lines, and the start of such
processes.

The worker's end is in child_pipe.py. A message with "raw" is followed by that many bytes, which
become its "data". The child answers questions. Its other messages go to a
callback, because a StreamReader and a task would cost one more turn of the event loop per token.
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

MessageCallback = Callable[[dict[str, Any]], None]
# seconds. A process that was told to close is killed if it runs longer than this. It may have half
# a gigabyte to write.
STOP_GRACE_S = 10.0
# The function that json.loads calls in the end. Its wrappers take longer than decoding a short
# message.
_decode = json.JSONDecoder().raw_decode


class JsonProcess(asyncio.SubprocessProtocol):
    """A running child process. Its messages are kept until `listen` is called."""

    def __init__(self) -> None:
        self._first: asyncio.Future[dict[str, Any] | None] = (
            asyncio.get_running_loop().create_future()
        )
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Set when it has its model, or has ended without one.
        self.ordered = asyncio.Event()
        self._on_message: MessageCallback = self._buffer_message
        self._on_end: Callable[[], None] = lambda: None
        self._on_progress: MessageCallback = lambda _: None
        self._buffered: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._closing = False
        self._hangs = ""
        self._pieces: list[bytes] = []
        # The message whose data arrives, and the data so far.
        self._announced: dict[str, Any] = {}
        self._data = bytearray()
        self._process: asyncio.SubprocessTransport | None = None

    @classmethod
    async def spawn(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        log_path: Path | None = None,
    ) -> JsonProcess:
        """Run `command`, which imports its code and waits for `load`.

        Its stderr is appended to `log_path`, or dropped.
        """
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
        self,
        order: Mapping[str, Any],
        *,
        model_name: str,
        on_progress: MessageCallback | None = None,
    ) -> dict[str, Any]:
        """Send `order`, and wait for {"ready": …}. Other messages before that go to `on_progress`.

        Ends the process if loading fails. Raises the LocalLLMError from {"fatal": …}, or
        WorkerDiedError if the process ends without a message. `model_name` is the model's name for
        the error.
        """
        if on_progress is not None:
            self._on_progress = on_progress
        try:
            self.send(order)
            self.ordered.set()
            message = await self._first
            if message is None:
                raise errors.WorkerDiedError(
                    f"the engine's process ended while loading {model_name!r} "
                    f"({exit_reason(self.returncode)})",
                    hint=_hint_of(self.returncode)
                    or "the file may be damaged or too large for this machine; "
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
        """The exit code, negative for a signal; None while the process runs."""
        assert self._process is not None
        return self._process.get_returncode()

    @property
    def can_send(self) -> bool:
        """False once no message can be sent. A killed process stops reading before its end is
        noticed.
        """
        return not self._ended.done() and not self._stdin.is_closing()

    async def wait(self) -> None:
        await asyncio.shield(self._ended)

    def listen(self, on_message: MessageCallback, on_end: Callable[[], None]) -> None:
        """Set the callbacks for messages and for the end of the process.

        `on_message` is called with each message that is not a reply. `on_end` is called once,
        after the process has ended and all its output is read. Messages that came earlier are
        delivered at once.
        """
        buffered = self._buffered
        self._buffered = []
        for message in buffered:
            on_message(message)
        self._on_message = on_message
        self._on_end = on_end
        if self._ended.done():
            on_end()

    def send(self, message: Mapping[str, Any]) -> bool:
        """Queue a message for the process. Returns False if the process no longer reads."""
        if not self.can_send:
            return False
        self._stdin.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        return True

    async def ask(self, message: Mapping[str, Any]) -> Any:
        """Send `message` and wait for its answer.

        Raises the LocalLLMError in the answer, or WorkerDiedError if the process ends first.
        """
        number = next(self._numbers)
        if not self.send({**message, "n": number}):
            raise self.death()
        self._replies[number] = asyncio.get_running_loop().create_future()
        return await self._replies[number]

    @property
    def has_waiters(self) -> bool:
        """True while a caller waits for the answer to a question."""
        return any(not reply.done() for reply in self._replies.values())

    def kill_hung(self, reason: str) -> None:
        """Kill the process because it hangs. `reason` is reported to the waiting callers."""
        self._hangs = reason
        self.kill()

    def death(self) -> errors.WorkerDiedError:
        if self._closing:
            return errors.WorkerDiedError("the model was unloaded")
        if self._hangs:
            return errors.WorkerDiedError(
                f"the engine's process hung and was stopped: {self._hangs}"
            )
        return errors.WorkerDiedError(
            f"the engine's process ended during the request ({exit_reason(self.returncode)})",
            hint=_hint_of(self.returncode),
        )

    async def close(self) -> None:
        """Tell the process to end, and wait. It finishes its current work, but is killed after
        STOP_GRACE_S.
        """
        self._closing = True
        self.close_input()
        try:
            await asyncio.wait_for(self.wait(), STOP_GRACE_S)
        except TimeoutError:
            self.kill()
            await self.wait()

    def close_input(self) -> None:
        """Close its input, which tells the process to close."""
        self._stdin.close()

    def kill(self) -> None:
        assert self._process is not None
        if self.returncode is None:
            self._process.send_signal(
                signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM
            )

    def _buffer_message(self, message: dict[str, Any]) -> None:
        if self._first.done():
            self._buffered.append(message)
        elif "ready" not in message and "fatal" not in message:
            self._on_progress(message)
        else:
            self._first.set_result(message)

    def _take_reply(self, message: dict[str, Any]) -> None:
        reply = self._replies.pop(message["re"], None)
        if reply is None or reply.done():  # the caller no longer waits
            return
        if "error" in message:
            reply.set_exception(errors.by_code(**message["error"]))
        else:
            reply.set_result(message["value"])

    # --- called by asyncio ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._process = cast("asyncio.SubprocessTransport", transport)
        self._stdin = cast("asyncio.WriteTransport", self._process.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Handle some of its output."""
        while data:
            data = self._take_data(data) if self._announced else self._take_lines(data)

    def _take_data(self, data: bytes) -> bytes:
        """Add to the data of the announced message. Returns the output after it."""
        left = self._announced["raw"] - len(self._data)
        self._data += data[:left]
        if len(data) >= left:
            message = self._announced
            message["data"] = bytes(self._data)
            self._announced = {}
            self._data.clear()
            self._on_message(message)
        return data[left:]

    def _take_lines(self, data: bytes) -> bytes:
        """Handle any number of lines, the last one possibly incomplete. Returns the output after a
        line that announces data.
        """
        lines = data.split(b"\n")
        if len(lines) == 1:
            self._pieces.append(data)
            return b""
        lines[0] = b"".join((*self._pieces, lines[0]))
        last = lines.pop()
        self._pieces = [last] if last else []
        try:
            for i, line in enumerate(lines):
                message = _parsed(line)
                if "re" in message:
                    self._take_reply(message)
                elif message.get("raw"):
                    self._announced = message
                    self._pieces = []
                    return b"\n".join([*lines[i + 1 :], last])
                else:
                    self._on_message(message)
        except ValueError:
            # Its output can no longer be trusted.
            self.kill()
        return b""

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the process, after all its output is read."""
        self._ended.set_result(None)
        self.ordered.set()
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
    """The message of one line without surrounding space. Raises ValueError."""
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


def _hint_of(code: int | None) -> str | None:
    """Return the next step after an exit code with only one cause."""
    if code is None or exit_reason(code) != "signal SIGILL":
        return None
    return (
        "its llama.cpp was compiled for another processor, or by a compiler with a fault: "
        "`localllm setup --engine latest` installs one that fits"
    )


# --- starting workers -----------------------------------------------------------------------------

# GOMP_SPINCOUNT: by default, threads of GNU OpenMP spin for milliseconds while they wait for each
# other. That is harmless on an idle machine, but very slow if another process needs a core.
# Measured with SmolLM2 on two cores, through HTTP. With 1,000 turns, decoding alone has 0.93 of the
# speed of a bare loop; with one busy process it reaches 42 tok/s (default: 8 tok/s). With 300 turns
# it has 0.88 alone and reaches 50 tok/s. With 0 turns, decoding alone loses 60 %.
#
# MALLOC_ARENA_MAX: each thread that allocates gets a heap of its own, and each sliced prefill is a
# thread. Over 1,500 mixed requests the worker grew by 10 %, and with two heaps in total by 0.2 %
# (mallopt(3), M_ARENA_MAX).
#
# MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_: glibc raises the first limit with each larger
# block that is freed, up to 32 MiB. Then exported KV comes from the heap, and its memory stays
# there when it is freed. With 64 streams, a worker kept 67 MB of free memory; with these limits it
# keeps 16 MB.
#
# OPENBLAS_NUM_THREADS: the sums in sampling are too short to be shared by numpy's threads.
# Starting the threads took half of numpy's import time.
_WORKER_ENVIRONMENT = {
    "GOMP_SPINCOUNT": "1000",
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(4 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**20),
    "OPENBLAS_NUM_THREADS": "1",
}
# Large allocations (repacked weights, KV, buffers) ask Linux for pages of 2 MiB. Most
# distributions give these only on request (transparent_hugepage/enabled is `madvise`). Measured
# with llama-bench, alternately with and without: gpt-oss-20b loads in 6.6 and 7.5 s instead of
# 12.7 and 29.2 s, because there are 5,000 page faults instead of 2.5 million. An 8B model in Q4
# decodes 5 to 12 % faster, because there are fewer TLB misses. This is a tunable of glibc, unknown
# to other C libraries.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# With pages of 64 KiB (some ARM kernels) a huge page has 512 MiB. Touching one byte allocates all
# of it.
_USUAL_PAGE_BYTES = 4096


def worker_environment() -> dict[str, str]:
    """The environment of every worker: that of this process, plus defaults for settings of native
    code.

    A setting that is already in this process's environment is kept.
    """
    huge = {}
    if sys.platform == "linux" and os.sysconf("SC_PAGE_SIZE") == _USUAL_PAGE_BYTES:
        huge = _HUGE_PAGES
    return {**_WORKER_ENVIRONMENT, **huge, **os.environ}


# Processes that wait for their model, by log path.
_ahead: dict[Path | None, JsonProcess] = {}
_WRITES_TEXT = "localllm.engine.worker.worker"


async def spawn(module: str, log_path: Path | None) -> JsonProcess:
    """Run the worker's `module`, which imports its code and waits for its model."""
    command = (sys.executable, "-m", module)
    return await JsonProcess.spawn(command, worker_environment(), log_path)


async def start_ahead() -> None:
    """Start a text-generating worker in advance. The next load of such a model uses it."""
    log = worker_log()
    _ahead[log] = await spawn(_WRITES_TEXT, log)


def prepare_ahead(path: Path, backend: str) -> None:
    """Let the workers that were started in advance initialise `backend` for the model at `path`,
    while its load options are planned. To be called in the thread of their event loop."""
    for process in _ahead.values():
        process.send({"prepare": str(path), "backend": backend})


async def ordered_ahead() -> None:
    """Wait until the workers that were started in advance have their models."""
    for process in [*_ahead.values()]:
        await process.ordered.wait()


async def take(log_path: Path | None) -> JsonProcess:
    """A text-generating worker: the one started in advance, else a new one."""
    process = _ahead.pop(log_path, None)
    if process is not None and process.can_send:
        return process
    return await spawn(_WRITES_TEXT, log_path)


async def end_ahead() -> None:
    """End workers that were started in advance and not used."""
    while _ahead:
        _, process = _ahead.popitem()
        # On systems without SIGKILL a kill may have no effect. The end of its input then ends the
        # process.
        process.close_input()
        process.kill()
        await process.wait()
