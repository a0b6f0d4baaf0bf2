"""Decode through HTTP streaming against a bare llama_decode loop, client on the same cores (bar: 0.90 ×).

python -m benchmarks.http_overhead [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import tempfile

from benchmarks.engine_overhead import Bare
from benchmarks.models import serve_command, smollm2
from benchmarks.processes import Server
from benchmarks.rounds import interleave, report
from localllm.bench.ratio import RoundComparison
from localllm.bench.scenarios import user
from localllm.bench.stream import free_port


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as cache:
        os.environ["LOCALLLM_CACHE_DIR"] = cache
        port = free_port()
        command = serve_command(smollm2(), port, "--quiet")
        server = Server("localllm over HTTP", command, port)
        server.start()
        bare, table = Bare(smollm2()), RoundComparison("decode, 128 tokens", "tok/s")
        server.target.chat(user("Warm up."), 8)
        interleave(
            rounds,
            lambda: table.add("llama_decode loop", bare.decode(128)),
            lambda: table.add(
                server.name, server.target.chat(user(f"Tell a story. {len(table.values)}"), 128).decode_tok_s
            ),
        )
        server.stop()
    report(table, "llama_decode loop")


if __name__ == "__main__":
    main()
