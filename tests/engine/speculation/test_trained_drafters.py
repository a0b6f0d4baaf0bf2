"""Trained draft heads pay off or stop. For any acceptance rate on any machine, a stream is hardly
slower than without them, its first tokens included. If the heads are right, the stream is faster.
The tests use a clock that only the emulated work advances."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import numpy as np
import pytest

from engine.drive import ALONE, GREEDY, settle
from localllm.device.name_lookup import resolve
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.planner.drafting import verify_ratios
from localllm.planner.plan import plan_for
from localllm.planner.starting_settings import typical
from localllm.planner.types import Workload
from localllm_backends.contract import Chunk
from localllm_catalog import catalog
from support.requests import request_for
from support.scripted_backend import END, ScriptedBackend, ScriptedResult, row_after

# Duration of a step over that many rows, in steps of one row. "two cores": SmolLM2, measured on two
# CPU cores. Published: tokens/s of that many sequences together, by llama-batched-bench at a depth
# of 512 (github.com/ggml-org/llama.cpp, benches/dgx-spark/dgx-spark.md and
# benches/mac-m2-ultra/mac-m2-ultra.md). For the other three machines no table was found; they use
# the planner's own formula for a mixture of experts, in which further rows read further experts.
_BY_LAW = ("M4 Max 128GB", "RTX 5090", "Strix Halo 128GB")
_PUBLISHED_TOK_S = {
    "DGX Spark, gpt-oss-120b": (57.14, 73.27, 98.51, 159.18, 241.85, 353.31),
    "DGX Spark, gemma-3-4b": (77.63, 122.70, 227.68, 373.67, 559.47, 819.61),
}
_PUBLISHED_STEPS = {
    "M2 Ultra, gpt-oss-120b": (1.0, 1.51, 2.34, 4.03, 6.5, 10.14),
    "M2 Ultra, qwen2.5-coder-7b": (1.0, 1.18, 1.43, 2.45, 3.9, 4.09),
}
_ROWS = (1, 2, 4, 8, 16, 32)


def steps_by_law(machine: str) -> list[float]:
    """Return the planner's step durations for the rows in `_ROWS`."""
    device, model = (
        resolve(machine),
        next(m for m in catalog.load().models if m.id == "qwen3-30b-a3b"),
    )
    plan = plan_for(
        device, model, typical([v for v in model.variants if v.format == "gguf"]), Workload()
    )
    further = verify_ratios(device, plan.model, plan.variant, _ROWS[1:], plan.settings)
    return [1.0, *further]


STEPS = {
    "two cores": [1 + 0.54 * (n - 1) for n in _ROWS],
    **{
        name: [n * tok_s[0] / t for n, t in zip(_ROWS, tok_s, strict=True)]
        for name, tok_s in _PUBLISHED_TOK_S.items()
    },
    **{name: list(steps) for name, steps in _PUBLISHED_STEPS.items()},
    **{name: steps_by_law(name) for name in _BY_LAW},
}
MACHINES = list(STEPS)
# An assumption: a guess costs a layer and an output matrix of a model with 8 to 32 billion weights.
# It costs more for SmolLM2, whose output matrix is a fifth of the model.
GUESS = {name: 0.15 if name == "two cores" else 0.06 for name in MACHINES}


def steps_of(machine: str, rows: int) -> float:
    """Return the duration of a step over that many rows, in steps of one row."""
    known = STEPS[machine]
    beyond = (known[-1] - known[-2]) / (_ROWS[-1] - _ROWS[-2]) * max(0, rows - _ROWS[-1])
    return float(np.interp(rows, _ROWS, known)) + beyond


PLAIN_S = 0.01


