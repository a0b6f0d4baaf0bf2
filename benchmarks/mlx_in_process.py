"""The MLX backend against mlx-lm's own generate loop, on the same weights in one process; servers: benchmarks.peers.

    python -m benchmarks.mlx_in_process [--model FOLDER] [--rounds 5] [--only decode,prefill]

Without --model it converts the starter model to float32: MLX's quantised matmul is scalar on a CPU. MLX's Linux wheel
brings a reference BLAS (one core, no vector instructions, so batching gains nothing): preload a real one for both sides
alike, LD_PRELOAD=/path/to/libopenblas.so, and say so beside the figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.models import smollm2_mlx
from benchmarks.rounds import interleave, report, write
from localllm.bench.ratio import RoundComparison
from localllm.bench.scenarios import unique

OURS, THEIRS = "localllm", "mlx-lm"


class InProcess:
    """One stream through the backend's `step`, and through mlx_lm.generate.generate_step, in turn."""

    def __init__(self, model: Path) -> None:
        from mlx_lm.utils import load_model

        from localllm_backends.contract import LoadSpec
        from localllm_backends.mlx import backend_type

        self.tables = {name: RoundComparison(f"{name} in process", "tok/s") for name in ("decode", "prefill")}
        self._seed = int(time.time())
        self._backend: Any = backend_type.load(LoadSpec(str(model), n_ctx=8192))
        self._theirs: Any = load_model(model)[0]

    def _fresh(self) -> int:
        self._seed += 1
        return self._seed

    def decode(self, n_tokens: int = 128) -> None:
        """Tokens per second after the first, greedy."""
        prompt = self._backend.tokenize(f"Tell a story about number {self._fresh()}.")
        for name, run in ((OURS, self._our_tokens), (THEIRS, self._their_tokens)):
            times = [time.perf_counter() for _ in run(prompt, n_tokens)]
            self.tables["decode"].add(name, (len(times) - 1) / (times[-1] - times[0]))

    def prefill(self, n_tokens: int = 1024) -> None:
        """Prompt tokens per second up to the first token."""
        prompt = self._backend.tokenize(unique(n_tokens, self._fresh()))[:n_tokens]
        for name, run in ((OURS, self._our_tokens), (THEIRS, self._their_tokens)):
            begun = time.perf_counter()
            next(iter(run(prompt, 1)))
            self.tables["prefill"].add(name, n_tokens / (time.perf_counter() - begun))

    def _our_tokens(self, prompt: list[int], n: int) -> Iterator[int]:
        from localllm_backends.contract import Chunk

        backend = self._backend
        sequence = backend.new_sequence()
        size = backend.info.n_batch
        for i in range(0, len(prompt), size):
            result = backend.step([Chunk(sequence, prompt[i : i + size], 1 if i + size >= len(prompt) else 0)])
        for i in range(n):
            (token,) = result.argmax(0)
            yield token
            if i + 1 < n:
                result = backend.step([Chunk(sequence, [token])])
        backend.drop(sequence)

    def _their_tokens(self, prompt: list[int], n: int) -> Iterator[int]:
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        for token, _ in generate_step(mx.array(prompt), self._theirs, max_tokens=n):
            yield int(token)


def main() -> None:
    """Run and report; the first round, in which both compile their kernels, does not count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="decode,prefill")
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    bench = InProcess(arguments.model or smollm2_mlx())
    runs: list[Callable[[], None]] = [getattr(bench, name) for name in arguments.only.split(",")]
    for run in runs:
        run()
    for table in bench.tables.values():
        table.values.clear()
    interleave(arguments.rounds, *runs)
    write(arguments.out, [report(table, THEIRS) for table in bench.tables.values() if table.values])


if __name__ == "__main__":
    main()
