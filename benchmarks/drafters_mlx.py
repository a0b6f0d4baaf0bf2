"""Drafters on MLX against plain decoding: tokens/s of four streams with one that is always wrong (bar:
0.99), with one that is always right, and with lookups alone.

    python -m benchmarks drafters_mlx [--rounds N] [--arms plain,ngram,dflash,eagle3] [--right]

Tiny models with random weights on the CPU. Each arm is a process of its own, since a drafter is tried
most in the first tokens of a process. `--right`: the drafters know the model's next token.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Finish, Generation, Request, Sampling, Text
from localllm_backends.contract import LoadSpec
from localllm_backends.mlx import backend_type as mlx
from tests.models import tiny_mlx_drafters

PROMPT_TOKENS = 60
ARMS = "plain,ngram,dflash,eagle3"


def measured(model: str, drafter: str, asked: argparse.Namespace) -> dict[str, float]:
    """The tokens/s of a fresh engine, by the clock and by processor time, and its counters."""
    spec = LoadSpec(model, n_ctx=4096, n_seq_max=8, n_batch=256, drafter=drafter)
    mode = asked.one if asked.one in ("off", "ngram") else "auto"
    engine = Engine(mlx.load(spec), EngineSettings(draft=mode, cache_bytes=0))
    while engine.idle():
        pass
    rng = random.Random(asked.seed)
    sampling = Sampling(temperature=asked.temperature, seed=7)
    generation = Generation(sampling, asked.tokens, ignore_eos=True, cache_prompt=False)
    for i in range(asked.streams):
        prompt = [rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)]
        engine.submit(Request(str(i), prompt, generation), prompt)
    begun: dict[str, int] = {}
    while len(begun) < asked.streams:
        _count(engine, begun)
    before = sum(begun.values())
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    while engine.has_work:
        _count(engine, begun)
    wall_s = time.perf_counter() - started_s
    cpu_s = time.process_time() - started_cpu_s
    snapshot = engine.snapshot()
    engine.close()
    n_tokens = sum(begun.values()) - before
    found = {"tok_s": n_tokens / wall_s, "tok_cpu_s": n_tokens / cpu_s}
    for name, value in snapshot.items():
        if name.startswith(("drafted_", "accepted_")) and value:
            found[name] = float(value)
    return found


def _count(engine: Engine, begun: dict[str, int]) -> None:
    for event in engine.step():
        if isinstance(event, Text):
            begun[event.id] = begun.get(event.id, 0) + len(event.tokens)
        assert not isinstance(event, Finish) or event.reason == "length", event


def _fresh(arm: str, folder: Path, rest: list[str]) -> dict[str, float]:
    drafter = str(folder / arm) if (folder / arm).exists() else ""
    one = {"plain": "off", "ngram": "ngram"}.get(arm, "auto")
    command = [sys.executable, "-m", "benchmarks.drafters_mlx", *rest, "--one", one]
    run = subprocess.run(
        [*command, "--model", str(folder / "model"), "--drafter", drafter],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print the medians of each arm, and of its ratios to plain decoding in the same round."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--arms", default=ARMS)
    options.add_argument("--right", action="store_true")
    options.add_argument("--target", default="full", choices=sorted(tiny_mlx_drafters.TARGETS))
    options.add_argument("--streams", type=int, default=4)
    options.add_argument("--tokens", type=int, default=250)
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--one", default="", help=argparse.SUPPRESS)
    options.add_argument("--model", default="", help=argparse.SUPPRESS)
    options.add_argument("--drafter", default="", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.one:
        print(json.dumps(measured(asked.model, asked.drafter, asked)))
        return
    arms = asked.arms.split(",")
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_mlx_drafters.write_target(folder / "model", asked.target)
        for arm in arms:
            if arm in tiny_mlx_drafters.DESIGNS and asked.right:
                tiny_mlx_drafters.write_knowing(folder / arm, arm, model, wrong=0.0)
            elif arm in tiny_mlx_drafters.DESIGNS:
                tiny_mlx_drafters.write(folder / arm, arm)
        for i in range(asked.rounds):
            rest = [*sys.argv[1:], "--seed", str(i)]
            for arm in arms[:: 1 if i % 2 else -1]:
                found[arm].append(_fresh(arm, folder, rest))
            print(i, {arm: found[arm][-1] for arm in arms}, flush=True)
    for arm in arms:
        for unit in ("tok_s", "tok_cpu_s"):
            pairs = zip(found[arm], found[arms[0]], strict=True)
            ratio = statistics.median(own[unit] / plain[unit] for own, plain in pairs)
            speed = statistics.median(one[unit] for one in found[arm])
            print(f"{arm:8} {unit:10} {speed:8.1f}  / {arms[0]}: {ratio:.3f}")


if __name__ == "__main__":
    main()
