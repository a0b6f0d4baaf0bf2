"""Bounds on waiting times on a device whose step durations follow the curve measured on a real
card, with an emulated clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.drive import GREEDY
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Event, Generation, Request, Text
from support.emulated_device import DeviceClock, EmulatedDevice, Speeds
from support.emulated_disk import EmulatedReads

GAP_S = 0.02
PROMPT, NEWCOMER, ANSWER = 71, 3000, 100
WARM = Speeds(first_use_s=0.0)


class Card:
    """An engine on an emulated card. It records the times of each request's tokens."""

    def __init__(self, speeds: Speeds, **settings: Any) -> None:
        rows = np.random.default_rng(1).normal(size=(8, 300)).astype(np.float32)
        self.device = EmulatedDevice(rows, speeds, n_seq_max=40, clock=DeviceClock())
        wanted = EngineSettings(headroom_bytes=0, gap_s=GAP_S, **settings)
        self.engine = Engine(self.device, wanted, clock=self.device.clock.now)
        self.came_s: dict[str, list[float]] = {}
        self._asked = 0

    def ask(self, n_prompt: int, n_tokens: int, *, cached: bool = False) -> str:
        """Submit a request and return its name."""
        self._asked += 1
        name = f"r{self._asked}"
        prompt = [3 + self._asked] * n_prompt
        generation = Generation(GREEDY, n_tokens, ignore_eos=True, cache_prompt=cached)
        self.engine.submit(Request(name, prompt, generation), prompt)
        self.came_s[name] = []
        return name

    def until(self, done: Callable[[], bool]) -> None:
        while self.engine.has_work and not done():
            if self.engine.can_step:
                self._note(self.engine.step(self._note))
            else:
                self.engine.idle()

    def _note(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Text):
                self.came_s[event.id] += [self.now] * len(event.tokens)

    @property
    def now(self) -> float:
        return self.device.clock.now()

    def first_token_s(self, n_prompt: int, *, cached: bool = False) -> float:
        """Return how long a request submitted now waits for its first token."""
        began = self.now
        name = self.ask(n_prompt, 2, cached=cached)
        self.until(lambda: bool(self.came_s[name]))
        return self.came_s[name][0] - began

    def burst(self, n: int) -> tuple[float, list[float]]:
        """Submit one request and the others one step later. Return the total duration and each
        request's time to first token."""
        began = self.now
        names = [self.ask(PROMPT, ANSWER)]
        self._note(self.engine.step(self._note))
        names += [self.ask(PROMPT, ANSWER) for _ in range(n - 1)]
        self.until(lambda: False)
        return self.now - began, [self.came_s[name][0] - began for name in names]


def allowed_s(n: int) -> float:
    """Return the least duration of a burst of `n`: all prompts in the fewest steps, then all
    answers together."""
    whole, rest = divmod(n * PROMPT, 2048)
    return whole * WARM.step_s(2048) + WARM.step_s(rest) + (ANSWER - 1) * WARM.step_s(n)


@pytest.mark.parametrize("streams", [1, 8, 32])
@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_a_new_request_during_streams_waits_little_longer_than_alone(
    streams: int, factor: float
) -> None:
    """No concurrent stream pauses for longer than the bound plus one step."""
    card = Card(WARM.times(factor))
    while card.engine.idle():
        pass
    alone_s = card.first_token_s(NEWCOMER)
    names = [card.ask(20, 2000) for _ in range(streams)]
    card.until(lambda: all(len(card.came_s[name]) > 20 for name in names))
    plain_s, before = card.device.speeds.step_s(streams), card.now
    beside_s = card.first_token_s(NEWCOMER)
    gaps = [np.diff([t for t in card.came_s[name] if t >= before]) for name in names]
    assert np.quantile(np.concatenate(gaps), 0.95) <= GAP_S + plain_s
    assert beside_s <= 1.5 * alone_s + GAP_S + plain_s


@pytest.mark.parametrize("streams", [8, 32])
def test_a_burst_takes_little_more_than_the_curve_allows(streams: int) -> None:
    card = Card(WARM)
    first_s, came_s = card.burst(streams)
    assert first_s <= allowed_s(streams) / 0.9, "also with nothing learnt yet"
    assert statistics.mean(came_s) <= 1.2 * WARM.step_s(streams * PROMPT)
    assert card.burst(streams)[0] <= allowed_s(streams) / 0.9


def test_the_first_burst_of_requests_pays_no_one_time_loading() -> None:
    """Steps of all sizes are run after "ready". A burst that arrives earlier pays for their
    loading."""
    card = Card(Speeds())
    cold_s, _ = card.burst(32)
    card = Card(Speeds())
    while card.engine.idle():
        pass
    assert card.device.cells_free() == card.device.info.n_ctx
    first_s, _ = card.burst(32)
    assert cold_s > 1.3 * first_s
    assert first_s <= 1.05 * card.burst(32)[0]


def test_a_request_during_the_warm_up_waits_for_one_warm_up_step() -> None:
    speeds = Speeds()
    card = Card(speeds)
    waits = []
    for _ in range(9):
        before = card.device.steps
        card.engine.idle()
        assert card.device.steps == before + 1, "one at a time"
        waits.append(card.first_token_s(20))
    assert max(waits) <= 2 * speeds.first_use_s + speeds.step_s(20)


# Llama 3.1 8B in f16: 32 layers with 8 heads of 128 values, for K and V.
KV_TOKEN_BYTES = 131_072


@pytest.mark.parametrize("disk_bytes_s", [1e9, 3e9, 7e9])
def test_after_a_restart_a_prefix_is_loaded_or_computed_by_estimated_time(
    tmp_path: Path, disk_bytes_s: float
) -> None:
    """Step costs were measured after "ready", and the first blocks show how fast the disk is."""
    speeds = Speeds(first_use_s=0.0, kv_token_bytes=KV_TOKEN_BYTES, bytes_s=3.35e12)
    settings = {"disk_dir": str(tmp_path), "disk_bytes": 10**9}
    before = Card(speeds, **settings)
    compute_s = before.first_token_s(NEWCOMER, cached=True)
    before.until(lambda: False)
    before.engine.close()

    card = Card(speeds, **settings)
    tier = card.engine.pool.kv.disk
    assert tier is not None
    # an emulated token's KV is one byte
    tier.reads = EmulatedReads(tier, card.device.clock, disk_bytes_s / KV_TOKEN_BYTES)
    while card.engine.idle():
        pass
    read_s = NEWCOMER * KV_TOKEN_BYTES / disk_bytes_s
    after_s = card.first_token_s(NEWCOMER, cached=True)
    assert after_s <= 1.15 * min(read_s, compute_s) + speeds.step_s(1)
    card.engine.close()
