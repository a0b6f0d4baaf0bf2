"""Time the processor's matrix kernels of the installed llama.cpp, in a process of its own: see the program it runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from localllm.device.kept import Shelf, Taken, Used
from localllm.device.types import MatrixRates

_PROGRAM = "localllm_backends.llamacpp.matrix_rate"
_PATIENCE_S = 60.0
# TFLOP/s of a machine, a build, a layout and a kind of product: see kept.py.
_SHELF = Shelf("matrix_rate.json", sane=(1e-4, 1000.0))
_KINDS = ("prompt_flops_s", "token_flops_s")


@dataclass(frozen=True, slots=True)
class Measurement(Taken):
    """TFLOP/s of one product of quantised matrices with `threads` threads. `others_share`: of the processor's time, what
    other programs had meanwhile."""

    tflops: float
    threads: int
    date: str
    others_share: float = 0.0

    @property
    def value(self) -> float:
        """TFLOP/s."""
        return round(self.tflops, 4)

    @property
    def how(self) -> str:
        """By what it was found."""
        return f"the installed llama.cpp's product of Q4_K matrices, {self.threads} thread(s)"


# Of each layout ("stored", and "laid_out" where there is one), of each kind of product.
Measurements = Mapping[str, Mapping[str, Measurement]]


def measure() -> Measurements | None:
    """Ask the build that a worker would run (a second or two); None where it gives no answer: plans then assume a rate."""
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
        threads, cpu_s = int(answer["threads"]), float(answer["cpu_s"])
        found = {name: {kind: float(rates[kind]) for kind in _KINDS} for name, rates in answer["rates"].items()}
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, AttributeError):
        return None
    others, date = before.others_share(Used.now(child_s=cpu_s)), time.strftime("%Y-%m-%d")
    return {
        name: {kind: Measurement(flops_s / 1e12, threads, date, others) for kind, flops_s in rates.items()}
        for name, rates in found.items()
    }


def due(folder: Path, machine: str) -> bool:
    """True where `machine` (with its build) was not measured, or only while it was busy."""
    return _SHELF.due(folder, _key(machine, "stored", _KINDS[0]))


def keep(folder: Path, machine: str, taken: Measurements) -> None:
    """Remember what was `taken` of `machine`."""
    for layout, rates in taken.items():
        for kind, measurement in rates.items():
            _SHELF.keep(folder, _key(machine, layout, kind), measurement)


def cached(folder: Path, machine: str, layout: str) -> MatrixRates | None:
    """What is known of `machine` with weights in that layout."""
    prompt, token = (_SHELF.cached(folder, _key(machine, layout, kind)) for kind in _KINDS)
    return MatrixRates(prompt, token) if prompt is not None and token is not None else None


def _key(machine: str, layout: str, kind: str) -> str:
    return f"{machine} | {layout} {kind}"
