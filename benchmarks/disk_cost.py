"""What keeping prefixes on disk costs: cold and warm TTFT with the disk tier on against off (bar: under 3 % each).

python -m benchmarks.disk_cost [--rounds 15] [--model FILE] [--out FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.models import smollm2
from benchmarks.rounds import interleave, report, write
from benchmarks.timing import settle, timed
from localllm.bench.ratio import RoundComparison
from localllm.engine.core import Engine, EngineSettings
from localllm.engine.messages import Generation, Request, Sampling
from localllm_backends.contract import LoadSpec
from localllm_backends.llamacpp import backend_type

_PREFIX_TOKENS = 2000
_TURN_TOKENS = 40


class Server:
    """One engine, as a worker runs it: steps while there is work, housekeeping between."""

    def __init__(self, name: str, path: Path, settings: EngineSettings) -> None:
        self.name = name
        self.engine = Engine(backend_type.load(LoadSpec(str(path), n_ctx=8192)), settings)
        self._n = 0

    def ttft_s(self, prompt: list[int]) -> float:
        """Seconds to the first token of `prompt`; 8 tokens are generated, then everything settles."""
        self._n += 1
        request = Request(f"r{self._n}", prompt, Generation(Sampling(temperature=0.0), 8, ignore_eos=True))
        first, _ = timed(self.engine, request, prompt)
        settle(self.engine)
        return first


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    path = arguments.model or smollm2()
    cold, warm = RoundComparison(f"cold TTFT, {_PREFIX_TOKENS} tokens", "s"), RoundComparison("warm turn's TTFT", "s")
    with tempfile.TemporaryDirectory() as folder:
        servers = [
            Server("memory only", path, EngineSettings()),
            Server("with disk tier", path, EngineSettings(disk_dir=folder)),
        ]
        n_vocab = servers[0].engine.backend.info.n_vocab
        seed = 0

        def one(server: Server) -> None:
            nonlocal seed
            seed += 1
            prefix = [(i * 7919 + seed * 104729) % (n_vocab - 100) + 50 for i in range(_PREFIX_TOKENS)]
            cold.add(server.name, server.ttft_s(prefix))
            turn = [(i * 31 + seed) % (n_vocab - 100) + 50 for i in range(_TURN_TOKENS)]
            warm.add(server.name, server.ttft_s([*prefix[:-10], *turn]))

        for server in servers:
            server.ttft_s(list(range(100, 400)))
        interleave(arguments.rounds, *(lambda s=s: one(s) for s in servers))
        write(arguments.out, [report(table, "memory only") for table in (cold, warm)])
        for server in servers:
            server.engine.close()


if __name__ == "__main__":
    main()
