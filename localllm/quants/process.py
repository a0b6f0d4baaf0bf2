"""Run a program of the backends in a child process, and read its messages while it works."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

from localllm.errors import BackendError

# Time in seconds that a program gets to end by itself after its input has ended.
_EXIT_WAIT_S = 10.0
# If other programs are running, threads that spin while they wait for each other are very slow
# (engine/worker/supervisor.py).
_SPIN_COUNT = "1000"
# Lines that are no messages: the last ones explain why a program ended.
_N_OUTPUT_LINES = 20


class BackendProgram:
    """`python -m localllm_backends.PROGRAM`, which reads an order from its standard input.

    The program ends when its input ends: with `close`, or when this process ends.
    """

    def __init__(self, program: str, order: dict[str, Any]) -> None:
        self._stdout_lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._output_lines: deque[str] = deque(maxlen=_N_OUTPUT_LINES)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"localllm_backends.{program}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={"GOMP_SPINCOUNT": _SPIN_COUNT, **os.environ},
            )
        except OSError as e:
            raise BackendError(f"the process for this work can't be started: {e}") from e
        threading.Thread(target=self._read, name="program", daemon=True).start()
        self._input = cast("Any", self._process.stdin)
        with suppress(OSError):  # it has ended: its output shows that
            self._input.write(json.dumps(order).encode() + b"\n")
            self._input.flush()

    def _read(self) -> None:
        with cast("Any", self._process.stdout) as output:
            for line in output:
                self._stdout_lines.put(line)
        self._stdout_lines.put(b"")

    def messages(self, every_s: float) -> Iterator[dict[str, Any]]:
        """Yield each message, and an empty one after every `every_s` seconds without one.

        Ends after a message with `done`. Raises BackendError for a message with `error`, and if the
        program ends without either.
        """
        while True:
            try:
                line = self._stdout_lines.get(timeout=every_s)
            except queue.Empty:
                yield {}
                continue
            if not line:
                raise self._exit_error()
            message = self._parsed_message(line)
            if message is None:
                continue
            if "error" in message:
                raise BackendError(message["error"], hint=message.get("hint") or None)
            yield message
            if "done" in message:
                return

    def _parsed_message(self, line: bytes) -> dict[str, Any] | None:
        """Return the message in `line`; None if the line is a library's own output."""
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if isinstance(message, dict):
            return message
        text = line.decode("utf-8", "replace").strip()
        if text:
            self._output_lines.append(text)
        return None

    def _exit_error(self) -> BackendError:
        code = self._process.wait()
        last = "it printed no reason"
        if self._output_lines:
            last = self._output_lines[-1][:300]
        return BackendError(
            f"the engine's process ended with code {code}: {last}",
            hint="check the file with `localllm models verify`; if it is whole, report this error",
        )

    def close(self) -> None:
        """End the program, and wait until it has removed what it had written."""
        with suppress(OSError):
            self._input.close()
        try:
            self._process.wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
