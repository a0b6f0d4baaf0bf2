"""Compares localllm's numpy bandwidth measurement with a compiled STREAM on this machine: same threads, interleaved.

Usage: python benchmarks/bandwidth_vs_stream.py [ROUNDS]. Needs a C compiler with OpenMP. Prints the median of each
and the ratios; the bar is 0.85 to 1.15 to one of them. Other load moves both, which is why the runs alternate.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from localllm.device import bandwidth
from localllm.device.parsers.linux import last_level_cache_bytes
from localllm.device.probes.systems import read

_SECONDS = 1.0


def main() -> int:
    """Run ROUNDS alternating pairs and print a table; exit status 1 when it is within 15 % of neither."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    cache = last_level_cache_bytes(read())
    size = bandwidth.array_bytes(0, cache)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ours: list[bandwidth.Measurement] = []
    theirs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "stream"
        source = Path(__file__).with_name("stream.c")
        subprocess.run(["cc", "-O3", "-march=native", "-fopenmp", "-o", program, source], check=True)
        for _ in range(rounds):
            ours.append(bandwidth.rates(threads=threads, cache_bytes=cache, seconds=_SECONDS))
            theirs.append(_stream(program, size // 2, threads))
    print(f"{platform.processor() or platform.machine()}, {threads} threads, {size >> 20} MiB, LLC {cache >> 20} MiB")
    print(f"median of {rounds} interleaved rounds, GB/s (lowest to highest)")
    figures = [measured.figure.value for measured in ours]
    rows = {
        "ours: copy": [m.copy_gbps for m in ours],
        "ours: read": [m.read_gbps for m in ours],
        "ours: figure used": figures,
        "STREAM copy": [t["copy"] for t in theirs],
        "STREAM triad": [t["triad"] for t in theirs],
    }
    for label, values in rows.items():
        print(f"  {label:<18} {statistics.median(values):7.1f}  ({min(values):.1f} to {max(values):.1f})")
    inside = False
    for kernel in ("copy", "triad"):
        reference = rows[f"STREAM {kernel}"]
        ratio = statistics.median(figures) / statistics.median(reference)
        paired = statistics.median(f / r for f, r in zip(figures, reference, strict=True))
        print(f"  figure ÷ STREAM {kernel}: {ratio:.3f} of the medians, {paired:.3f} median of the pairs")
        inside = inside or 0.85 <= ratio <= 1.15
    return 0 if inside else 1


def _stream(program: Path, array_bytes: int, threads: int) -> dict[str, float]:
    done = subprocess.run(
        [program, str(array_bytes), str(_SECONDS)],
        capture_output=True,
        text=True,
        check=True,
        # Passive: a thread that waits for the other must not take its processor on a busy machine, as ours doesn't.
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"},
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    sys.exit(main())
