"""The engine's step on an emulated device: tokens/s ÷ ideal (streams ÷ T) for 1, 8 and 32 streams.

python -m benchmarks step [--http] [--rounds 5] [--steps 200] [--vocabulary 152064] [--host]
[--profile] [--graph-ms 2]

A step is submitted and done T later (tests/support/emulated_device.py). Rows are SmolLM2's,
widened. In process, time is this thread's processor time plus its wait for the device, so other
programs cost only their share of the caches. `--host`: the device selects no top logits and returns
full rows. The bars are printed next to the measurements. `--graph-ms`: measure the cost of device
graphs instead. A graph is rebuilt if a step has other shapes, which happens when streams join and
leave. Padded shapes reduce this cost. `--http`: with worker process, pipe and SSE, and the cost of
each process (see --http --help).

"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.models import smollm2
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Generation, Request, Sampling
from localllm_backends.contract import Chunk, LoadSpec
from localllm_backends.llamacpp import backend_type
from tests.support.emulated_device import (
    EmulatedDevice,
    HostClock,
    Rows,
    Speeds,
    widened,
)

SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "defaults": Sampling(),
    "none": Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
}
BARS = {2.5: {1: 0.95, 8: 0.93, 32: 0.90}, 7.0: {1: 0.98, 8: 0.97, 32: 0.95}}
TEXT = "The lighthouse keeper wrote down the weather every evening, and one day he noticed that"


def recorded(n_vocab: int, n: int = 24) -> tuple[Rows, Callable[[int], bytes]]:
    """Return the widened rows after `n` tokens that SmolLM2 generates, and the spelling of its
    tokens."""
    backend = backend_type.load(LoadSpec(str(smollm2()), n_ctx=256, n_threads=1))
    sequence = backend.new_sequence()
    tokens, rows = backend.tokenize(TEXT), []
    for _ in range(n):
        result = backend.step([Chunk(sequence, tokens)])
        rows.append(result.logits(0)[-1].copy())
        tokens = [int(rows[-1].argmax())]
    spelt = {token: backend.token_bytes(token) for token in range(backend.info.n_vocab)}
    backend.close()
    return widened(np.array(rows), n_vocab), lambda token: spelt.get(token, b" word")


def streams(
    engine: Engine, n: int, sampling: Sampling, n_tokens: int, stop: tuple[str, ...] = ()
) -> None:
    """Submit `n` requests and finish their prefill."""
    for i in range(n):
        prompt = [10 + i, *range(100, 140)]
        generation = Generation(replace(sampling, seed=i), n_tokens, stop=stop, cache_prompt=False)
        engine.submit(Request(f"r{i}", prompt, generation), prompt)
    while engine.jobs.waiting or any(job.prefilling for job in engine.jobs.running.values()):
        engine.step()


def share_of_ideal(
    device: EmulatedDevice, clock: HostClock, n: int, sampling: Sampling, steps: int
) -> float:
    """Return the device's computing time ÷ the time of the steps."""
    engine = Engine(device, EngineSettings(headroom_bytes=0, cache_bytes=2**20), clock=clock.now)
    streams(engine, n, sampling, steps + 40)
    for _ in range(20):
        engine.step(lambda _: None)
    before, computed_s = clock.now(), device.computed_s
    for _ in range(steps):
        engine.step(lambda _: None)
    took, computed_s = clock.now() - before, device.computed_s - computed_s
    for name in [*engine.jobs.running]:
        engine.cancel(name)
    return computed_s / took


def joining(
    rows: Rows, step_ms: float, n: int, graph_ms: float, *, padded: bool
) -> tuple[float, int]:
    """Return the seconds that a device computes for 4,000 tokens of up to `n` streams with 40 to
    250 tokens, and the number of graphs it built."""
    rng, clock = np.random.default_rng(1), HostClock()
    speeds = replace(Speeds.flat(step_ms / 1e3), graph_s=graph_ms / 1e3, padded=padded)
    device = EmulatedDevice(rows, speeds, top=256, clock=clock)
    engine = Engine(device, EngineSettings(headroom_bytes=0, cache_bytes=2**20), clock=clock.now)
    while engine.metrics.generated_tokens < 4000:
        while len(engine.jobs.running) + len(engine.jobs.waiting) < n and rng.random() < 0.2:
            prompt, tokens = (
                [int(rng.integers(10, 900)), *range(100, 140)],
                int(rng.integers(40, 250)),
            )
            generation = Generation(
                SAMPLINGS["greedy"], tokens, ignore_eos=True, cache_prompt=False
            )
            engine.submit(Request(f"r{engine.metrics.requests}", prompt, generation), prompt)
        engine.step(lambda _: None)
    return device.computed_s, device.graphs


def graphs(rows: Rows, graph_ms: float) -> None:
    """Print the cost of graphs, exact and padded."""
    for step_ms in BARS:
        for n in (4, 8, 32):
            free_s, _ = joining(rows, step_ms, n, 0.0, padded=False)
            for padded in (False, True):
                seconds, made = joining(rows, step_ms, n, graph_ms, padded=padded)
                kind = "padded" if padded else "exact"
                print(
                    f"{step_ms:4} ms, up to {n:2} streams, {kind:6}: {made:3} graphs, + "
                    f"{100 * (seconds / free_s - 1):.1f} %"
                )


def main() -> None:
    """Measure and report the median of all rounds, with the settings in turn."""
    if "--http" in sys.argv:
        from benchmarks import step_http

        sys.argv.remove("--http")
        step_http.main()
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--top", type=int, default=256)
    parser.add_argument("--graph-ms", type=float)
    parser.add_argument("--profile", help="one case, such as 2.5/32/defaults, under cProfile")
    arguments = parser.parse_args()
    rows, spell = recorded(arguments.vocabulary)
    if arguments.graph_ms is not None:
        graphs(rows, arguments.graph_ms)
        return

    def measure(step_ms: float, n: int, name: str) -> float:
        clock = HostClock()
        speeds = Speeds.flat(step_ms / 1e3)
        device = EmulatedDevice(
            rows, speeds, top=0 if arguments.host else arguments.top, clock=clock, spell=spell
        )
        return share_of_ideal(device, clock, n, SAMPLINGS[name], arguments.steps)

    if arguments.profile:
        step_ms, n, name = arguments.profile.split("/")
        profile = cProfile.Profile()
        profile.runcall(measure, float(step_ms), int(n), name)
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return
    cases = [(t, n, s) for t in BARS for n in BARS[t] for s in SAMPLINGS if n < 32 or s != "none"]
    found: dict[tuple[float, int, str], list[float]] = {case: [] for case in cases}
    for _ in range(arguments.rounds):
        for case in cases:
            found[case].append(measure(*case))
    print("T ms, streams, sampling        ÷ ideal   bar   ms a step beside T")
    for (step_ms, n, name), shares in found.items():
        share, bar = statistics.median(shares), BARS[step_ms][n]
        lost = step_ms * (1 / share - 1)
        print(
            f"{step_ms:4} {n:3} {name:20} {share:9.3f} {bar:6.2f} {lost:8.3f} "
            f"{'' if share >= bar else 'missed'}"
        )


if __name__ == "__main__":
    main()
