"""An hour of streams, disconnects, loads and swaps: memory, descriptors and threads.

python -m benchmarks.soak_hour [--minutes 60] [--streams 64] [--swap-s 10] [--model FILE] [--seed N]
[--out FILE]

`--streams` clients send the mix of soak_mix.py without pause; a quarter of them leave early. One
model stays loaded. Two others are loaded and unloaded in turn, every `--swap-s` seconds, and get a
quarter of the requests. The models are tiny, so that an hour has many requests; `--model` replaces
the one that stays.

A row has the medians of a sixth of the time. Bars, from the second row to the last: resident memory
grows by less than 2 %, descriptors by at most 4, threads by at most 2. No request hangs or is lost.

"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import psutil

from benchmarks.models import serve_command
from benchmarks.processes import Server, empty_home
from benchmarks.soak import unfinished, worker_of
from benchmarks.soak_mix import Ended, draw, send
from localllm.bench.stream import free_port

_ROWS = 6
_SAMPLE_S = 5.0
_MEMORY_BYTES, _DISK_BYTES = 20_000_000, 40_000_000
_CONTEXT = 16384
_SWAPPED = ("first", "second")
_SWAPPED_SHARE = 0.25
_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
_RSS_BAR, _DESCRIPTORS_BAR, _THREADS_BAR = 0.02, 4, 2


@dataclass(frozen=True)
class Use:
    """The resources of one process."""

    rss_bytes: float
    descriptors: float
    threads: float


@dataclass
class Hour:
    """The counts of a run. `samples`: the time since the start, and the use of each process by
    role."""

    began_s: float
    ends: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    swaps: int = 0
    samples: list[tuple[float, dict[str, Use]]] = field(default_factory=list)
    left_running: float = 0.0

    @property
    def at_s(self) -> float:
        return time.monotonic() - self.began_s

    def count(self, ended: Ended) -> None:
        self.ends[ended.end] += 1
        if ended.end in ("lost", "hung", "wrong", "failed"):
            self.bad.append(f"{ended.end} ({ended.ask.kind}): {ended.why}")


def _use(process: psutil.Process) -> Use:
    with process.oneshot():
        return Use(process.memory_info().rss, process.num_fds(), process.num_threads())


def _processes(server_pid: int, steady: psutil.Process) -> Iterator[tuple[str, psutil.Process]]:
    """Yield the server, the worker of the model that stays, and the server's other children
    together."""
    server = psutil.Process(server_pid)
    yield "server", server
    yield "worker", steady
    for child in server.children(recursive=True):
        if child.pid != steady.pid:
            yield "others", child


def _sample(server_pid: int, steady: psutil.Process) -> dict[str, Use]:
    found: dict[str, Use] = {}
    for role, process in _processes(server_pid, steady):
        # Another model's worker may end meanwhile.
        with suppress(psutil.Error):
            use, before = _use(process), found.get(role, Use(0, 0, 0))
            found[role] = Use(
                use.rss_bytes + before.rss_bytes,
                use.descriptors + before.descriptors,
                use.threads + before.threads,
            )
    return found


async def _watch(hour: Hour, server_pid: int, steady: psutil.Process, row_s: float) -> None:
    rows = 0
    while True:
        await asyncio.sleep(_SAMPLE_S)
        hour.samples.append((hour.at_s, _sample(server_pid, steady)))
        if hour.at_s >= (rows + 1) * row_s:
            _print_row(hour, rows, row_s)
            rows += 1


async def _client(
    http: httpx.AsyncClient, hour: Hour, until_s: float, rng: random.Random, loaded: list[str]
) -> None:
    while hour.at_s < until_s:
        model = loaded[0] if rng.random() < _SWAPPED_SHARE else "steady"
        ask = draw(rng)
        ended = await send(http, replace(ask, body={**ask.body, "model": model}))
        hour.count(ended)
        if ended.end == "refused":
            await asyncio.sleep(0.5)


async def _swap(
    http: httpx.AsyncClient, hour: Hour, until_s: float, pause_s: float, loaded: list[str]
) -> None:
    """Load the other model, send the clients to it, and unload the first one when it is idle."""
    while hour.at_s < until_s:
        await asyncio.sleep(pause_s)
        old, new = loaded[0], _SWAPPED[1 - _SWAPPED.index(loaded[0])]
        await _managed(http, "load", new)
        loaded[0] = new
        await _unload(http, old)
        hour.swaps += 1


async def _unload(http: httpx.AsyncClient, name: str) -> None:
    """Unload a model when its last request has ended. Until then the server rejects it."""
    while not await _managed(http, "unload", name):
        await asyncio.sleep(0.2)


async def _managed(http: httpx.AsyncClient, what: str, name: str) -> bool:
    """Send a load or unload. Return False if it was rejected, or if the idle connection was just
    closed."""
    try:
        reply = await http.post(f"/models/{what}", json={"model": name})
    except httpx.HTTPError:
        return False
    return reply.status_code == 200


def _row(hour: Hour, index: int, row_s: float) -> dict[str, Use]:
    """Return the medians of a row by role."""
    part = [s for at, s in hour.samples if index * row_s <= at < (index + 1) * row_s]
    found = {}
    for role in dict.fromkeys(role for sample in part for role in sample):
        uses = [sample[role] for sample in part if role in sample]
        found[role] = Use(
            statistics.median(u.rss_bytes for u in uses),
            statistics.median(u.descriptors for u in uses),
            statistics.median(u.threads for u in uses),
        )
    return found


def _print_row(hour: Hour, index: int, row_s: float) -> None:
    parts = [
        f"{role} {use.rss_bytes / 1e6:.1f} MB, {use.descriptors:g} descriptors, "
        f"{use.threads:g} threads"
        for role, use in _row(hour, index, row_s).items()
    ]
    print(
        f"{(index + 1) * row_s / 60:5.1f} min: {'; '.join(parts)}; "
        f"{hour.ends.total()} requests, {hour.swaps} swaps",
        flush=True,
    )


async def run(server: Server, plan: argparse.Namespace, hour: Hour) -> None:
    """Keep `plan.streams` clients busy until the end."""
    assert server.process is not None
    until_s = 60.0 * plan.minutes
    loaded = [_SWAPPED[0]]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=plan.streams)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", timeout=None, limits=limits, trust_env=False
    ) as http:
        # The other models are unloaded, so the remaining worker is that of the model that stays.
        for name in _SWAPPED:
            await _unload(http, name)
        steady = worker_of(server.process.pid)
        assert steady is not None, "no worker"
        await _managed(http, "load", loaded[0])
        watching = asyncio.create_task(_watch(hour, server.process.pid, steady, until_s / _ROWS))
        clients = [
            _client(http, hour, until_s, random.Random(f"{plan.seed} {i}"), loaded)
            for i in range(plan.streams)
        ]
        await asyncio.gather(*clients, _swap(http, hour, until_s, plan.swap_s, loaded))
        watching.cancel()
        hour.left_running = await unfinished(http)


def grown(second: dict[str, Use], last: dict[str, Use]) -> list[str]:
    """Return the figures that rose from the second row to the last by more than their bar."""
    found = []
    for role in ("server", "worker"):
        before, after = second[role], last[role]
        if after.rss_bytes > before.rss_bytes * (1 + _RSS_BAR):
            found.append(f"{role}: memory {after.rss_bytes / before.rss_bytes - 1:+.1%}")
        if after.descriptors > before.descriptors + _DESCRIPTORS_BAR:
            found.append(f"{role}: {after.descriptors - before.descriptors:+g} descriptors")
        if after.threads > before.threads + _THREADS_BAR:
            found.append(f"{role}: {after.threads - before.threads:+g} threads")
    return found


def _tell(hour: Hour, row_s: float, out: Path | None) -> bool:
    """Print the figures, and write the samples to `out`. Returns whether all bars are met."""
    rows = [_row(hour, i, row_s) for i in range(_ROWS)]
    rose = grown(rows[1], rows[-1])
    print(
        f"{hour.ends.total()} requests: {dict(hour.ends)}; {hour.swaps} swaps; still held by the "
        f"engine: {hour.left_running:g}"
    )
    for words, n in Counter(hour.bad).most_common(10):
        print(f"  {n} × {words}")
    print("level" if not rose else f"grown: {', '.join(rose)}")
    if out is not None:
        figures = [
            {"at_s": at_s, **{role: vars(use) for role, use in sample.items()}}
            for at_s, sample in hour.samples
        ]
        out.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return not (rose or hour.bad or hour.left_running)


def _models(folder: Path, steady: Path | None) -> list[Path]:
    from tests.models.tiny_gguf import write_llama

    found = [] if steady is None else [steady]
    for seed, name in enumerate(("steady", *_SWAPPED)[len(found) :]):
        found.append(
            write_llama(folder / f"{name}.gguf", seed=seed, n_ctx=_CONTEXT, template=_TEMPLATE)
        )
    return found


def main() -> None:
    """Run and report. The exit code is 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--swap-s", type=float, default=10.0)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    plan = parser.parse_args()
    hour = Hour(time.monotonic())
    with empty_home() as folder:
        for name, n_bytes in (("RAM", _MEMORY_BYTES), ("DISK", _DISK_BYTES)):
            os.environ[f"LOCALLLM_CACHE_{name}_GB"] = str(n_bytes / 1e9)
        models = _models(folder, plan.model)
        port = free_port()
        options = ["--context", str(_CONTEXT), "--parallel", str(plan.streams), "--only", "--quiet"]
        for model, name in zip(models, ("steady", *_SWAPPED), strict=True):
            if model.stem != name:
                options += ["--alias", f"{name}={model.stem}"]
        command = serve_command(models[0], port, *map(str, models[1:]), *options)
        server = Server("localllm", command, port, model="steady", log=folder / "log")
        server.start()
        hour.began_s = time.monotonic()
        try:
            asyncio.run(run(server, plan, hour))
        finally:
            server.stop()
    if not _tell(hour, 60.0 * plan.minutes / _ROWS, plan.out):
        sys.exit(1)


if __name__ == "__main__":
    main()
