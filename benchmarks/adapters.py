"""LoRA adapters over one copy of the weights: memory, equal texts, and the speed of two sets.

    python -m benchmarks adapters [--threads N] [--rounds N]

SmolLM2-135M with random adapters of rank 2, which is the share of its width that rank 16 is of
4,096. Times are processor time of this process, so other programs do not count. The ratio of speed
is the median of rounds that measure both sides one after the other.

A step contains requests of one set, so two sets need two steps of 2 rows instead of one of 4. The
highest possible ratio is the cost of steps without adapters with as many rows.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from benchmarks.models import smollm2
from localllm.engine.core import Engine
from localllm.engine.messages import Generation, Request, Sampling, Text
from localllm_backends.contract import Chunk, LoadSpec, LoraAdapter
from localllm_backends.llamacpp import backend_type
from tests.models import tiny_lora

N_TOKENS = 48
N_STREAMS = 4
Chosen = tuple[tuple[int, float], ...]


def adapters_in(folder: Path) -> list[Path]:
    """Write eight adapters with different numbers."""
    first = tiny_lora.write(folder / "0.gguf", smollm2(), rank=2)
    files = [first]
    for seed in range(1, 8):
        files.append(folder / f"{seed}.gguf")
        shutil.copy(first, files[-1])
        rng = np.random.default_rng(seed)
        for tensor in gguf.GGUFReader(str(files[-1]), "r+").tensors:
            numbers = np.array(tensor.data)
            tensor.data[:] = rng.permutation(numbers.reshape(-1)).reshape(numbers.shape)
    return files


def engine_with(files: Sequence[Path], threads: int, scale: float = 0.0) -> Engine:
    """Return an engine with these adapters over one copy of the weights."""
    adapters = tuple(LoraAdapter(str(file), scale) for file in files)
    spec = LoadSpec(
        str(smollm2()), n_ctx=2048, n_seq_max=8, n_batch=256, n_threads=threads, adapters=adapters
    )
    return Engine(backend_type.load(spec), clock=time.process_time)


def answers(engine: Engine, sets: Sequence[Chosen | None]) -> tuple[list[list[int]], float]:
    """Run one stream for each of `sets`, all at the same time. Return their tokens, and the
    processor seconds from the first token of the last stream to the end."""
    found: dict[str, list[int]] = {str(i): [] for i in range(len(sets))}
    generation = Generation(Sampling(temperature=0.0), N_TOKENS, ignore_eos=True)
    for i, chosen in enumerate(sets):
        prompt = engine.backend.tokenize(f"{i}. Once upon a time, there was a")
        made = Generation(
            generation.sampling, N_TOKENS, ignore_eos=True, adapters=chosen, cache_prompt=False
        )
        engine.submit(Request(str(i), prompt, made, draft="off"), prompt)
    began_s = 0.0
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Text):
                found[event.id] += event.tokens
        if not began_s and all(found.values()):
            began_s = time.process_time()
    return list(found.values()), time.process_time() - began_s


def speed_ratio(engine: Engine, rounds: int) -> tuple[float, float]:
    """Return the tokens/s of 4 streams on 2 sets ÷ on one set, and the seconds of a switch."""
    one: list[Chosen] = [((0, 1.0),)] * N_STREAMS
    two: list[Chosen] = [((i % 2, 1.0),) for i in range(N_STREAMS)]
    ratios = []
    for _ in range(rounds):
        alone_s = answers(engine, one)[1]
        ratios.append(alone_s / answers(engine, two)[1])
    return statistics.median(ratios), float(engine.snapshot()["adapter_switch_s"])


def ceiling(threads: int, rounds: int) -> float:
    """Return the cost of a plain step of 4 rows ÷ that of two steps of 2 rows."""
    spec = LoadSpec(str(smollm2()), n_ctx=2048, n_seq_max=N_STREAMS, n_threads=threads)
    backend = backend_type.load(spec)
    sequences = [backend.new_sequence() for _ in range(N_STREAMS)]
    token = backend.tokenize(" the")[:1]
    taken_s: dict[int, list[float]] = {N_STREAMS // 2: [], N_STREAMS: []}
    for _ in range(8 * rounds):
        for rows, times_s in taken_s.items():
            began_s = time.process_time()
            backend.step([Chunk(sequence, token) for sequence in sequences[:rows]])
            times_s.append(time.process_time() - began_s)
    backend.close()
    half_s, whole_s = (statistics.median(times_s) for times_s in taken_s.values())
    return whole_s / (2 * half_s)


def main() -> None:
    """Print the figures for 2, 4 and 8 adapters."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--threads", type=int, default=0)
    options.add_argument("--rounds", type=int, default=5)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = adapters_in(Path(folder))
        expected = []
        for file in files:
            engine = engine_with([file], asked.threads, 1.0)
            one_bytes = engine.backend.memory().total_bytes
            expected.append(answers(engine, [None])[0][0])
            engine.close()
        for n in (2, 4, 8):
            engine = engine_with(files[:n], asked.threads)
            ratio = engine.backend.memory().total_bytes / one_bytes
            found = [answers(engine, [((i, 1.0),)])[0][0] for i in range(n)]
            equal = sum(a == b for a, b in zip(found, expected, strict=False))
            print(
                f"{n} adapters: bytes / bytes of one {ratio:.3f}, equal texts {equal} of {n}",
                flush=True,
            )
            if n == 2:
                speed, switch_s = speed_ratio(engine, asked.rounds)
                print(f"4 streams on 2 sets / on one set: {speed:.2f} tokens/s", flush=True)
                most = ceiling(asked.threads, asked.rounds)
                print(f"ceiling, by plain steps of 2 and 4 rows: {most:.2f}", flush=True)
                print(f"a switch takes {1000 * switch_s:.1f} ms", flush=True)
            engine.close()


if __name__ == "__main__":
    main()
