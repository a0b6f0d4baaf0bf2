"""A long day in minutes: mixed requests with disconnects, memory use, then kills of the worker.

python -m benchmarks.soak [--requests 3000] [--restarts 5] [--kills 20] [--model FILE] [--seed N]
[--out FILE]

Bars: no request hangs or is lost. In the last tenth, reuse is at least 95 % of that of a reference
with the same budgets (soak_reuse.py), and the cache is within its budgets at every sample. Resident
memory of server and worker grows by less than 2 % over the last two thirds. After each kill, every
request in flight ends with a finish or an error within 5 s.

Memory is sampled every 25 ended requests. Growth compares the median of the last tenth of the
samples in these two thirds with that of their first tenth. Settings limit the prefix cache (100 MB
here, about 4,400 tokens of SmolLM2, and twice that on disk), so it is full long before. With
restarts (SIGTERM, then a start with the same folders) growth is printed but has no bar, because
every start begins again. Reuse is compared for models whose state can be truncated anywhere.

"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from benchmarks.models import serve_command, smollm2
from benchmarks.processes import Server, empty_home
from benchmarks.reference_cache import ReferenceCache
from benchmarks.soak_mix import Ask, Ended, Events, draw, flowing, send, unique
from benchmarks.soak_reuse import Budgets, Reuse, measured
from localllm.bench.stream import free_port

CLIENTS = 12
IN_FLIGHT = (4, 6)
_MEMORY_BYTES, _DISK_BYTES = 100_000_000, 200_000_000
_SAMPLE_EVERY = 25
_WORKER = "localllm.engine.worker.worker"
_END_BAR_S, _GROWTH_BAR, _REUSE_BAR = 5.0, 0.02, 0.95
_RECOVERY_TRIES = 120
_MOMENTS = ("decode", "prefill", "load", "idle")


@dataclass
class Report:
    """The results of a soak. `refused` counts requests that were rejected after a kill. They are
    not in `ends`."""

    ends: list[Ended] = field(default_factory=list)
    reuse: Reuse | None = None
    rss_bytes: dict[str, list[int]] = field(default_factory=lambda: {"server": [], "worker": []})
    left_running: float = 0.0
    after_kill_s: dict[str, list[float]] = field(default_factory=dict)
    recovery_s: list[float] = field(default_factory=list)
    longest_wait_s: float = 0.0
    refused: int = 0

    def count(self) -> Counter[str]:
        """Return the number of requests by kind of end."""
        return Counter(e.end for e in self.ends)

    def bad(self) -> list[Ended]:
        """Return the requests with a forbidden end."""
        return [e for e in self.ends if e.end in ("lost", "hung", "wrong")]


def growth(samples: list[int]) -> float:
    """Return the growth over the last two thirds: the median of their last tenth ÷ that of their
    first, minus one."""
    window = samples[len(samples) // 3 :]
    tenth = max(1, len(window) // 10)
    return statistics.median(window[-tenth:]) / statistics.median(window[:tenth]) - 1


def worker_of(server_pid: int, *, besides: int = 0) -> psutil.Process | None:
    """Return the server's worker process with a pid other than `besides`, or None if there is
    none."""
    for child in psutil.Process(server_pid).children():
        try:
            if (
                child.pid != besides
                and child.status() != psutil.STATUS_ZOMBIE
                and _WORKER in child.cmdline()
            ):
                return child
        except psutil.NoSuchProcess:
            continue
    return None


async def soak(
    http: httpx.AsyncClient, server_pid: int, asks: Sequence[Ask], report: Report
) -> None:
    """Send `asks` from CLIENTS clients, and watch the memory of the server and its worker."""
    waiting = list(reversed(asks))
    server = psutil.Process(server_pid)

    async def client() -> None:
        while waiting:
            ask = waiting.pop()
            report.ends.append(
                await (report.reuse.send(http, ask) if report.reuse else send(http, ask))
            )
            n = len(report.ends)
            if n % _SAMPLE_EVERY == 0:
                if report.reuse is not None:
                    await report.reuse.sample(http)
                worker = worker_of(server_pid)
                report.rss_bytes["server"].append(server.memory_info().rss)
                report.rss_bytes["worker"].append(
                    worker.memory_info().rss if worker is not None else 0
                )
            if n % 250 == 0:
                said = {k: v[-1] // 10**6 for k, v in report.rss_bytes.items()}
                print(f"  {n} of {len(asks)}: {dict(report.count())}, MB: {said}", file=sys.stderr)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    report.left_running = await unfinished(http)


async def unfinished(http: httpx.AsyncClient) -> float:
    """Return the requests that the engine still has shortly after the last client left. More than 0
    means that some were never cancelled."""
    held: list[str] = []
    for _ in range(50):
        page = (await http.get("/metrics")).text
        held = re.findall(r"^localllm_(?:running|waiting)\{.*\} (\S+)$", page, re.M)
        if held and not any(map(float, held)):
            return 0.0
        await asyncio.sleep(0.1)
    return sum(map(float, held)) if held else float("nan")


async def kill(
    http: httpx.AsyncClient, server_pid: int, moment: str, rng: random.Random, report: Report
) -> None:
    """Kill the worker once at a random point of `moment` with requests in flight. Then wait until a
    request succeeds."""
    victim = worker_of(server_pid)
    assert victim is not None, "no worker to kill"
    events = [Events() for _ in range(rng.randint(*IN_FLIGHT))]

    def fly() -> list[asyncio.Task[Ended]]:
        return [asyncio.create_task(send(http, _flight(moment, rng), e)) for e in events]

    killed = time.monotonic()
    if moment in ("idle", "load"):
        victim.kill()
        # After the kill, send a request that reaches the dead worker, or one that starts the next
        # worker.
        await asyncio.sleep(0.2 if moment == "load" else 0.1 * rng.random())
    flight = fly()
    if moment == "decode":
        wanted = rng.randint(1, 60)
        while max(e.words for e in events) < wanted and not all(f.done() for f in flight):
            await asyncio.sleep(0.002)
    elif moment == "prefill":
        await asyncio.sleep(0.02 + 0.6 * rng.random())
    elif moment == "load":
        while (loading := worker_of(server_pid, besides=victim.pid)) is None:
            await asyncio.sleep(0.005)
            # rejected: a worker that crashed often is not restarted immediately
            if all(f.done() for f in flight):
                early = [f.result() for f in flight]
                report.ends += [e for e in early if e.end != "refused"]
                report.refused += sum(e.end == "refused" for e in early)
                await asyncio.sleep(0.5)
                flight = fly()
        victim = loading
        await asyncio.sleep(0.5 * rng.random())
    if moment != "idle":
        killed = time.monotonic()
        victim.kill()
    recovery = asyncio.create_task(_recover(http, report))
    ends = await asyncio.gather(*flight)
    report.ends += ends
    # A request without a token yet is retried once, and takes as long as any other.
    worst = max((e.at_s for e in ends if e.end != "finished"), default=killed) - killed
    report.after_kill_s.setdefault(moment, []).append(worst)
    report.recovery_s.append(await recovery - killed)
    ways = dict(Counter(f"{e.end} {e.why}".strip() for e in ends))
    print(
        f"  killed in {moment}: {ways} within {worst:.2f} s, served again after "
        f"{report.recovery_s[-1]:.2f} s",
        file=sys.stderr,
    )


async def _recover(http: httpx.AsyncClient, report: Report) -> float:
    """Return the time (time.monotonic) at which a new request succeeded, with retries while it is
    rejected. Return infinity if none did."""
    for _ in range(_RECOVERY_TRIES):
        again = await send(http, flowing("Say hello.", 4))
        report.longest_wait_s = max(report.longest_wait_s, again.took_s)
        if again.end != "refused":
            report.ends.append(again)
        if again.end == "finished":
            return again.at_s
        report.refused += again.end == "refused"
        await asyncio.sleep(0.5)
    return float("inf")


def _flight(moment: str, rng: random.Random) -> Ask:
    if moment == "prefill":
        return flowing(unique(rng, 340), 8)
    return flowing(f"Tell story number {rng.randrange(10_000)}.", 300 if moment == "decode" else 8)


async def run(server: Server, plan: argparse.Namespace, cache: Path, report: Report) -> None:
    """Run the soak with its restarts, and then the kills. The server is running and stores its
    cache files in `cache`. Results are added to `report`."""
    rng = random.Random(plan.seed)
    asks = [draw(rng) for _ in range(plan.requests)]
    starts = plan.restarts + 1
    for i in range(starts):
        if i:
            server.stop()
            server.start()
        async with _clients(server) as http:
            if report.reuse is None:
                token_bytes = await measured(http, flowing("Warm up.", 4))
                reference = ReferenceCache(_MEMORY_BYTES, _DISK_BYTES, token_bytes)
                report.reuse = Reuse(reference, Budgets(_MEMORY_BYTES, _DISK_BYTES, cache))
            else:
                report.reuse.restart()
            part = asks[len(asks) * i // starts : len(asks) * (i + 1) // starts]
            await soak(http, _pid(server), part, report)
    async with _clients(server) as http:
        for i in range(plan.kills):
            await kill(http, _pid(server), _MOMENTS[i % len(_MOMENTS)], rng, report)


def _clients(server: Server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=CLIENTS)
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", timeout=None, limits=limits, trust_env=False
    )


def _pid(server: Server) -> int:
    assert server.process is not None
    return server.process.pid


def tell(report: Report) -> dict[str, object]:
    """Print the figures and return them."""
    figures: dict[str, object] = {"ends": dict(report.count()), "left_running": report.left_running}
    print(
        f"\n{len(report.ends)} requests: {dict(report.count())}; still held by the engine: "
        f"{report.left_running:g}"
    )
    codes = Counter(e.why for e in report.ends if e.end == "failed")
    print(f"  errors: {dict(codes)}; slowest answer {max(e.took_s for e in report.ends):.1f} s")
    for e in report.bad()[:20]:
        print(f"  {e.end} ({e.ask.kind}, after {e.took_s:.1f} s): {e.why}")
    if report.reuse is not None:
        figures["reuse"] = report.reuse.tell()
    for name, samples in report.rss_bytes.items():
        if len(samples) < 6:
            continue
        figures[name] = {
            "first": samples[0],
            "last": samples[-1],
            "most": max(samples),
            "growth": growth(samples),
        }
        print(
            f"  {name}: {samples[0] / 1e6:.1f} MB at first, "
            f"{samples[len(samples) // 3] / 1e6:.1f} at a third, "
            f"{samples[-1] / 1e6:.1f} at last, at most {max(samples) / 1e6:.1f}; "
            f"growth over the last two thirds {100 * growth(samples):+.2f} % (bar "
            f"{100 * _GROWTH_BAR:g} %)"
        )
    for moment, worst in report.after_kill_s.items():
        print(
            f"  {len(worst)} kills in {moment}: all ended within {max(worst):.2f} s (bar "
            f"{_END_BAR_S:g} s)"
        )
    if report.recovery_s:
        middle, most = statistics.median(report.recovery_s), max(report.recovery_s)
        print(
            f"  served again {middle:.2f} s after a kill (median), {most:.2f} s at most; "
            f"a request behind one waited {report.longest_wait_s:.2f} s at most for its end, "
            f"{report.refused} were refused"
        )
    return {**figures, "after_kill_s": report.after_kill_s, "recovery_s": report.recovery_s}


def main() -> None:
    """Run and report. The exit code is 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    port, report = free_port(), Report()
    with empty_home() as folder:
        for name, n_bytes in (("RAM", _MEMORY_BYTES), ("DISK", _DISK_BYTES)):
            os.environ[f"LOCALLLM_CACHE_{name}_GB"] = str(n_bytes / 1e9)
        model = str(arguments.model or smollm2())
        command = serve_command(model, port, "--context", "8192", "--quiet")
        server = Server("localllm", command, port)
        server.start()
        try:
            asyncio.run(run(server, arguments, folder / "cache" / "prefixes", report))
        finally:
            server.stop()
            # Print the results even if the run is interrupted.
            figures = tell(report)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    grown = [growth(s) for s in report.rss_bytes.values() if len(s) >= 6 and not arguments.restarts]
    slow = [s for worst in report.after_kill_s.values() for s in worst if s > _END_BAR_S]
    down = float("inf") in report.recovery_s
    reuse = report.reuse
    computed_twice = reuse is not None and (reuse.tenths()[-1] < _REUSE_BAR or bool(reuse.broken))
    if (
        report.bad()
        or report.left_running
        or slow
        or down
        or computed_twice
        or any(g > _GROWTH_BAR for g in grown)
    ):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
