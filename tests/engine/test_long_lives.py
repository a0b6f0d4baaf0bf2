"""Invariants of long use, for any sequence of requests, cancels, memory shortages and restarts, in
any small amount of memory. Every request ends exactly once, with the answer that it gives alone.
Budgets hold, and housekeeping and closing terminate."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.drive import GREEDY, Outcome, advance, run, settle
from engine.test_reuse_law import LINE_BYTES, PIECE, Clock, Packed, PackedStates
from localllm.engine import EngineSettings
from localllm.engine.cache import tunables
from localllm.engine.core import Engine
from localllm.engine.messages import Finish
from support.requests import request_for
from support.scripted_backend import TURN

MOST_STEPS = 5000
ACTIONS = (
    *["ask"] * 6, *["step"] * 4, *["drain"] * 3, "cancel", "pause", "pause", "short pause",
    "restart", "kill", "shrink",
)  # fmt: skip


class OnDevice(Packed):
    """A backend whose KV is in device memory, with every cell a run of its own."""

    def __init__(self, **size: Any) -> None:
        super().__init__(**size)
        self.capabilities = dataclasses.replace(self.capabilities, kv_on_device=True)

    def export_runs(self, sequence: int, start: int, stop: int) -> int:
        return stop - start

    def idle_work(self, spare_bytes: int | None) -> bool:
        return False


def backend(shape: str, size: dict[str, int]) -> Packed:
    if shape == "whole":
        return Packed(rewind="none", segments=False, **size)
    if shape == "states":
        return PackedStates(rewind="none", states=True, **size)
    if shape == "bounded":
        return PackedStates(rewind="bounded", rewind_tokens=8, states=True, **size)
    return OnDevice(**size) if shape == "device" else Packed(**size)


@dataclass
class Life:
    """A series of engines that use the same folder, and all requests that they were sent."""

    folder: Path
    seed: int
    clock: Clock = field(default_factory=Clock)
    outcome: Outcome = field(default_factory=Outcome)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    live: list[str] = field(default_factory=list)
    lines: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.shape = rng.choice(["plain", "states", "whole", "bounded", "device"])
        self.size = {
            "n_ctx": rng.choice([400, 700, 1024, 8192]),
            "n_seq_max": rng.choice([2, 4, 8]),
            "n_batch": rng.choice([16, 64, 256]),
        }
        self.memory_bytes = int(rng.choice([0.2, 0.5, 1, 2, 4]) * LINE_BYTES)
        self.disk_bytes = rng.choice([0, 1, 3, 8, 40]) * LINE_BYTES
        self.tenants = [""] if rng.random() < 0.5 else ["ann", "bob", "cid"]
        self.heads = [[TURN, *self.words(rng.randrange(20, 200))] for _ in range(3)]
        self.engine = self.start()

    def words(self, n: int) -> list[int]:
        return [self.rng.randrange(3, 250) for _ in range(n)]

    def start(self) -> Engine:
        settings = EngineSettings(
            cache_bytes=self.memory_bytes,
            disk_dir=str(self.folder) if self.disk_bytes else None,
            disk_bytes=self.disk_bytes,
            headroom_bytes=0,
        )
        return Engine(backend(self.shape, self.size), settings, clock=self.clock)

    def ask(self) -> None:
        """Submit a request that continues a sequence or a shared prefix, or part of one. Sometimes
        repeat an earlier prompt."""
        rng, n_ctx = self.rng, self.size["n_ctx"]
        base = rng.choice(self.lines[-8:] + self.heads)
        if rng.random() < 0.3:
            base = base[: rng.randrange(1, len(base) + 1)]
        if len(base) > 0.6 * n_ctx:
            base = base[: int(0.3 * n_ctx)]
        prompt = (
            [*base, TURN, *self.words(rng.randrange(1, 40)), TURN]
            if rng.random() < 0.8
            else list(base)
        )
        key = f"r{len(self.prompts)}"
        self.prompts[key] = prompt
        self.live.append(key)
        request = request_for(key, prompt, rng.choice([1, 6, 30]), GREEDY, ignore_eos=True)
        whose = dataclasses.replace(request.generation, tenant=rng.choice(self.tenants))
        request = dataclasses.replace(request, generation=whose)
        self.outcome.take(self.engine.submit(request, prompt))

    def step(self) -> None:
        self.outcome.take(advance(self.engine))
        for key in [k for k in self.live if k in self.outcome.ends]:
            self.live.remove(key)
            if key in self.outcome.tokens:
                self.lines.append(self.prompts[key] + self.outcome.tokens[key])

    def drain(self) -> None:
        for _ in range(MOST_STEPS):
            if not self.engine.has_work:
                break
            self.step()
            if self.engine.pool.waiting and self.engine.pool.kv.disk is not None:
                self.engine.pool.kv.disk.wait(0.01)
        assert not self.engine.has_work, "the engine does not come to an end"
        self.engine.check_integrity()

    def pause(self) -> None:
        for _ in range(100):
            settle(self.engine)
            if not self.engine.pool.waiting:
                break
            assert self.engine.pool.kv.disk is not None
            self.engine.pool.kv.disk.wait(10.0)
        if self.engine.pool.kv.disk is not None:
            self.engine.pool.kv.disk.flush()
        settle(self.engine)

    def close(self) -> None:
        self.pause()
        self.engine.close()

    def do(self, action: str) -> None:
        busy, rng = self.engine.has_work, self.rng
        if action == "ask" and len(self.live) < 6:
            self.ask()
        elif action == "step":
            for _ in range(rng.randrange(1, 12)):
                if self.engine.has_work:
                    self.step()
        elif action == "drain":
            self.drain()
        elif action == "cancel" and self.live:
            self.outcome.take(self.engine.cancel(rng.choice(self.live)))
        elif action == "shrink":
            self.engine.pool.kv.budget.shrink(rng.randrange(self.memory_bytes))
        elif action == "pause" and not busy:
            self.pause()
        elif action == "short pause" and not busy:
            for _ in range(rng.randrange(1, 10)):
                self.engine.idle()
        elif action == "restart" and not busy:
            self.close()
            self.engine = self.start()
        elif action == "kill" and not busy:
            if self.engine.pool.kv.disk is not None:
                self.engine.pool.kv.disk.close()
            self.engine = self.start()
        assert self.engine.pool.kv.budget.held_bytes <= self.memory_bytes

    def check(self) -> None:
        """Check that every request ended once and that its tokens are those of an isolated run."""
        for key in self.prompts:
            assert len(self.outcome.ends.get(key, [])) == 1, f"{key}: {self.outcome.ends.get(key)}"
        for key in self.rng.sample(list(self.prompts), min(6, len(self.prompts))):
            (end,), written = self.outcome.ends[key], self.outcome.tokens.get(key, [])
            if isinstance(end, Finish) and written:
                alone = Engine(Packed(n_ctx=8192, n_batch=256), EngineSettings(headroom_bytes=0))
                request = request_for(
                    "alone", self.prompts[key], len(written), GREEDY, ignore_eos=True
                )
                assert written == run(alone, request).tokens["alone"], f"{key} ({self.shape})"


def live(folder: Path, seed: int) -> Life:
    life = Life(folder, seed)
    for _ in range(life.rng.randrange(10, 60)):
        life.do(life.rng.choice(ACTIONS))
    life.drain()
    life.close()
    life.check()
    return life


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunables, "PIECE_TOKENS", PIECE)


@pytest.mark.parametrize("seed", range(40))
def test_every_request_of_a_random_server_lifetime_ends(seed: int, tmp_path: Path) -> None:
    life = live(tmp_path, seed)
    assert life.outcome.ends.keys() == life.prompts.keys()


@pytest.mark.long
def test_every_request_of_a_thousand_random_lifetimes_ends(tmp_path: Path) -> None:
    for seed in range(40, 1040):
        life = live(tmp_path / str(seed), seed)
        assert life.outcome.ends.keys() == life.prompts.keys()