class Guessing(ScriptedBackend):
    """Heads that are right with probability `rate`, independently for each token. A wrong guess is
    proposed with full confidence, or ends the draft if `stops`."""

    def __init__(
        self, machine: str, rate: float, kind: str = "mtp", *, stops: bool = False
    ) -> None:
        super().__init__(n_ctx=8192, n_batch=64)
        object.__setattr__(self.capabilities, "drafts", 16 if kind != "dflash" else 15)
        object.__setattr__(self.capabilities, "draft_kind", kind)
        self.machine, self.guess = machine, GUESS[machine]
        self.rate, self.stops, self.kind = rate, stops, kind
        self.now, self.drafted_s, self.rng = 0.0, 0.0, random.Random(4)
        self.ends: list[tuple[float, int]] = []

    def step(self, chunks: Seq[Chunk]) -> ScriptedResult:
        rows = sum(len(c.tokens) for c in chunks)
        self.now += PLAIN_S * steps_of(self.machine, rows)
        return super().step(chunks)

    def draft(self, wanted: Seq[tuple[int, int, int]]) -> list[list[int]]:
        drafts, computed = [], 0
        for sequence, newest, most in wanted:
            line, draft = [*self.lines[sequence], newest], []
            while len(draft) < most:
                right = self.rng.random() < self.rate
                if not right and self.stops:
                    break
                row = row_after(line)
                row[END] = -np.inf
                draft.append(int(row.argmax()) if right else 3)
                line.append(draft[-1])
            computed = max(computed, min(most, len(draft) + 1))
            drafts.append(draft)
        # A block is made in one pass, which takes as long as four guesses.
        self.now += PLAIN_S * self.guess * (4 if self.kind == "dflash" else computed)
        return drafts


def speed(
    machine: str,
    rate: float,
    kind: str,
    n: int,
    *,
    stops: bool = False,
    streams: int = 1,
    requests: int = 1,
) -> float:
    """Return the speedup from drafting of the last of that many requests, with `streams` streams at
    once and `n` tokens each."""
    backend = Guessing(machine, rate, kind, stops=stops)
    engine = Engine(backend, EngineSettings(draft="mtp"), clock=lambda: backend.now, cpu=ALONE)
    settle(engine)
    for i in range(requests):
        asked = [
            request_for(f"{i} {k}", f"say {k}", n, GREEDY, ignore_eos=True, cache_prompt=False)
            for k in range(streams)
        ]
        for request in asked:
            engine.submit(request, backend.tokenize(request.id, special=False))
        while any((job := engine.jobs.find(r.id)) is None or job.prefilling for r in asked):
            engine.step()
        began, had = backend.now, engine.metrics.generated_tokens
        while engine.has_work:
            engine.step()
        taken, made = backend.now - began, engine.metrics.generated_tokens - had
    engine.close()
    return made * steps_of(machine, streams) * PLAIN_S / (taken * streams)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_a_stream_keeps_its_speed_whatever_is_accepted(machine: str, kind: str) -> None:
    gains = {}
    for rate in (0.0, 0.1, 0.25, 0.6, 1.0):
        gains[rate] = gain = speed(machine, rate, kind, 250, stops=kind == "mtp" and rate != 0.25)
        assert gain >= 0.98, rate
    # If eight rows cost more than four steps there is little to gain.
    assert gains[1.0] > (1.02 if steps_of(machine, 8) > 4.0 else 1.8), gains


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_a_trial_is_bounded(machine: str, kind: str) -> None:
    """In the first 24 tokens no draft is right."""
    assert speed(machine, 0.0, kind, 25) >= 1 / 1.15


@pytest.mark.parametrize("machine", MACHINES)
def test_concurrent_streams_keep_their_speed_whatever_is_accepted(machine: str) -> None:
    for rate in (0.0, 0.5):
        assert speed(machine, rate, "eagle3", 250, streams=4) >= (0.98 if rate else 0.99), rate


