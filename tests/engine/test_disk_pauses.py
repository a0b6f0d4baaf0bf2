"""Prefixes are written to disk while the engine is idle, so that writing delays no token. After a
while they are written even if it is busy."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from localllm.engine import EngineSettings
from localllm.engine.cache import tunables
from localllm.engine.cache.disk import DiskTier
from localllm.engine.cache.eviction import Block
from localllm.engine.cache.tree import PrefixCache, as_tokens
from localllm.engine.core import Engine
from support.requests import request_for
from support.scripted_backend import ScriptedBackend

TOKENS = as_tokens(np.arange(32, dtype=np.int32))


class Told(threading.Event):
    """An event that signals each time a thread starts to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.release()
        return super().wait(timeout)


def opened(directory: Path, told: Told | None = None) -> tuple[DiskTier, Told]:
    """Return a tier whose engine is busy, and the event that its writer waits for."""
    told = told or Told()
    tier = DiskTier(directory, "model", 10**9, quiet=told)
    tier.open(PrefixCache(capacity_bytes=10**9))
    tier.set_busy(True)
    return tier, told


def kept(tier: DiskTier, n: int) -> Block:
    """Create a block and queue it for writing."""
    block = tier.make_block(TOKENS, b"kv" * n, 0)
    tier.write(block, TOKENS, block.file_time_ns)
    return block


def written(path: Path, within_s: float = 10.0) -> bool:
    """Return whether the file appears in time."""
    until = time.monotonic() + within_s
    event = threading.Event()
    while not path.exists() and time.monotonic() < until:
        event.wait(0.01)
    return path.exists()


def test_the_disk_is_not_written_while_the_engine_works(tmp_path: Path) -> None:
    tier, told = opened(tmp_path)
    block = kept(tier, 100)
    assert told.waited.acquire(timeout=10)
    assert not block.path.exists()
    tier.set_busy(False)
    assert written(block.path)
    tier.close()


def test_a_pause_that_ends_at_once_starts_no_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunables, "WRITE_PAUSE_S", 10.0)
    tier, told = opened(tmp_path)
    block = kept(tier, 100)
    for _ in range(3):
        assert told.waited.acquire(timeout=10)
        assert not block.path.exists()
        tier.set_busy(False)
        tier.set_busy(True)
    tier.close()
    assert block.path.exists(), "closing writes what is left"


def test_blocks_are_written_during_work_after_a_maximum_delay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunables, "WRITE_PATIENCE_S", 0.05)
    tier, _ = opened(tmp_path)
    assert written(kept(tier, 100).path)
    tier.close()


def test_many_unwritten_bytes_are_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunables, "WRITE_WAITING_BYTES", 100)
    tier, _ = opened(tmp_path)
    assert written(kept(tier, 100).path)
    tier.close()


class Watched(Told):
    """An event that records the timeout of each wait, in seconds, and returns at once."""

    def __init__(self) -> None:
        super().__init__()
        self.rests: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.rests.append(timeout or 0.0)
        return self.is_set()


def test_writes_during_work_happen_in_short_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that hashes and writes a sequence's KV without breaks would take a core from the
    computation for all that time."""
    monkeypatch.setattr(tunables, "WRITE_PATIENCE_S", 0.0)
    watched = Watched()
    tier, _ = opened(tmp_path, watched)
    watched.rests.clear()
    n_bytes = 8 * 2**20
    block = kept(tier, n_bytes // 2)
    assert written(block.path)
    # One wait was for a pause before the writing started.
    assert len(watched.rests) - 1 >= n_bytes // 2**20, (
        "a turn is never longer than a megabyte takes"
    )
    tier.close()
    assert bytes(tier.load(block) or b"") == b"kv" * (n_bytes // 2)


def test_blocks_that_block_a_waiting_request_are_written_without_rests(tmp_path: Path) -> None:
    watched = Watched()
    tier, _ = opened(tmp_path, watched)
    tier.set_urgent(True)
    watched.rests.clear()
    assert written(kept(tier, 2**22).path)
    assert not watched.rests
    tier.close()


def test_the_engine_tells_the_disk_tier_whether_it_is_working(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[bool] = []
    monkeypatch.setattr(DiskTier, "set_busy", lambda _self, busy: heard.append(busy))
    engine = Engine(ScriptedBackend(), EngineSettings(disk_dir=str(tmp_path)))
    engine.submit(request_for("a", [4, 5, 6], max_tokens=3, ignore_eos=True), [4, 5, 6])
    while engine.has_work:
        engine.step()
    assert set(heard) == {True}
    engine.idle()
    assert heard[-1] is False
    engine.close()


def test_only_the_needed_tokens_of_a_file_are_read(tmp_path: Path) -> None:
    tier, _ = opened(tmp_path)
    block = kept(tier, 1000)
    tier.close()
    block.data = None
    assert tier.reads.is_worth_reading([block], 0.05), (
        "before its disk is measured: that shows how fast"
    )
    tier.reads.learn(20_000, 1.0)
    assert tier.reads.is_worth_reading([block], 0.32), (
        "a tenth of a second to read, a third to compute"
    )
    assert not tier.reads.is_worth_reading([block], 0.05), "a twentieth to compute"
    assert tier.reads.is_worth_reading([block], 0.0), "before computing is measured"
