"""What a step costs besides the model: admission with many waiting, and 8 sampled streams (`sampler` has a token's cost alone).

python -m benchmarks.step_overhead [--rounds 5]

No model: a backend that computes nothing. Milliseconds of CPU time of this thread, so that others on the machine cost
only their share of the caches. The bar: 0.3 ms a step for admission.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from benchmarks.sampler import SETTINGS, median_ms, row_of
from localllm.engine.core import Engine, EngineSettings
from localllm.engine.messages import Generation, Request, Sampling
from localllm_backends.contract import Capabilities, Chunk, MemoryReport, ModelInfo

CROWDS = ((4, 4, 8_000), (4, 8, 30_000), (2, 16, 60_000))
SAMPLINGS = ("defaults", "none (gpt-oss)", "top_p", "typical_p")


class Idle:
    """A backend that computes nothing and has cells for `n_ctx` tokens."""

    def __init__(self, n_ctx: int, rows: Seq[NDArray[np.float32]] = (np.zeros(1000, dtype=np.float32),)) -> None:
        self.capabilities = Capabilities(
            "any", 0, shares_cells=True, segments=True, exact_batching=True, kv_types=("f16",)
        )
        self.info = ModelInfo(
            "idle",
            "idle",
            "idle",
            len(rows[0]),
            n_ctx,
            n_ctx,
            32,
            512,
            64,
            0,
            0,
            (2,),
            1,
            2,
            False,
            "",
            "",
            None,
            "f16",
            "f16",
        )
        self._lengths: dict[int, int] = {}
        self._next = 0
        self._rows, self._given = rows, 0

    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """Its bytes."""
        return list(text.encode())

    def detokenize(self, tokens: Seq[int]) -> str:
        """Nothing it would say."""
        return ""

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """All alike."""
        return b"a "

    def is_control(self, token: int) -> bool:
        """The first is."""
        return token == 1

    def new_sequence(self) -> int:
        """One more."""
        self._next += 1
        self._lengths[self._next] = 0
        return self._next

    def fork(self, source: int, n_tokens: int) -> int:
        """One more of `n_tokens`."""
        target = self.new_sequence()
        self._lengths[target] = n_tokens
        return target

    def truncate(self, sequence: int, n_tokens: int) -> None:
        """Forget the rest."""
        self._lengths[sequence] = min(n_tokens, self._lengths[sequence])

    def drop(self, sequence: int) -> None:
        """Forget it."""
        del self._lengths[sequence]

    def length(self, sequence: int) -> int:
        """Tokens held."""
        return self._lengths[sequence]

    def cells_free(self) -> int:
        """What no sequence has."""
        return self.info.n_ctx - sum(self._lengths.values())

    def step(self, chunks: Seq[Chunk]) -> Idle:
        """Nothing is computed."""
        for chunk in chunks:
            self._lengths[chunk.sequence] += len(chunk.tokens)
        self._chunks = list(chunks)
        return self

    def argmax(self, chunk: int) -> list[int]:
        """Always the same."""
        return [5] * self._chunks[chunk].outputs

    def logits(self, chunk: int) -> NDArray[np.float32]:
        """One row after the other."""
        self._given += 1
        row = self._rows[self._given % len(self._rows)]
        return np.broadcast_to(row, (self._chunks[chunk].outputs, len(row)))

    def export_range(self, sequence: int, start: int, stop: int) -> bytes:
        """Not of use here."""
        return bytes(stop - start)

    def import_range(self, sequence: int, data: bytes | memoryview, start: int, stop: int) -> None:
        """Not of use here."""
        self._lengths[sequence] = stop

    def memory(self) -> MemoryReport:
        """None."""
        return MemoryReport(0, 1, 0, 0, 0)

    def check_integrity(self) -> None:
        """Always."""

    def close(self) -> None:
        """Nothing to free."""


def crowded(n_running: int, n_waiting: int, n_tokens: int, seed: int) -> tuple[float, float]:
    """(ms of CPU time of a step with nobody waiting, and with `n_waiting` of `n_tokens` each waiting for cells)."""
    rng = np.random.default_rng(seed)
    engine = Engine(Idle(n_running * (n_tokens + 400) + 500), EngineSettings(headroom_bytes=0, cache_bytes=2**20))

    def submit(name: str) -> None:
        prompt = rng.integers(3, 900, n_tokens).tolist()
        greedy = Generation(Sampling(temperature=0.0), 4000, ignore_eos=True)
        engine.submit(Request(name, prompt, greedy, draft="off"), prompt)

    for i in range(n_running):
        submit(f"running{i}")
    while engine.jobs.waiting or any(job.prefilling for job in engine.jobs.running.values()):
        engine.step()
    alone = median_ms(engine.step, 30)
    for i in range(n_waiting):
        submit(f"waiting{i}")
    engine.step()
    together = median_ms(engine.step, 15)
    assert len(engine.jobs.waiting) == n_waiting
    return alone, together


def sampled(sampling: Sampling, n_vocab: int, seed: int) -> float:
    """ms of CPU time of a step of 8 streams that are sampled so."""
    rng = np.random.default_rng(seed)
    engine = Engine(
        Idle(20_000, [row_of(n_vocab, rng, peaked=True) for _ in range(8)]),
        EngineSettings(headroom_bytes=0, cache_bytes=2**20),
    )
    for i in range(8):
        prompt = rng.integers(3, 900, 1_000).tolist()
        engine.submit(Request(f"r{i}", prompt, Generation(sampling, 1_000, ignore_eos=True), draft="off"), prompt)
    while engine.jobs.waiting or any(job.prefilling for job in engine.jobs.running.values()):
        engine.step()
    return median_ms(engine.step, 30)


def main() -> None:
    """Measure and report: the median of all rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = range(parser.parse_args().rounds)
    for crowd in CROWDS:
        measured = [crowded(*crowd, seed=i) for i in rounds]
        alone, together = (statistics.median(m[i] for m in measured) for i in (0, 1))
        running, waiting, n_tokens = crowd
        print(
            f"{running} running: {alone:7.3f} ms a step; {waiting} more of {n_tokens} tokens waiting: "
            f"{together:7.3f} ms, + {together - alone:.3f}",
            flush=True,
        )
    print("\n8 sampled streams, 262144 tokens: ms a step")
    for name in SAMPLINGS:
        print(f"  {name:30} {statistics.median(sampled(SETTINGS[name], 262_144, i) for i in rounds):7.3f}", flush=True)


if __name__ == "__main__":
    main()
