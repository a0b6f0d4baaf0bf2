"""A worker's end of the pipe to its parent, JSON lines (pipe.py is the other, which needs an event
loop: a worker has none, and reads no code of one)."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

from localllm.errors import (
    BackendError,
    DoesNotFitError,
    LocalLLMError,
    ModelFileError,
    OtherMachineGoneError,
    RequestError,
)
from localllm_backends.contract import BackendFailure, OtherMachineError, OutOfMemoryError

Message = dict[str, Any]
# How long a process may take to end once nobody speaks to it any more: it may have gigabytes to
# write.
_LAST_S = 120.0
Loaded = TypeVar("Loaded")
# What stops a model from being loaded; all else is the fault of its files.
_AT_LOADING: dict[type[Exception], type[LocalLLMError]] = {
    OutOfMemoryError: DoesNotFitError,
    OtherMachineError: OtherMachineGoneError,
}


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a worker says of itself: for how long it has been at the call it is in (0: in none), the
    steps it has done and the longest of them. One that doesn't say it is `silent`, and `busy_s` for
    as long as it has been."""

    busy_s: float
    steps: int = 0
    longest_step_s: float = 0.0
    silent: bool = False


class ChildPipe:
    """The worker's end. Reads `source` in one thread; any thread may write to `sink`.

    in   what to load, in one line; then messages, of which those with a number "n" are questions;
         the end of the input is the order to close
    out  {"loading": 0.4} … {"ready": …} | {"fatal": {…}}; then {"re": n, "value": …} or
         {"re": n, "error": {…}} for each question, and whatever the worker has to say unasked"""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source = source
        self._sink = sink
        self._lock = threading.Lock()
        self.gone = False

    @classmethod
    def of_this_process(cls) -> ChildPipe:
        """The pipe on standard input and output, which nothing else may use from now on."""
        # Ctrl-C in the terminal, its closing, and a service manager's SIGTERM reach the whole
        # process group. The parent decides when we stop: the end of our input says so, which comes
        # too if the parent is killed.
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        # Native code prints to stdout at times, and Python can't exit while a thread reads its own
        # stdin: the protocol has descriptors of its own.
        pipe = cls(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
        os.dup2(2, 1)
        return pipe

    def load(self, load: Callable[[Message], Loaded]) -> Loaded:
        """What `load` makes of the first line. Where it raises a LocalLLMError or a BackendFailure,
        the parent is told and the process exits."""
        line = self._source.readline()
        if not line:
            sys.exit(0)
        try:
            return load(json.loads(line))
        except (LocalLLMError, BackendFailure) as e:
            error = _as_error(e, _AT_LOADING.get(type(e), ModelFileError))
            self.send({"fatal": _error_json(error)})
            sys.exit(error.exit_code)

    def hear(self, receive: Callable[[Message], None]) -> None:
        """Call `receive` with every message until the last. A question that it fails at is answered
        with its error, never dropped: somebody waits for it."""
        for line in self._source:
            message: Message = {}
            try:
                message = json.loads(line)
                receive(message)
            except Exception as e:
                if "n" in message:
                    self.send(
                        {"re": message["n"], "error": _error_json(_as_error(e, BackendError))}
                    )
            if self.gone:
                return

    def exit_soon(self) -> None:
        """The input has ended: the process has some time left to finish, then it ends whatever it
        is at. Without a parent nobody else would end one that hangs."""
        timer = threading.Timer(_LAST_S, os._exit, [1])
        timer.daemon = True
        timer.start()

    def answer(self, question: Message, value: Any) -> None:
        """Answer a message that has a number."""
        self.send({"re": question["n"], "value": value})

    def reply(self, question: Message, find: Callable[[], Any]) -> None:
        """Answer a message that has a number with what `find` finds, or with the error it ends
        in."""
        try:
            self.answer(question, find())
        except Exception as e:
            self.send({"re": question["n"], "error": _error_json(_as_error(e, RequestError))})

    def send(self, message: Message) -> None:
        self.send_line(json.dumps(message, separators=(",", ":")) + "\n")

    def send_line(self, line: str) -> None:
        """Write a message that is JSON text already, with its line end. `gone` is set when nobody
        hears it."""
        data = line.encode()
        with self._lock:
            try:
                self._sink.write(data)
                self._sink.flush()
            except (BrokenPipeError, ValueError):
                self.gone = True


def reason(error: Exception) -> str:
    """What went wrong: an error made for people in its own words, any other with the name of its
    class."""
    if isinstance(error, LocalLLMError | BackendFailure):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _as_error(error: Exception, otherwise: type[LocalLLMError]) -> LocalLLMError:
    if isinstance(error, LocalLLMError):
        return error
    hint = error.hint if isinstance(error, BackendFailure) else ""
    if hint:
        return otherwise(reason(error), hint=hint)
    return otherwise(reason(error))


def _error_json(error: LocalLLMError) -> dict[str, Any]:
    return {
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "counts": getattr(error, "counts", None),
    }
