"""From the start of a server to ready: `localllm serve` and llama-server in turn, on the starter model.

    python -m benchmarks start [--llama-server PROGRAM] [--model FILE] [--rounds 9] [--json FILE]

Ready is the first 200 of /health. The first token is that of a chat request sent at that moment.
The processor time is that of all processes of the server until it is ready: on few cores it
decides. Compiled Python files are written first, by starts that are not measured.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.models import serve_command, smollm2
from benchmarks.peers_setup import built
from benchmarks.processes import Server, empty_home
from benchmarks.rounds import interleave, report
from localllm.bench.ratio import RoundComparison
from localllm.bench.stream import free_port

_ASK_AGAIN_S = 0.002
_LONGEST_S = 120.0


def wait_until_healthy(server: Server) -> None:
    """Return when /health of `server` answers with 200. Raises SystemExit if that takes too long."""
    latest = time.perf_counter() + _LONGEST_S
    while time.perf_counter() < latest:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=_LONGEST_S)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(_ASK_AGAIN_S)
    raise SystemExit(f"{server.name} was not ready after {_LONGEST_S:.0f} s")


def ask(server: Server) -> None:
    """Ask for one token. Raises SystemExit unless the server answers it."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=_LONGEST_S)
    messages = [{"role": "user", "content": "Hello"}]
    body = json.dumps({"messages": messages, "max_tokens": 1})
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"{server.name} answered {answer.status}: {said[:200]!r}")


def started(server: Server) -> tuple[float, float, float]:
    """Start `server` and end it. Returns seconds until it was ready, processor seconds until then,
    and seconds until the first token."""
    environment = {**os.environ, **server.environment}
    begun = time.perf_counter()
    server.process = subprocess.Popen(
        server.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        wait_until_healthy(server)
        ready_s = time.perf_counter() - begun
        cpu_s = server.cpu_s()
        ask(server)
        return ready_s, cpu_s, time.perf_counter() - begun
    finally:
        server.stop()


def main() -> None:
    """Start both servers in turn, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--llama-server", type=Path, default=None)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    model = str(options.model or smollm2())
    theirs = options.llama_server or built("llama-server")
    if theirs is None:
        raise SystemExit("there is no llama-server: --llama-server PROGRAM")
    n_ctx = str(options.context)
    # Without this variable, Python writes compiled files, as on users' machines.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with empty_home():
        port, port_of_theirs = free_port(), free_port()
        ours = Server("localllm", serve_command(model, port, "--context", n_ctx), port)
        command = [str(theirs), "-m", model, "-c", n_ctx, "--port", str(port_of_theirs)]
        peer = Server("llama-server", command, port_of_theirs)
        seconds = RoundComparison("start to ready", "s", "less")
        first_token = RoundComparison("start to first token", "s", "less")
        processor = RoundComparison("processor time until ready", "s", "less")

        def run(server: Server) -> None:
            ready_s, cpu_s, token_s = started(server)
            seconds.add(server.name, ready_s)
            first_token.add(server.name, token_s)
            processor.add(server.name, cpu_s)

        for server in (ours, peer):
            print(f"{server.name}: {started(server)[0]:.2f} s at first", file=sys.stderr)
        interleave(options.rounds, lambda: run(ours), lambda: run(peer))
    report([seconds, first_token, processor], "localllm", options.json)
    for name in ("localllm", "llama-server"):
        min_s = min(seconds.known_values(name))
        min_processor_s = min(processor.known_values(name))
        print(f"{name}: at least {min_s:.3f} s, processor {min_processor_s:.2f} s")


if __name__ == "__main__":
    main()
