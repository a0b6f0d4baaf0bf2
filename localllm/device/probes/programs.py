"""Run programs of the backends (localllm_backends/probe_process.py) in child processes.

A broken library may crash or hang there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ProgramAnswers:
    """Output of a program.

    - `answers`: the JSON objects it printed.
    - `stderr_lines`: the lines of its standard error.
    - `failure`: one sentence if it failed ("" = it ended well, with an answer).
    """

    answers: tuple[dict[str, Any], ...] = ()
    stderr_lines: tuple[str, ...] = ()
    failure: str = ""


def ask(
    program: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    on_answer: Callable[[dict[str, Any]], None] | None = None,
) -> ProgramAnswers:
    """Run the module `program` with this environment (None: this process's) and return its output.

    `on_answer` is called with each answer when it arrives, in a thread. Never raises.
    """
    # Its import takes milliseconds, and most commands run no program.
    import tempfile

    answers: list[dict[str, Any]] = []
    deadline_s = time.monotonic() + timeout_s
    is_late = False
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", f"localllm_backends.{program}", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(os.environ if environment is None else environment),
            )
        except OSError as e:
            return ProgramAnswers(failure=f"its process could not be started: {e}")
        # A process that the program started may hold the output open after the program's end.
        reader = threading.Thread(target=_read, args=[process, answers, on_answer], daemon=True)
        reader.start()
        try:
            reader.join(timeout_s)
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        stderr_text = errors.read().decode("utf-8", "replace")
    if is_late:
        return ProgramAnswers(tuple(answers), failure=f"it did not end in time ({timeout_s:.0f} s)")
    stderr_lines = tuple(line.strip() for line in stderr_text.splitlines() if line.strip())
    failure = "" if answers else "its answer can't be read"
    if process.returncode:
        if stderr_lines:
            reason = stderr_lines[-1][:300]
        else:
            reason = "it printed no answer"
        failure = f"its process ended with {_ending_text(process.returncode)}: {reason}"
    return ProgramAnswers(tuple(answers), stderr_lines, failure)


def _read(
    process: subprocess.Popen[bytes],
    answers: list[dict[str, Any]],
    on_answer: Callable[[dict[str, Any]], None] | None,
) -> None:
    """Add each answer of the process to `answers` when it arrives."""
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            for answer in _answers(line):
                answers.append(answer)
                if on_answer is not None:
                    on_answer(answer)


def _answers(line: bytes) -> list[dict[str, Any]]:
    """Return the JSON object of a line, if it has one. Drivers sometimes print to standard output
    too."""
    with suppress(ValueError):
        value = json.loads(line)
        if isinstance(value, dict):
            return [value]
    return []


def _ending_text(code: int) -> str:
    """Describe how a process ended, by its exit status."""
    signal_names = {int(sig): sig.name for sig in signal.Signals}
    if code < 0:
        return f"signal {signal_names.get(-code, -code)}"
    return f"exit code {code}"
