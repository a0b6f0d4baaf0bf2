"""While a model loads: how long `localllm serve` takes to answer /health and /v1/models (bar: 100 ms).

    python -m benchmarks.while_loading [--model FILE] [--rounds 5]

Asks in turn, as fast as it is answered, from the first answer until the model is loaded; then as often again. Prints
the first answer after the start, and p50, p99 and the longest of each path, loading and loaded.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.models import serve_command, smollm2
from benchmarks.timing import percentile
from localllm.bench.stream import free_port

_PATHS = ("/health", "/v1/models")
_BAR_S = 0.1
_LEAST_ASKED = 50


def main() -> None:
    """Measure, print, and exit 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    loading: list[float] = []
    loaded: list[float] = []
    firsts: list[float] = []
    for _ in range(args.rounds):
        _round(str(args.model or smollm2()), firsts, loading, loaded)
    print(f"first answer after the start: {', '.join(f'{s:.2f}' for s in firsts)} s")
    for name, times in (("loading", loading), ("loaded", loaded)):
        p50, p99, longest = (percentile(times, share) * 1e3 for share in (0.5, 0.99, 1.0))
        print(f"{name:8} {len(times):5} answers: p50 {p50:.1f}, p99 {p99:.1f}, longest {longest:.1f} ms")
    sys.exit(1 if percentile(loading, 0.99) > _BAR_S else 0)


def _round(model: str, firsts: list[float], loading: list[float], loaded: list[float]) -> None:
    port = free_port()
    command = serve_command(model, port, "--only", "--quiet")
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        # Accepted from the start; answered once the server's code is read.
        while True:
            try:
                _ask(port, "/health")
                break
            except OSError:
                time.sleep(0.005)
        firsts.append(time.perf_counter() - begun)
        done = 0
        while done < _LEAST_ASKED:
            for path in _PATHS:
                status, took_s, body = _ask(port, path)
                ready = status == 200 and (path != "/health" or body.get("status") == "ok")
                (loaded if done else loading).append(took_s)
                done += bool(path == "/health" and (done or ready))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def _ask(port: int, path: str) -> tuple[int, float, dict[str, object]]:
    begun = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        body = json.loads(reply.read())
        return reply.status, time.perf_counter() - begun, body
    finally:
        connection.close()


if __name__ == "__main__":
    main()
