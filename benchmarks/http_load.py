"""64 clients for 30 s, a quarter of them leaving in mid-answer: errors, p99 of /health (bar: 100 ms), memory growth.

python -m benchmarks.http_load [--clients 64] [--seconds 30]
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import multiprocessing
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

import httpx
import psutil

from benchmarks.models import serve_command, smollm2
from benchmarks.processes import Server, empty_home
from benchmarks.soak_mix import flowing, send
from benchmarks.timing import percentile
from localllm.bench.stream import free_port

LEAVING = 0.25
HEALTH_BAR_MS = 100.0
_HEALTH_PERIOD_S = 0.05
# The first seconds fill caches: growth is what comes behind them.
_WARM_S = 5.0


@dataclass
class Seen:
    """What the clients saw: counts by outcome, /health's times in ms, resident bytes of the server's processes."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    health_ms: list[float] = field(default_factory=list)
    server_bytes: list[tuple[float, int]] = field(default_factory=list)
    worker_bytes: list[tuple[float, int]] = field(default_factory=list)

    @property
    def errors(self) -> int:
        """Everything that is neither an answer, a client's own leaving, nor the server's word that it is busy."""
        return sum(n for name, n in self.outcomes.items() if name not in ("finished", "left", "refused"))


async def _client(http: httpx.AsyncClient, number: int, end_s: float, seen: Seen) -> None:
    rng = random.Random(number)
    while time.monotonic() < end_s:
        ask = flowing(f"Count from {number} to {rng.randrange(10**6)}.", 16)
        if rng.random() < LEAVING:
            ask = replace(ask, leave_events=5)
        ended = await send(http, ask)
        seen.outcomes[ended.end] += 1
        if ended.end == "refused":
            await asyncio.sleep(1.0)


def health_ms(url: str, seconds: float) -> list[float]:
    """How long /health takes, asked again and again for `seconds`, in milliseconds. For a process of its own: beside the
    clients their work would be measured, not the server's."""
    times: list[float] = []
    end_s = time.monotonic() + seconds
    with httpx.Client(base_url=url, trust_env=False, timeout=120) as http:
        while time.monotonic() < end_s:
            started = time.perf_counter()
            http.get("/health").raise_for_status()
            times.append((time.perf_counter() - started) * 1e3)
            time.sleep(_HEALTH_PERIOD_S)
    return times


async def _watch(process: psutil.Process, end_s: float, seen: Seen) -> None:
    while time.monotonic() < end_s:
        now = time.monotonic()
        seen.server_bytes.append((now, process.memory_info().rss))
        seen.worker_bytes.append((now, sum(p.memory_info().rss for p in process.children(recursive=True))))
        await asyncio.sleep(_HEALTH_PERIOD_S)


async def _load(url: str, process: psutil.Process, clients: int, seconds: float) -> Seen:
    seen = Seen()
    limits = httpx.Limits(max_connections=clients)
    # Started afresh, not forked: a copy of this loop would be no other process's.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120, limits=limits) as many:
            asked = asyncio.get_running_loop().run_in_executor(apart, health_ms, url, seconds)
            end_s = time.monotonic() + seconds
            await asyncio.gather(_watch(process, end_s, seen), *(_client(many, i, end_s, seen) for i in range(clients)))
            seen.health_ms = await asked
    return seen


def _growth_mb(samples: list[tuple[float, int]]) -> float:
    """Median of the last third less median of the first third behind the warm-up, in MB."""
    late = [size for at, size in samples if at >= samples[0][0] + _WARM_S]
    third = max(1, len(late) // 3)
    return (sorted(late[-third:])[third // 2] - sorted(late[:third])[third // 2]) / 1e6 if late else 0.0


def main() -> None:
    """Run and report; the exit status says whether every bar was met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    with empty_home():
        port = free_port()
        command = serve_command(smollm2(), port, "--quiet")
        server = Server("localllm", command, port)
        server.start()
        try:
            assert server.process is not None
            process = psutil.Process(server.process.pid)
            seen = asyncio.run(_load(f"http://127.0.0.1:{port}", process, given.clients, given.seconds))
        finally:
            server.stop()
    p99_ms = percentile(seen.health_ms, 0.99)
    print(f"{given.clients} clients, {given.seconds:g} s, load average {os.getloadavg()[0]:.1f}: {dict(seen.outcomes)}")
    print(f"errors: {seen.errors} (bar 0)")
    print(
        f"/health: p50 {percentile(seen.health_ms, 0.5):.1f} ms, p99 {p99_ms:.1f} ms (bar {HEALTH_BAR_MS:g}), "
        f"{len(seen.health_ms)} asked"
    )
    print(f"memory: server {_growth_mb(seen.server_bytes):+.1f} MB, worker {_growth_mb(seen.worker_bytes):+.1f} MB")
    sys.exit(int(seen.errors > 0 or p99_ms > HEALTH_BAR_MS))


if __name__ == "__main__":
    main()
