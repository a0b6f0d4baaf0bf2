"""Ask a build of llama.cpp for its devices, in a process of its own: a driver that crashes or hangs costs that process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from localllm.device import ggml

_PROGRAM = "localllm_backends.llamacpp.devices"
# The first start of a CUDA or Metal library compiles or unpacks; a driver that takes longer is not coming back.
_PATIENCE_S = 60.0


def ask(environment: Mapping[str, str] | None = None, *, timeout_s: float = _PATIENCE_S) -> ggml.GgmlBuild:
    """The build that a worker with this environment (default: this process's) would run, and its devices. Never raises:
    what went wrong is the GgmlBuild's `failure`."""
    command = [sys.executable, "-m", _PROGRAM]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            env=dict(os.environ if environment is None else environment),
        )
    except subprocess.TimeoutExpired:
        return ggml.GgmlBuild(
            failure=f"it hung while it looked for devices ({timeout_s:.0f} s): a driver may be broken"
        )
    except OSError as e:
        return ggml.GgmlBuild(failure=f"its process could not be started: {e}")
    said = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        last = said[-1][:300] if said else "it said nothing"
        return ggml.GgmlBuild(failure=f"its process ended with {_ending(done.returncode)}: {last}")
    try:
        # Drivers print to standard output at times: the answer is the last line of it. What backends that are loaded with
        # the bindings say of their devices is on standard error.
        answer = json.loads(done.stdout.strip().rpartition("\n")[2])
        return ggml.read({**answer, "said": [*answer["said"], *said]})
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        return ggml.GgmlBuild(failure=f"its answer can't be read ({type(e).__name__}: {e})")


def _ending(code: int) -> str:
    if code < 0:
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"