def test_trials_of_an_always_wrong_drafter_affect_one_stream_at_a_time() -> None:
    """Trials become rarer, no matter which stream makes them."""
    backend = Guessing("DGX Spark, gemma-3-4b", 0.0, "eagle3")
    asked: list[list[int]] = []
    draft = backend.draft

    def counted(wanted: Seq[tuple[int, int, int]]) -> list[list[int]]:
        asked.append([most for _, _, most in wanted])
        return draft(wanted)

    engine = Engine(backend, EngineSettings(draft="mtp"), clock=lambda: backend.now, cpu=ALONE)
    settle(engine)
    backend.draft = counted  # type: ignore[method-assign]
    for k in range(4):
        request = request_for(f"{k}", f"say {k}", 250, GREEDY, ignore_eos=True)
        engine.submit(request, backend.tokenize(request.id, special=False))
    while engine.has_work:
        engine.step()
    engine.close()
    assert 3 <= len(asked) <= 9, "each trial doubles the wait for the next"
    assert all(len(lengths) == 1 and lengths[0] <= 2 for lengths in asked)


def test_a_costly_trial_has_one_token() -> None:
    """If it is wrong, a second one would be verified in vain."""
    backend = Guessing("M2 Ultra, gpt-oss-120b", 0.0, "eagle3")
    engine = Engine(backend, EngineSettings(draft="mtp"), clock=lambda: backend.now, cpu=ALONE)
    settle(engine)
    request = request_for("a", "say a", 4, GREEDY, ignore_eos=True)
    engine.submit(request, backend.tokenize(request.id, special=False))
    while engine.has_work:
        engine.step()
    drafted = engine.snapshot()["drafted_eagle3_tokens"]
    engine.close()
    assert drafted == 1


class ReadingLate(Guessing):
    """Heads whose every draft first reads tokens for as long as `read_steps` decode steps."""

    read_steps = 3.0

    def draft(self, wanted: Seq[tuple[int, int, int]]) -> list[list[int]]:
        self.now += PLAIN_S * self.read_steps
        return super().draft(wanted)


def test_trials_are_charged_for_the_time_that_they_took() -> None:
    """The idle engine's probe reads nothing, so it knows nothing of the time to read."""
    backend = ReadingLate("DGX Spark, gemma-3-4b", 0.0, "eagle3")
    backend.read_steps = 0.0
    engine = Engine(backend, EngineSettings(draft="mtp"), clock=lambda: backend.now, cpu=ALONE)
    settle(engine)
    backend.read_steps = 3.0
    for k in range(4):
        request = request_for(f"{k}", f"say {k}", 400, GREEDY, ignore_eos=True)
        engine.submit(request, backend.tokenize(request.id, special=False))
    began = backend.now
    while engine.has_work:
        engine.step()
    steps = (backend.now - began) / PLAIN_S / steps_of(backend.machine, 4)
    engine.close()
    assert steps <= 400 / 0.99


@pytest.mark.parametrize(
    ("machine", "rate", "rested_share"),
    [
        # It follows the model again before each trial, since it guesses from what it has read.
        ("DGX Spark, gemma-3-4b", 0.0, (0.5, 0.8)),
        ("DGX Spark, gemma-3-4b", 0.5, (0.0, 0.0)),
        # Four streams gain nothing on this machine, even from drafts that are always right.
        ("two cores", 0.5, (0.99, 1.0)),
    ],
)
def test_a_drafter_without_gain_rests(
    machine: str, rate: float, rested_share: tuple[float, float]
) -> None:
    """A resting drafter does not have to process the tokens of sequences."""
    backend = Guessing(machine, rate, "eagle3")
    told = [False]
    backend.rest_heads = told.append  # type: ignore[method-assign]
    engine = Engine(backend, EngineSettings(draft="auto"), clock=lambda: backend.now, cpu=ALONE)
    settle(engine)
    for k in range(4):
        request = request_for(f"{k}", f"say {k}", 400, GREEDY, ignore_eos=True)
        engine.submit(request, backend.tokenize(request.id, special=False))
    resting = []
    while engine.has_work:
        engine.step()
        resting.append(told[-1])
    engine.close()
    least, most = rested_share
    assert least <= sum(resting) / len(resting) <= most


def test_the_next_request_uses_the_learned_acceptance_rate() -> None:
    first, later = (speed("two cores", 0.0, "mtp", 24, requests=n) for n in (1, 6))
    assert first < 1
    assert later == pytest.approx(1.0, abs=0.001), "short answers pay for no trial"
