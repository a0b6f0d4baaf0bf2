"""Run untrusted work in a warm child process with limits.

The process is ended if one question takes too much CPU time or memory, or if its answer is no
longer wanted.

`LimitedChild` is the parent's end. The module that the child runs calls `serve`. Both ends exchange
lines of JSON. The parent first sends the setup, then questions. The child sends:
* {"pid": …} when a process is ready for the next question,
* {"answer": …} or {"refused": …} with the number of the question,
* {"ended": …} after a process has ended.

If the system supports fork, the child forks that process, so that replacing it is cheap.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, cast

import psutil

from localllm.errors import LocalLLMError

# Interval in seconds between checks of the process while an answer is awaited.
_POLL_S = 0.02
# Address space that is reserved but hardly touched: a deep stack (grammars/deep_stack.py), and
# memory that the allocator holds ready for each thread.
_RESERVED_BYTES = 160 * 2**20
# Number of cached answers, and the maximum length of each.
_REMEMBERED = 64
_REMEMBERED_CHARS = 2**15
# Minimum size of a pipe's buffer.
_PIPE_BYTES = 2**16
Take = Callable[[Any, str], None]


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Limits for one answer.

    `cpu_s`: CPU time in seconds.
    `memory_bytes`: memory above the process's idle level.
    `nice`: value passed to os.nice, which lowers the priority.
    `spare_bytes`: additional address space that the work may reserve and hardly touches.
    """

    cpu_s: float
    memory_bytes: int
    nice: int = 0
    spare_bytes: int = _RESERVED_BYTES


class ChildError(LocalLLMError, code="child_ended", http_status=503):
    """There is no answer: no process could be started, it ended, or the answer was no longer
    wanted."""


class OverLimitError(ChildError, code="over_limit"):
    """The work was ended because it exceeded a limit."""


class RefusedError(ChildError, code="child_refused"):
    """The child refused the question and gave the reason."""


@dataclass
class LimitedChild:
    """`python -m module`, started at the first question.

    `setup` returns the value that `serve` passes to the function that makes the handler. Threads
    that ask at the same time take turns.
    """

    module: str
    limits: ChildLimits
    setup: Callable[[], Any] = dict
    _process: _Process | None = None
    _closed: bool = False
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, question: Any, wanted: Callable[[], bool] | None = None) -> Any:
        """Return the child's answer. Blocks until it arrives.

        The work is ended when `wanted` returns False. Raises OverLimitError, RefusedError or
        another ChildError.
        """

        def is_wanted() -> bool:
            return not self._closed and (wanted is None or wanted())

        with self._turn:
            if self._process is None or self._process.ended:
                self._process = _Process(self)
            return self._process.answer(question, is_wanted)

    def close(self) -> None:
        """End the child permanently, even during work."""
        self._closed = True
        with self._turn:
            if self._process is not None:
                self._process.close()


class Stages:
    """Children with increasing limits, each with a thread of its own.

    A question that exceeds the limits of one child goes to the queue of the next one. So a small
    question waits for each earlier question at most as long as the first limits allow.
    """

    def __init__(self, children: Sequence[LimitedChild]) -> None:
        self._children = children
        self._threads = [ThreadPoolExecutor(1, "stage") for _ in range(len(children) or 1)]
        self._answers: dict[Any, Any] = {}

    def submit(self, question: Any, wanted: Callable[[], bool], take: Take, stage: int = 0) -> None:
        """Queue a hashable `question` for an answer while `wanted` returns True.

        `take` is called with the answer, or with None and the reason. Without children, the answer
        is the question itself.
        """
        self._threads[stage].submit(self._work, question, wanted, take, stage)

    def close(self) -> None:
        """End all work, and wait for the threads."""
        for child in self._children:
            child.close()
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)

    def _work(self, question: Any, wanted: Callable[[], bool], take: Take, stage: int) -> None:
        answer = self._answers.get(question)
        reason = ""
        try:
            if answer is None and wanted():
                if self._children:
                    answer = self._children[stage].ask(question, wanted)
                else:
                    answer = question
                if len(str(answer)) <= _REMEMBERED_CHARS:  # the same question is often asked again
                    self._answers[question] = answer
                if len(self._answers) > _REMEMBERED:
                    self._answers.pop(next(iter(self._answers)), None)
        except ChildError as e:
            if isinstance(e, OverLimitError) and stage + 1 < len(self._threads):
                self.submit(question, wanted, take, stage + 1)
                return
            reason = str(e)
        take(answer, reason)


