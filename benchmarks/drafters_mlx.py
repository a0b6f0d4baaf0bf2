"""Drafters on MLX compared with plain decoding: the speed of four streams, by kind of drafter.

    python -m benchmarks drafters_mlx [--rounds N] [--arms ngram,dflash,eagle3] [--right]

The drafter is one that is always wrong (bar: 0.99), one that is always right, or lookups alone.
Tiny models with random weights run on the CPU. A step of four streams takes 1 to 2 ms, so the
host's 0.1 ms for a drafter is visible. `--layers 12 --inner 2048` makes steps longer, as on real
models. Every arm is compared with plain decoding in the same process.

Both are fresh engines with the same prompts, after a run that loads everything that first steps
need. They take turns of TURN steps, so that other programs slow both alike. A stream's speed is its
number of tokens, divided by the time that its engine took until its last token. By the clock and by
processor time, the table has the ratios of all streams (geometric mean) and of the slowest one.
`--right`: the drafters know the model's next token.

"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Finish, Generation, Request, Sampling, Text
from localllm_backends.contract import LoadSpec
from localllm_backends.mlx import backend_type as mlx
from tests.models import tiny_mlx_drafters

PROMPT_TOKENS = 60
ARMS = "ngram,dflash,eagle3"
TURN = 25
UNITS = ("clock", "cpu")


@dataclass
class Run:
    """One engine's answers. `spent`: its seconds so far, by the clock and of processor time.
    `ended`: the same for each stream at its last token. `started`: at its first."""

    engine: Engine
    spent: tuple[float, float] = (0.0, 0.0)
    started: dict[str, tuple[float, float]] = field(default_factory=dict)
    ended: dict[str, tuple[float, float]] = field(default_factory=dict)

    def turn(self, n_steps: int) -> None:
        clock_s, cpu_s = time.perf_counter(), time.process_time()
        before = self.spent
        for _ in range(n_steps):
            if not self.engine.has_work:
                break
            events = self.engine.step()
            self.spent = (
                before[0] + time.perf_counter() - clock_s,
                before[1] + time.process_time() - cpu_s,
            )
            for event in events:
                if isinstance(event, Text):
                    self.started.setdefault(event.id, self.spent)
                if isinstance(event, Finish):
                    assert event.reason == "length", event
                    self.ended[event.id] = self.spent
        # A step that was started early is part of this engine's work too.
        mx.synchronize()
        self.spent = (
            before[0] + time.perf_counter() - clock_s,
            before[1] + time.process_time() - cpu_s,
        )

    def seconds(self, unit: int) -> list[float]:
        """Return the seconds of each stream from its first to its last token."""
        return [self.ended[s][unit] - self.started[s][unit] for s in sorted(self.ended)]


def begun(model: Path, arm: str, asked: argparse.Namespace, seed: int, n_tokens: int) -> Run:
    """Return a fresh engine with its streams."""
    drafter = model.parent / arm
    spec = LoadSpec(
        str(model), n_ctx=8192, n_seq_max=8, n_batch=256, drafter=str(drafter) * drafter.exists()
    )
    mode = {"plain": "off", "ngram": "ngram"}.get(arm, "auto")
    engine = Engine(mlx.load(spec), EngineSettings(draft=mode, cache_bytes=0))
    while engine.idle():
        pass
    rng = random.Random(seed)
    sampling = Sampling(temperature=asked.temperature, seed=7)
    generation = Generation(sampling, n_tokens, ignore_eos=True, cache_prompt=False)
    for i in range(asked.streams):
        prompt = [rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)]
        engine.submit(Request(str(i), prompt, generation), prompt)
    return Run(engine)


def compared(model: Path, arm: str, asked: argparse.Namespace, seed: int) -> dict[str, float]:
    """Return the ratios of one round, and the drafts of its arm."""
    runs = [begun(model, name, asked, seed, asked.tokens) for name in (arm, "plain")]
    turns = runs[:: 1 if seed % 2 else -1]
    while any(run.engine.has_work for run in runs):
        for run in turns:
            run.turn(TURN)
    own, plain = runs
    found = {}
    for unit, name in enumerate(UNITS):
        pairs = zip(own.seconds(unit), plain.seconds(unit), strict=True)
        ratios = [without_s / with_s for with_s, without_s in pairs]
        found[name] = statistics.geometric_mean(ratios)
        found[f"{name} slowest"] = min(ratios)
    for name, value in own.engine.snapshot().items():
        if name.startswith(("drafted_", "accepted_")) and value:
            found[name] = float(value)
    for run in runs:
        run.engine.close()
    return found


def main() -> None:
    """Print each round, and the median and range of every ratio."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--arms", default=ARMS)
    options.add_argument("--right", action="store_true")
    options.add_argument("--target", default="full", choices=sorted(tiny_mlx_drafters.TARGETS))
    options.add_argument("--layers", type=int, help="of a larger model")
    options.add_argument("--inner", type=int, help="its width between the matrices of a layer")
    options.add_argument("--streams", type=int, default=4)
    options.add_argument("--tokens", type=int, default=250)
    options.add_argument("--temperature", type=float, default=0.0)
    asked = options.parse_args()
    arms = asked.arms.split(",")
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as name:
        size = {"num_hidden_layers": asked.layers, "intermediate_size": asked.inner}
        size = {key: n for key, n in size.items() if n}
        model = tiny_mlx_drafters.write_target(Path(name) / "model", asked.target, changed=size)
        for arm in {*arms} & {*tiny_mlx_drafters.DESIGNS}:
            if asked.right:
                tiny_mlx_drafters.write_knowing(model.parent / arm, arm, model, wrong=0.0)
            else:
                tiny_mlx_drafters.write(model.parent / arm, arm)
        for arm in ["plain", *arms]:
            warm = begun(model, arm, asked, 0, 100)
            warm.turn(10_000)
            warm.engine.close()
        for seed in range(asked.rounds):
            for arm in arms:
                found[arm].append(compared(model, arm, asked, seed))
            print(seed, {arm: found[arm][-1] for arm in arms}, flush=True)
    _report(found)


def _report(found: dict[str, list[dict[str, float]]]) -> None:
    for arm, rounds in found.items():
        for unit in [f"{unit}{which}" for unit in UNITS for which in ("", " slowest")]:
            ratios = [one[unit] for one in rounds]
            median = statistics.median(ratios)
            print(f"{arm:8} {unit:14} {median:.3f}  ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
