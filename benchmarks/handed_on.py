"""What it costs to reach a model through another of our servers: each request directly and through it, by turns.

    python -m benchmarks.handed_on [--rounds 20] [--model FILE]

Prints the time of a request for one token, the decode speed of an answer of 128, both ways, and the processor time that the
server in front took of each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.models import smollm2
from benchmarks.processes import Server
from benchmarks.rounds import interleave, report
from localllm.bench.ratio import RoundComparison
from localllm.bench.scenarios import user
from localllm.bench.stream import free_port

_CONFIG = """allow_upstream = ["127.0.0.1"]
[[upstream]]
name = "behind"
url = "http://127.0.0.1:{port}/v1"
models = ["{model}"]
"""
_STORY = user("Tell a long story about a lighthouse.")
_TOKENS = 128


def _server(name: str, folder: Path, *what: str) -> Server:
    port = free_port()
    environment = {f"LOCALLLM_{kind.upper()}_DIR": str(folder / kind) for kind in ("config", "data", "cache", "log")}
    command = [sys.executable, "-m", "localllm", "serve", *what, "--port", str(port), "--only", "--quiet"]
    return Server(name, command, port, environment=environment)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", type=Path, default=None)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        behind = _server("directly", Path(folder) / "behind", str(given.model or smollm2()))
        front = _server("through another", Path(folder) / "front")
        behind.start()
        try:
            front.model = behind.target.models()[0]
            config = Path(folder) / "front" / "config"
            config.mkdir(parents=True)
            (config / "config.toml").write_text(_CONFIG.format(port=behind.port, model=front.model))
            front.start()
            try:
                _compare(behind, front, given.rounds)
            finally:
                front.stop()
        finally:
            behind.stop()


def _compare(behind: Server, front: Server, rounds: int) -> None:
    for n_tokens, table in (
        (1, RoundComparison("a request for one token", "ms", "less")),
        (_TOKENS, RoundComparison(f"decode, {_TOKENS} tokens", "tok/s")),
    ):
        spent_s = front.cpu_s()
        interleave(rounds, partial(_ask, behind, n_tokens, table), partial(_ask, front, n_tokens, table))
        report(table, behind.name)
        spent_ms = (front.cpu_s() - spent_s) * 1e3 / rounds
        print(f"  processor time of the server in front: {spent_ms:.2f} ms a request")


def _ask(server: Server, n_tokens: int, table: RoundComparison) -> None:
    answer = server.target.chat(_STORY, n_tokens)
    table.add(server.name, answer.ttft_s * 1e3 if n_tokens == 1 else answer.decode_tok_s)


if __name__ == "__main__":
    main()
