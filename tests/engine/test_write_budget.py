"""The bytes written per day are limited, across restarts and processes. Blocks that are not written
stay in memory, and no answer is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.drive import GREEDY, run, settle
from localllm import paths
from localllm.engine import EngineSettings
from localllm.engine.cache import disk as disk_tier
from localllm.engine.cache.disk import DiskTier
from localllm.engine.cache.folder import WriteBudget
from localllm.engine.cache.tree import PrefixCache, as_tokens
from localllm.engine.core import Engine
from support.requests import request_for
from support.scripted_backend import ScriptedBackend

LONG = 400
BLOCK_BYTES = 1000
PROMPT = [259, *[40 + i % 50 for i in range(700)], 259, 60]


def opened(
    directory: Path, *, daily_bytes: int, day: str = "2026-05-01"
) -> tuple[DiskTier, PrefixCache]:
    cache = PrefixCache(capacity_bytes=10**6)
    tier = DiskTier(directory / "model", "model", 10**9, daily_bytes=daily_bytes)
    tier.budget.day = lambda: day
    tier.open(cache)
    return tier, cache


def store(tier: DiskTier, cache: PrefixCache, line: list[int]) -> None:
    tokens = as_tokens(line)
    block = tier.make_block(tokens, bytes(BLOCK_BYTES), 0)
    assert cache.insert(tokens, block)
    tier.write(block, tokens, block.file_time_ns)


def heard(tier: DiskTier, cache: PrefixCache) -> int:
    """Return the number of files after all queued writes are done and the engine has registered
    them."""
    tier.flush()
    tier.sync([cache])
    cache.check_integrity()
    return len(list(tier.directory.glob("*.kv")))


def line_of(first: int, n: int) -> list[int]:
    return [first, *range(1000, 1000 + n - 1)]


def test_written_bytes_are_counted_across_restarts_and_processes(tmp_path: Path) -> None:
    tier, cache = opened(tmp_path, daily_bytes=10**9)
    store(tier, cache, line_of(1, LONG))
    store(tier, cache, line_of(2, LONG))
    heard(tier, cache)
    tier.close()
    on_disk = sum(f.stat().st_size for f in tmp_path.glob("*/*.kv"))
    again, _ = opened(tmp_path, daily_bytes=10**9)
    assert again.budget.written_bytes() == on_disk > 2 * BLOCK_BYTES
    other = WriteBudget(tmp_path, 10**9, lambda: "2026-05-01")
    (tmp_path / "other").mkdir()
    other.count(tmp_path / "other", 77)
    assert again.budget.written_bytes() == on_disk + 77
    assert other.written_bytes() == on_disk + 77
    again.close()


def test_the_engine_reports_written_bytes_without_reading_files(tmp_path: Path) -> None:
    tier, cache = opened(tmp_path, daily_bytes=10**9)
    store(tier, cache, line_of(1, LONG))
    heard(tier, cache)
    on_disk = sum(f.stat().st_size for f in tmp_path.glob("*/*.kv"))
    with pytest.MonkeyPatch.context() as patched:
        for name in ("open", "glob", "stat"):
            patched.delattr(Path, name)
        said = tier.snapshot()
    assert said["disk_written_today_bytes"] == on_disk > 0
    assert not said["disk_budget_used_up"]
    tier.close()


def test_the_daily_limit_is_exceeded_by_at_most_one_file(tmp_path: Path) -> None:
    tier, cache = opened(tmp_path, daily_bytes=5000)
    for n in range(10):
        store(tier, cache, line_of(n, LONG))
    n_files = heard(tier, cache)
    assert 0 < n_files < 10
    one = max(f.stat().st_size for f in tmp_path.glob("*/*.kv"))
    assert 5000 <= tier.budget.written_bytes() < 5000 + one
    assert tier.snapshot()["disk_budget_used_up"] == 1
    tier.close()

    restarted, cache = opened(tmp_path, daily_bytes=5000)
    store(restarted, cache, line_of(50, LONG))
    assert heard(restarted, cache) == n_files, "the same day goes on after a restart"
    block = cache.peek(line_of(50, LONG)).parts[0].block
    assert not block.pending
    assert block.data == bytes(BLOCK_BYTES), "it is in memory"
    restarted.close()


def test_files_are_not_deleted_for_a_block_that_exceeds_the_daily_limit(tmp_path: Path) -> None:
    tier, cache = opened(tmp_path, daily_bytes=2000)
    store(tier, cache, line_of(1, LONG))
    assert heard(tier, cache) == 1
    tier.capacity_bytes = 3000
    store(tier, cache, line_of(2, LONG))
    assert heard(tier, cache) == 1
    assert cache.peek(line_of(1, LONG)).length == LONG
    tier.close()


def test_without_a_limit_all_blocks_are_written(tmp_path: Path) -> None:
    for limit_bytes in (0, -1):
        tier, cache = opened(tmp_path / str(limit_bytes), daily_bytes=limit_bytes)
        tier.budget.count(tier.directory, 10**15)
        store(tier, cache, line_of(1, LONG))
        assert heard(tier, cache) == 1
        tier.close()


def test_a_damaged_count_file_only_makes_the_count_wrong(tmp_path: Path) -> None:
    tier, cache = opened(tmp_path, daily_bytes=10**9)
    (tier.directory / "written-2026-05-01").write_bytes(b"\xff\xfe12\n-5\n40\n99999")
    assert tier.budget.written_bytes() == 40
    store(tier, cache, line_of(1, LONG))
    assert heard(tier, cache) == 1
    tier.close()


def test_the_minimum_free_disk_space_is_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        disk_tier.shutil,
        "disk_usage",
        lambda _: type("Usage", (), {"free": 5 * 10**9, "total": 10**12, "used": 0}),
    )
    kept = {}
    for free_bytes in (2 * 10**9, 6 * 10**9):
        tier = DiskTier(tmp_path / str(free_bytes) / "model", "model", 10**9, free_bytes)
        cache = PrefixCache(capacity_bytes=10**6)
        tier.open(cache)
        store(tier, cache, line_of(1, LONG))
        kept[free_bytes] = heard(tier, cache)
        tier.close()
    assert kept == {2 * 10**9: 1, 6 * 10**9: 0}


def engine_on(
    directory: Path, *, daily_bytes: int, cache_bytes: int = 2**30
) -> tuple[Engine, DiskTier]:
    settings = EngineSettings(
        cache_bytes=cache_bytes,
        disk_dir=str(directory),
        disk_bytes=10**9,
        disk_daily_bytes=daily_bytes,
        headroom_bytes=0,
    )
    engine = Engine(ScriptedBackend(n_ctx=2048, n_batch=64), settings)
    tier = engine.pool.kv.disk
    assert tier is not None
    return engine, tier


def ask(engine: Engine, key: str, prompt: list[int]) -> int:
    """Return the number of cached tokens of one answer, after everything that it leaves is
    written."""
    outcome = run(engine, request_for(key, prompt, max_tokens=8, sampling=GREEDY, ignore_eos=True))
    settle(engine)
    assert engine.pool.kv.disk is not None
    engine.pool.kv.disk.flush()
    settle(engine)
    return outcome.finish(key).usage.cached_tokens


@pytest.mark.parametrize("daily_bytes", [0, 1])
def test_blocks_beyond_the_daily_limit_are_reused_from_memory(
    tmp_path: Path, daily_bytes: int
) -> None:
    first, tier = engine_on(tmp_path, daily_bytes=daily_bytes)
    tier.budget.count(tier.directory, 1)
    ask(first, "a", PROMPT)
    ask(first, "beside", [259, *range(20, 90)])
    assert ask(first, "again", [*PROMPT, 61]) >= len(PROMPT)
    snapshot = first.snapshot()
    assert snapshot["disk_budget_used_up"] == daily_bytes
    assert snapshot["disk_daily_limit_bytes"] == daily_bytes
    first.close()
    assert bool(ask(engine_on(tmp_path, daily_bytes=daily_bytes)[0], "b", PROMPT)) == (
        daily_bytes == 0
    )


def test_blocks_beyond_the_daily_limit_are_written_the_next_day(tmp_path: Path) -> None:
    """The blocks are written when they leave memory or the engine closes."""
    first, tier = engine_on(tmp_path, daily_bytes=10**6)
    tier.budget.count(tier.directory, 10**6)
    ask(first, "a", PROMPT)
    assert not list(tier.directory.glob("*.kv"))
    tier.budget.day = lambda: "2100-01-01"
    tier.budget.written_bytes()
    first.close()
    assert list(tier.directory.glob("*.kv"))
    again, _ = engine_on(tmp_path, daily_bytes=10**6)
    assert ask(again, "b", PROMPT) == len(PROMPT) - 1
    again.close()


def test_without_a_disk_the_counters_are_reported_as_zero() -> None:
    without = Engine(ScriptedBackend(), EngineSettings()).snapshot()
    assert {name: n for name, n in without.items() if name.startswith("disk_")} == {
        "disk_written_bytes": 0,
        "disk_written_today_bytes": 0,
        "disk_daily_limit_bytes": 0,
        "disk_budget_used_up": 0,
        "disk_read_blocks": 0,
        "disk_bad_blocks": 0,
    }


def test_a_write_reads_only_new_entries_of_the_count_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day may have many thousand writes."""
    read_bytes = 0
    whole_file = paths.file_bytes

    def watched(path: Path, most_bytes: int = paths.MAX_FILE_BYTES, begin: int = 0) -> bytes:
        nonlocal read_bytes
        data = whole_file(path, most_bytes, begin)
        read_bytes += len(data)
        return data

    monkeypatch.setattr(paths, "file_bytes", watched)
    (tmp_path / "model").mkdir()
    budget = WriteBudget(tmp_path, day=lambda: "2026-05-01")
    for _ in range(50):
        budget.count(tmp_path / "model", 100)
        budget.written_bytes()
    (file,) = (tmp_path / "model").iterdir()
    assert budget.written_bytes() == 5000
    assert read_bytes == file.stat().st_size


def test_a_partial_count_line_of_another_process_counts_once_complete(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    budget = WriteBudget(tmp_path, day=lambda: "2026-05-01")
    theirs = tmp_path / "model" / "written-2026-05-01.theirs"
    with theirs.open("ab", buffering=0) as file:
        for piece, total in ((b"10\n2", 10), (b"0", 10), (b"\n", 30), (b"5\n", 35)):
            file.write(piece)
            assert budget.written_bytes() == total
    theirs.write_bytes(b"7\n")
    assert budget.written_bytes() == 7, "its cache was cleared meanwhile"
    budget.day = lambda: "2026-05-02"
    assert budget.written_bytes() == 0
