"""Trained heads pay or stop: whatever is accepted of their guesses, on whatever machine, a stream is hardly slower than without,
its first tokens too, and where they are right it is faster. By a clock that only the work moves."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.drive import GREEDY, run, settle
from localllm.engine.core import Engine, EngineSettings
from localllm_backends.contract import Chunk
from support.requests import request_for
from support.scripted_backend import END, ScriptedBackend, ScriptedResult, row_after

# What a further row, and the second one besides, and a guess take, in plain steps: from a processor that computes to a device
# that waits for its memory. (SmolLM2 on two cores: eight rows take 4.8 steps. The others span what is published of verifying
# drafts on such devices; a guess is a layer and an output matrix of a model of 8 to 32 billion weights.)
MACHINES = {
    "two cores": (0.54, 0.0, 0.15),
    "M4 Max": (0.12, 0.1, 0.06),
    "RTX 5090": (0.02, 0.05, 0.05),
    "Strix Halo": (0.09, 0.2, 0.07),
    "DGX Spark": (0.03, 0.1, 0.06),
}
PLAIN_S = 0.01


class Guessing(ScriptedBackend):
    """Heads that are right `rate` of the time, each token by itself; wrong ones are sure of it all the same, or stop."""

    def __init__(self, machine: str, rate: float, kind: str = "mtp", *, stops: bool = False) -> None:
        super().__init__(n_ctx=8192, n_batch=64)
        object.__setattr__(self.capabilities, "drafts", 16 if kind != "dflash" else 15)
        object.__setattr__(self.capabilities, "draft_kind", kind)
        self.row, self.second, self.guess = MACHINES[machine]
        self.rate, self.stops, self.kind = rate, stops, kind
        self.now, self.drafted_s, self.rng = 0.0, 0.0, random.Random(4)
        self.ends: list[tuple[float, int]] = []

    def step(self, chunks: Seq[Chunk]) -> ScriptedResult:
        rows = sum(len(c.tokens) for c in chunks)
        self.now += PLAIN_S * (1.0 + self.row * (rows - 1) + self.second * (rows > 1))
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
    machine: str, rate: float, kind: str, n: int, *, stops: bool = False, streams: int = 1, requests: int = 1
) -> float:
    """How much faster than without drafts the last of so many requests is, `streams` at once, of `n` tokens."""
    backend = Guessing(machine, rate, kind, stops=stops)
    engine = Engine(backend, EngineSettings(draft="mtp"), clock=lambda: backend.now)
    settle(engine)
    for i in range(requests):
        asked = [
            request_for(f"{i} {k}", f"say {k}", n, GREEDY, ignore_eos=True, cache_prompt=False) for k in range(streams)
        ]
        for request in asked:
            engine.submit(request, backend.tokenize(request.id, special=False))
        while any((job := engine.jobs.find(r.id)) is None or job.prefilling for r in asked):
            engine.step()
        began, had = backend.now, engine.metrics.generated_tokens
        while engine.has_work:
            engine.step()
        taken, made = backend.now - began, engine.metrics.generated_tokens - had
    rows = 1.0 + backend.row * (streams - 1) + backend.second * (streams > 1)
    engine.close()
    return made * rows * PLAIN_S / (taken * streams)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_a_stream_keeps_its_speed_whatever_is_accepted(machine: str, kind: str) -> None:
    gains = {}
    for rate in (0.0, 0.25, 0.6, 1.0):
        gains[rate] = gain = speed(machine, rate, kind, 220, stops=kind == "mtp" and rate != 0.25)
        assert gain >= 0.97, rate
    assert gains[1.0] > (1.02 if machine == "two cores" else 2.0), gains


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_a_trial_is_bounded(machine: str, kind: str) -> None:
    """The first 24 tokens, of which nothing is right."""
    assert speed(machine, 0.0, kind, 25) >= 1 / 1.15


@pytest.mark.parametrize("machine", MACHINES)
def test_streams_together_keep_theirs(machine: str) -> None:
    for rate in (0.0, 0.5):
        assert speed(machine, rate, "eagle3", 120, streams=4) >= 0.97, rate


def test_what_was_learnt_is_known_to_the_next_request() -> None:
    first, later = (speed("two cores", 0.0, "mtp", 24, requests=n) for n in (1, 6))
    assert first < 1
    assert later == pytest.approx(1.0, abs=0.001), "short answers pay for no trial"


def test_one_that_lost_is_remembered_by_the_next_process_and_by_no_other_build(tmp_path: Path) -> None:
    def drafted(meaning: str, answers: int = 1) -> int:
        """Tokens drafted in the answers of a new process."""
        backend = Guessing("two cores", 0.0)
        backend.info = replace(backend.info, kv_meaning=meaning)
        settings = EngineSettings(draft="mtp", kv_evidence_dir=str(tmp_path))
        engine = Engine(backend, settings, clock=lambda: backend.now)
        settle(engine)
        for i in range(answers):
            run(engine, request_for(f"{i}", f"say {i}", 20, GREEDY, ignore_eos=True))
        count = int(engine.snapshot()["drafted_mtp_tokens"])
        engine.close()
        return count

    assert drafted("this build", answers=12) > 0
    assert drafted("this build") == 0
    assert drafted("another build") > 0
    for file in (tmp_path / "drafting").iterdir():
        file.write_text('{"right": 3, "seen": "many"')
    assert drafted("this build") > 0
