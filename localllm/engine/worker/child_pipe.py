"""The worker's end of the pipe to its parent, with JSON lines.

The parent's end is in pipe.py. It needs an event loop. A worker does not use or import one.
"""

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
    LibraryError,
    LocalLLMError,
    ModelFileError,
    OtherMachineGoneError,
    RequestError,
)
from localllm_backends.contract import (
    BackendFailure,
    OtherMachineError,
    OutOfMemoryError,
    UnusableEngineError,
)

Message = dict[str, Any]
# How long the process may take to end after its input has ended: it may have gigabytes to write.
_LAST_S = 120.0
Loaded = TypeVar("Loaded")
# Reasons outside the model that stop it from being loaded. Any other reason is an error in its
# files.
_AT_LOADING: dict[type[Exception], type[LocalLLMError]] = {
    OutOfMemoryError: DoesNotFitError,
    OtherMachineError: OtherMachineGoneError,
    UnusableEngineError: LibraryError,
}


@dataclass(frozen=True, slots=True)
class Pulse:
    """A worker's status.

    `busy_s`: seconds that its current call has lasted (0: it is in no call).
    `steps`: the steps it has computed.
    `longest_step_s`: the longest of them.
    `silent`: it does not report its status. `busy_s` is then the time since its last report.
    """

    busy_s: float
    steps: int = 0
    longest_step_s: float = 0.0
    silent: bool = False


class ChildPipe:
    """The worker's end. One thread reads `source`; any thread may write to `sink`.

    in   {"prepare": path} if the model is known before its load options; the load options. Then
         messages follow, and those with a number "n" are questions. The end of the input tells the
         worker to close.
    out  {"loading": 0.4} … {"ready": …} | {"fatal": {…}}; then {"re": n, "value": …} or
         {"re": n, "error": {…}} for each question, and any other messages. A message with "raw"
         is followed by that many bytes
    """

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source = source
        self._sink = sink
        self._lock = threading.Lock()
        self.gone = False

    @classmethod
    def of_this_process(cls) -> ChildPipe:
        """Return the pipe on standard input and output, which no other code may use from now on."""
        # Ctrl-C in the terminal, its closing, and a service manager's SIGTERM reach the entire
        # process group. But the parent decides when the worker stops: it closes the worker's
        # input. The input also ends if the parent is killed.
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        # Native code sometimes prints to stdout, and Python can't exit while a thread reads its
        # own stdin. So the protocol has its own file descriptors.
        pipe = cls(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
        os.dup2(2, 1)
        return pipe

    def load(
        self,
        load: Callable[[Message], Loaded],
        prepare: Callable[[Message], None] | None = None,
    ) -> Loaded:
        """Return the result of `load` for the load options. `prepare` gets the messages before
        them.

        If `load` raises a LocalLLMError or a BackendFailure, the error is sent to the parent and
        the process exits.
        """
        message: Message = {"prepare": ""}
        while "prepare" in message:
            line = self._source.readline()
            if not line:
                sys.exit(0)
            message = json.loads(line)
            if "prepare" in message and prepare is not None:
                prepare(message)
        try:
            return load(message)
        except (LocalLLMError, BackendFailure) as e:
            error = _as_error(e, _AT_LOADING.get(type(e), ModelFileError))
            self.send({"fatal": _error_json(error)})
            sys.exit(error.exit_code)

    def read_messages(self, receive: Callable[[Message], None]) -> None:
        """Call `receive` with every message until the last.

        If a question fails, its error is sent as the answer, because the parent waits for one.
        """
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
        """Limit the time to finish after the input has ended. Then the process ends, whatever it
        does.

        After the parent's end no other process would end a worker that hangs.
        """
        timer = threading.Timer(_LAST_S, os._exit, [1])
        timer.daemon = True
        timer.start()

    def answer(self, question: Message, value: Any) -> None:
        """Answer a message that has a number."""
        self.send({"re": question["n"], "value": value})

    def reply(self, question: Message, find: Callable[[], Any]) -> None:
        """Answer a message that has a number with the result of `find`, or with the error that it
        raises.
        """
        try:
            self.answer(question, find())
        except Exception as e:
            self.send({"re": question["n"], "error": _error_json(_as_error(e, RequestError))})

    def send(self, message: Message) -> None:
        self.send_line(json.dumps(message, separators=(",", ":")) + "\n")

    def send_line(self, line: str) -> None:
        """Write a message that is JSON text already, with its line end.

        Sets `gone` if the parent no longer reads.
        """
        self._write(line.encode())

    def send_raw(self, message: Message, data: bytes) -> None:
        """Write a message, and the `data` that belong to it."""
        head = json.dumps({**message, "raw": len(data)}, separators=(",", ":"))
        self._write(head.encode() + b"\n" + data)

    def _write(self, data: bytes) -> None:
        with self._lock:
            try:
                self._sink.write(data)
                self._sink.flush()
            except (BrokenPipeError, ValueError):
                self.gone = True


def reason(error: Exception) -> str:
    """The error as text. Errors made for people keep their words, others get the name of their
    class.
    """
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
