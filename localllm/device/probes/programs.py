"""Run programs of the backends (localllm_backends/probe_process.py) in child processes.

A broken library may crash or hang there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
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
) -> ProgramAnswers:
    """Run the module `program` with this environment (None: this process's) and return its output.

    Never raises.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"localllm_backends.{program}", *arguments],
            capture_output=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            env=dict(os.environ if environment is None else environment),
        )
    except subprocess.TimeoutExpired as e:
        return ProgramAnswers(
            _answers(e.stdout), failure=f"it did not end in time ({timeout_s:.0f} s)"
        )
    except OSError as e:
        return ProgramAnswers(failure=f"its process could not be started: {e}")
    answers = _answers(done.stdout)
    lines = done.stderr.decode("utf-8", "replace").splitlines()
    stderr_lines = tuple(line.strip() for line in lines if line.strip())
    failure = "" if answers else "its answer can't be read"
    if done.returncode:
        if stderr_lines:
            last = stderr_lines[-1][:300]
        else:
            last = "it printed no answer"
        failure = f"its process ended with {_ending(done.returncode)}: {last}"
    return ProgramAnswers(answers, stderr_lines, failure)


def _answers(printed: bytes | None) -> tuple[dict[str, Any], ...]:
    """Return the JSON objects among the lines. Drivers sometimes print to standard output too."""
    found = []
    for line in (printed or b"").splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return tuple(value for value in found if isinstance(value, dict))


def _ending(code: int) -> str:
    """Describe how a process ended, by its exit status."""
    known = {int(one): one.name for one in signal.Signals}
    if code < 0:
        return f"signal {known.get(-code, -code)}"
    return f"exit code {code}"
