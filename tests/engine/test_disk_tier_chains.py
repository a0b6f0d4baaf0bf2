"""After any writes, uses and evictions, no file on disk lacks the parent files that it depends
on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.engine.cache.disk import DiskTier
from localllm.engine.cache.tree import PrefixCache, as_tokens
from support.examples import examples

PIECE = 8
BLOCK_BYTES = 200


def open_tier(directory: Path, capacity_bytes: int) -> tuple[DiskTier, PrefixCache, int]:
    cache = PrefixCache(capacity_bytes=10**6)
    tier = DiskTier(directory / "model", "model", capacity_bytes)
    return tier, cache, tier.open(cache)


def store(tier: DiskTier, cache: PrefixCache, line: list[int]) -> None:
    """Store a sequence as the engine exports a finished one: in pieces, wherever the cache has a
    gap."""
    while (gap := cache.gap(line)) is not None:
        start, stop = gap[0], min(gap[1], gap[0] + PIECE)
        tokens = as_tokens(line[:stop])
        block = tier.make_block(tokens, bytes([stop]) * BLOCK_BYTES, start)
        assert cache.insert(tokens, block)
        tier.write(block, tokens, block.file_time_ns)


def reachable(directory: Path, capacity_bytes: int) -> tuple[int, int]:
    """Return (files on disk, files that a restarted engine can use)."""
    on_disk = len(list(directory.glob("*/*.kv")))
    tier, _, entered = open_tier(directory, capacity_bytes)
    tier.close()
    return on_disk, entered


LINE = st.lists(st.integers(0, 1), min_size=1, max_size=40)
ACTION = st.tuples(st.sampled_from(["store", "read", "restart"]), LINE)


@settings(max_examples=examples(80))
@given(actions=st.lists(ACTION, min_size=1, max_size=12), capacity=st.integers(400, 4000))
def test_every_file_on_disk_is_reachable_from_its_first_block(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, list[int]]], capacity: int
) -> None:
    directory = tmp_path_factory.mktemp("kv")
    tier, cache, _ = open_tier(directory, capacity)
    for action, line in actions:
        if action == "store":
            store(tier, cache, line)
        elif action == "read":
            # Load only the deepest block: its parents are in memory, so their files are not read.
            for part in cache.match(line).parts[-1:]:
                tier.load(part.block)  # type: ignore[arg-type]
        else:
            tier.close()
            tier, cache, _ = open_tier(directory, capacity)
        tier.flush()
        on_disk, entered = reachable(directory, capacity)
        assert entered == on_disk
        assert sum(f.stat().st_size for f in directory.glob("*/*.kv")) <= capacity
        cache.check_integrity()
    tier.close()


def test_a_used_child_keeps_its_parent(tmp_path: Path) -> None:
    one_file = 8 * BLOCK_BYTES
    tier, cache, _ = open_tier(tmp_path, one_file)
    conversation = [1] * 24
    store(tier, cache, conversation)
    tier.flush()
    size = max(f.stat().st_size for f in tmp_path.glob("*/*.kv"))
    for other in range(2, 12):
        tier.load(cache.match(conversation).parts[-1].block)  # type: ignore[arg-type]
        store(tier, cache, [other] * PIECE)
        tier.flush()
    tier.close()
    assert len(list(tmp_path.glob("*/*.kv"))) >= one_file // size - 1
    _, restarted, _ = open_tier(tmp_path, one_file)
    assert restarted.peek(conversation).length == len(conversation)


def test_a_block_whose_file_was_evicted_keeps_its_memory(tmp_path: Path) -> None:
    tier, cache, _ = open_tier(tmp_path, 10**6)
    store(tier, cache, [1] * PIECE)
    tier.flush()
    tier.sync([cache])
    block = cache.peek([1] * PIECE).parts[0].block
    for file in tmp_path.glob("*/*.kv"):
        file.unlink()
    assert not block.demote()
    assert block.data == bytes([PIECE]) * BLOCK_BYTES
    tier.close()


def test_freeing_memory_deletes_no_file_of_a_sequence_in_the_context(tmp_path: Path) -> None:
    """A block that is only on disk has no memory to free."""
    tier, cache, _ = open_tier(tmp_path, 10**6)
    lines = [[1] * PIECE, [2] * PIECE]
    for line in lines:
        cache.budget.shrink(10**6)
        store(tier, cache, line)
        tier.flush()
        tier.sync([cache])
    cache.budget.resize(BLOCK_BYTES)

    cache.budget.in_context = lambda: [
        (cache, block) for line in lines for block in cache.on_path(as_tokens(line))
    ]
    assert cache.budget.make_room(BLOCK_BYTES, force=True) == "free"
    assert [cache.peek(line).length for line in lines] == [PIECE, PIECE]
    tier.close()


def test_the_last_free_space_of_a_disk_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = 10**12
    monkeypatch.setattr(
        "localllm.engine.cache.disk.shutil.disk_usage",
        lambda path: type("Usage", (), {"free": free_bytes, "total": 10**12, "used": 0}),
    )
    tier, cache, _ = open_tier(tmp_path, 10**9)
    store(tier, cache, [1] * 24)
    tier.flush()
    assert len(list(tmp_path.glob("*/*.kv"))) == 3
    # Other programs have filled the disk. Old blocks first make room for new ones; then the tier
    # gives its space back.
    free_bytes = 2 * 10**9
    store(tier, cache, [2] * 8)
    tier.flush()
    assert len(list(tmp_path.glob("*/*.kv"))) <= 3
    free_bytes = 10**9
    store(tier, cache, [3] * 8)
    tier.flush()
    assert not [p for p in tmp_path.glob("*/*.kv") if p.stat().st_size == 0]
    assert tier.written_bytes == 4 * BLOCK_BYTES, "nothing is written to a disk that is full"
    tier.close()


def test_a_failed_write_is_not_retried_before_the_block_is_used_again(
    tmp_path: Path,
) -> None:
    """An engine that closes asks repeatedly while blocks may still be written."""
    tier, cache, _ = open_tier(tmp_path, BLOCK_BYTES // 2)
    line = as_tokens([1] * PIECE)
    block = tier.make_block(line, bytes(BLOCK_BYTES), 0)
    assert cache.insert(line, block, used_ns=7)
    assert tier.wants(block)
    tier.write(block, line, 7)
    tier.flush()
    tier.sync([cache])
    for used, wanted in ((7, False), (6, False), (8, True)):
        block.touch(used)
        assert tier.wants(block) == wanted
    tier.close()
