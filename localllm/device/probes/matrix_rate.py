"""Time the processor's matrix kernels of the installed llama.cpp, in a process of its own: see the program it runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass

from localllm.device.kept import BUSY_SHARE, Shelf, Used
from localllm.device.types import Figure

_PROGRAM = "localllm_backends.llamacpp.matrix_rate"
_PATIENCE_S = 30.0
# Of a machine and a build, kept: see kept.py.
SHELF = Shelf("matrix_rate.json", sane=(0.001, 100.0))


@dataclass(frozen=True, slots=True)
class Measurement:
    """Dense TFLOP/s of one product of quantised matrices with `threads` threads. `others_share`: of the processor's
    time, what other programs had meanwhile."""

    tflops: float
    threads: int
    date: str
    others_share: float = 0.0

    @property
    def busy(self) -> bool:
        """True where other programs had so much of the machine that the figure is theirs as much as the processor's."""
        return self.others_share > BUSY_SHARE

    @property
    def figure(self) -> Figure:
        """The rate, with how it was found."""
        beside = f", while other programs had {self.others_share:.0%} of the processor" if self.busy else ""
        source = f"the installed llama.cpp's product of Q4_K matrices, {self.threads} thread(s), {self.date}{beside}"
        return Figure(round(self.tflops, 4), "measured", source)


def measure() -> Measurement | None:
    """Ask the build that a worker would run (about a second); None where it gives no answer: plans then assume a rate."""
    before = Used.now()
    try:
        done = subprocess.run(
            [sys.executable, "-m", _PROGRAM],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        answer = json.loads(done.stdout.strip().rpartition("\n")[2])
        flops_s, threads, cpu_s = float(answer["flops_s"]), int(answer["threads"]), float(answer["cpu_s"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None
    others = before.others_share(Used.now(child_s=cpu_s))
    return Measurement(flops_s / 1e12, threads, time.strftime("%Y-%m-%d"), others)