class _Process:
    """One child process, and the process in it that does the work."""

    def __init__(self, child: LimitedChild) -> None:
        self._limits = child.limits
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._worker: psutil.Process | None = None
        self._rest_bytes = self._held_bytes = self._n_questions = 0
        first = {"limits": asdict(child.limits), "setup": child.setup()}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", child.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as e:
            raise ChildError(f"its child process can't be started ({e})") from e
        threading.Thread(target=self._begin, args=[first], name="child", daemon=True).start()

    @property
    def ended(self) -> bool:
        """True after the child process has ended."""
        return self._process.poll() is not None

    def answer(self, question: Any, wanted: Callable[[], bool]) -> Any:
        while self._worker is None:
            self._worker = self._ready(self._next_message(wanted))
        self._n_questions += 1
        n_bytes = self._send([self._n_questions, question])
        ended = True
        reply: dict[str, Any] = {"of": 0}
        try:
            while reply.get("of", self._n_questions) != self._n_questions:
                reply = self._next_message(wanted, self._limits)
            ended = "ended" in reply or self._held_bytes > self._limits.memory_bytes / 2
        finally:
            if ended:
                self._end_worker()
            if ended and n_bytes > _PIPE_BYTES:
                self.close()  # a new process would otherwise read the rest of the old question
        if "ended" in reply:
            if reply["ended"] == getattr(signal, "SIGPROF", None):
                raise _over_time(self._limits)
            raise _over_memory(self._limits)
        if "refused" in reply:
            raise RefusedError(reply["refused"])
        return reply["answer"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._end_worker()
        with suppress(OSError):  # closing flushes input that the child no longer reads
            cast("BinaryIO", self._process.stdin).close()

    def _end_worker(self) -> None:
        worker = self._worker
        self._worker = None
        if worker is not None:
            with suppress(psutil.Error):
                worker.kill()
            if worker.pid == self._process.pid:
                self._process.wait()

    def _ready(self, message: dict[str, Any]) -> psutil.Process | None:
        """Return the process that is ready for a question, or None if `message` is about something
        else."""
        self._rest_bytes = 0
        with suppress(psutil.Error, KeyError):
            worker = psutil.Process(message["pid"])
            self._rest_bytes = worker.memory_info().rss
            return worker
        return None

    def _begin(self, first: Any) -> None:
        """Send the setup, then queue the child's output lines until it ends."""
        self._send(first)
        with cast("BinaryIO", self._process.stdout) as stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put(b"")

    def _send(self, message: Any) -> int:
        """Send `message` and return its size in bytes."""
        with suppress(OSError, ValueError):  # the child has ended: its output shows that
            return _write(cast("BinaryIO", self._process.stdin), message)
        return 0

    def _next_message(
        self, wanted: Callable[[], bool], limits: ChildLimits | None = None
    ) -> dict[str, Any]:
        """Return the child's next message. Raises OverLimitError if the work exceeds `limits`
        first."""
        self._held_bytes = 0
        before_s = None
        while True:
            try:
                line = self._lines.get(timeout=_POLL_S)
            except queue.Empty:
                if not wanted():
                    raise ChildError("its caller stopped waiting") from None
                if limits is not None:
                    before_s = self._check_limits(limits, before_s)
                continue
            if not line:
                raise ChildError("its process ended")
            with suppress(ValueError):  # skip a line that was cut short
                message: dict[str, Any] = json.loads(line)
                return message

    def _check_limits(self, limits: ChildLimits, before_s: float | None) -> float:
        """Return the CPU seconds that the process had used before the work.

        Raises OverLimitError if the work has exceeded a limit.
        """
        assert self._worker is not None
        try:
            with self._worker.oneshot():
                times = self._worker.cpu_times()
                held_bytes = self._worker.memory_info().rss
        except psutil.Error:  # the child has ended: its output shows that
            return before_s or 0.0
        spent_s = times.user + times.system
        if before_s is None:
            before_s = spent_s - _POLL_S
        self._held_bytes = held_bytes - self._rest_bytes
        if spent_s - before_s > limits.cpu_s:
            raise _over_time(limits)
        if self._held_bytes > limits.memory_bytes:
            raise _over_memory(limits)
        return before_s


def _over_time(limits: ChildLimits) -> OverLimitError:
    return OverLimitError(f"it takes more than {limits.cpu_s:g} s of computing")


def _over_memory(limits: ChildLimits) -> OverLimitError:
    return OverLimitError(f"it takes more than {limits.memory_bytes >> 20} MiB of memory")


# --- the child ------------------------------------------------------------------------------------


def serve(make: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Serve questions from standard input on standard output, as the child.

    `make` builds the handler from the setup. An exception that the handler raises is sent to the
    parent as the reason.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # the parent decides when the child stops
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    # Native code sometimes prints to stdout, so answers use a duplicate of it.
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    first = json.loads(source.readline())
    limits = ChildLimits(**first["limits"])
    answer = make(first["setup"])
    while hasattr(os, "fork"):
        worker = os.fork()
        if not worker:
            break
        _, status = os.waitpid(worker, 0)
        if not status:  # the input has ended
            return
        sink.write(b"\n")  # the worker may have ended within a line
        _write(sink, {"ended": status & 0x7F})
    _bound(limits)
    _write(sink, {"pid": os.getpid()})
    for line in source:
        _bound_time(limits.cpu_s)
        try:
            number, question = json.loads(line)
        except ValueError:  # the rest of a question that an ended process was reading
            continue
        line = b""  # it may be long
        try:
            reply = {"of": number, "answer": answer(question)}
        except MemoryError:
            os._exit(1)
        except Exception as e:
            reply = {"of": number, "refused": str(e) or type(e).__name__}
        _bound_time(0.0)
        _write(sink, reply)


def _write(sink: BinaryIO, message: Any) -> int:
    n_bytes = sink.write(json.dumps(message).encode() + b"\n")
    sink.flush()
    return n_bytes


def _bound_time(cpu_s: float) -> None:
    """Let the system end this process after `cpu_s` seconds of CPU time (0: never).

    This also works after the parent has died.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _bound(limits: ChildLimits) -> None:
    """Lower the priority of this process, and limit its address space if the system can."""
    try:
        import resource

        os.nice(limits.nice)
        max_bytes = psutil.Process().memory_info().vms + limits.memory_bytes + limits.spare_bytes
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    except (ImportError, OSError, ValueError):  # Windows; macOS can't limit the address space
        pass
