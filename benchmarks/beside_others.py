"""Decode while other programs use the processors.

    python -m benchmarks.beside_others [--model FILE] [--rounds 5] [--llama-server PROGRAM |
    --without-peer]

Compared are localllm as it is (it yields to other programs), localllm with fixed threads, and
llama-server.

alone        one stream, no other load
neighbour    one stream, and a program that keeps one processor busy
two models   two servers of the same kind decode at the same time: tokens of both together
four         four streams, and the same program

All servers take turns in each round. The table has medians, and the smallest and largest round.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from benchmarks.models import serve_command, smollm2
from benchmarks.peers_setup import Wanted, llama_server
from benchmarks.processes import Server
from localllm.bench.scenarios import user
from localllm.bench.stream import BenchTarget, free_port

_TOKENS = 160
# Wait until the server's own work after loading is over.
_SETTLE_S = 15.0
_seeds = count()


@dataclass(frozen=True)
class Kind:
    """Two servers of the same kind."""

    name: str
    servers: tuple[Server, Server]


def _ours(name: str, model: Path, folder: Path, threads: int | None) -> Kind:
    servers = []
    for i in range(2):
        port = free_port()
        environment = {"LOCALLLM_CACHE_DIR": str(folder / f"{name}-{i}")}
        if threads is not None:
            environment["LOCALLLM_THREADS"] = str(threads)
        command = serve_command(model, port, "--context", "8192", "--quiet")
        servers.append(Server(name, command, port, "", environment, folder / f"{name}-{i}.log"))
    return Kind(name, (servers[0], servers[1]))


@contextlib.contextmanager
def _neighbour() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    time.sleep(0.5)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _together(targets: list[BenchTarget]) -> float:
    """Return the tokens per second of all targets together."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(len(targets)) as pool:
        asked = [
            pool.submit(t.chat, user(f"Tell a story about number {next(_seeds)}."), _TOKENS)
            for t in targets
        ]
        for answer in asked:
            answer.result()
    return _TOKENS * len(targets) / (time.perf_counter() - begun)


def measure(kind: Kind) -> dict[str, float]:
    """Measure one round."""
    one, other = (server.target for server in kind.servers)
    found = {"alone": _together([one]), "two models": _together([one, other])}
    with _neighbour():
        found["neighbour"] = _together([one])
        found["four"] = _together([one] * 4)
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-server", type=Path, default=None)
    parser.add_argument("--without-peer", action="store_true")
    args = parser.parse_args()
    model = args.model or smollm2()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ends:
        folder = Path(name)
        wanted = Wanted(model, args.llama_server, folder)
        kinds = [
            _ours("gives way", model, folder, None),
            _ours("fixed threads", model, folder, wanted.threads),
        ]
        if not args.without_peer:
            kinds.append(Kind("llama-server", (llama_server(wanted)[0], llama_server(wanted)[0])))
        for kind in kinds:
            for server in kind.servers:
                server.start()
                ends.callback(server.stop)
                server.target.chat(user("Warm up."), 8)
        time.sleep(_SETTLE_S)
        rounds: dict[str, list[dict[str, float]]] = {kind.name: [] for kind in kinds}
        for n in range(args.rounds):
            for kind in kinds if n % 2 else reversed(kinds):
                rounds[kind.name].append(measure(kind))
                print(
                    f"round {n + 1}/{args.rounds} {kind.name}: {rounds[kind.name][-1]}",
                    file=sys.stderr,
                    flush=True,
                )
    for what in ("alone", "neighbour", "two models", "four"):
        print(f"\n{what}, tok/s")
        for name, found in rounds.items():
            values = [figures[what] for figures in found]
            print(
                f"  {name:14} {statistics.median(values):6.1f}  "
                f"[{min(values):.1f}-{max(values):.1f}]"
            )


if __name__ == "__main__":
    main()
