"""A block may be evicted if the context holds a copy of it. The pool remembers what a sequence
shares with the cache, so looking for copies does not read the context's tokens again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cells_only import SCALED_TOKEN_BYTES, CellsOnly
from localllm.engine.cache import tunables
from localllm.engine.cache.disk import DiskTier
from localllm.engine.cache.eviction import IdleSequence
from localllm.engine.cache.pool import SequencePool
from localllm.engine.cache.store import KvStore
from localllm.engine.cache.tree import PrefixCache, as_tokens
from localllm.engine.tokens import Tokens
from localllm_backends.contract import Chunk

PIECE = 16
LEAVING = 20 * PIECE


class Counts:
    """Counts the sequence tokens passed to the tree, and the blocks made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = self.blocks = 0
        look, read, make = PrefixCache.on_path, IdleSequence.cache_tokens, DiskTier.make_block

        def looked(tree: PrefixCache, prefix: Tokens) -> object:
            self.tokens += len(prefix)
            return look(tree, prefix)

        def given(idle: IdleSequence, start: int = 0, stop: int | None = None) -> Tokens:
            tokens = read(idle, start, stop)
            self.tokens += len(tokens)
            return tokens

        def made(*args: object) -> object:
            self.blocks += 1
            return make(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(PrefixCache, "on_path", looked)
        monkeypatch.setattr(IdleSequence, "cache_tokens", given)
        monkeypatch.setattr(DiskTier, "make_block", made)


def computed(backend: CellsOnly, tokens: Sequence[int]) -> int:
    """Compute `tokens` in a new sequence and return the sequence."""
    sequence = backend.new_sequence()
    backend.step([Chunk(sequence, list(tokens))])
    return sequence


def tokens_per_block(
    folder: Path, monkeypatch: pytest.MonkeyPatch, others: int, n_tokens: int
) -> float:
    """Return the tokens read per block of a request that leaves the context while it holds `others`
    idle sequences of `n_tokens` each. Neither memory nor disk has room for all of them."""
    monkeypatch.setattr(tunables, "PIECE_TOKENS", PIECE)
    backend = CellsOnly(others * n_tokens + LEAVING)
    backend.capabilities = replace(backend.capabilities, kv_on_device=True)
    half = (others * n_tokens + LEAVING) // 2 * SCALED_TOKEN_BYTES
    disk = DiskTier(folder / "cells", "cells", half // 2, free_bytes=0)
    pool = SequencePool(backend, KvStore(backend, half, disk))
    for number in range(others):
        tokens = [4 + number] * n_tokens
        pool.release(computed(backend, tokens), as_tokens(tokens))
        while pool.tick(busy=False) or pool.waiting:
            disk.flush()
    leaving = [3] * LEAVING
    sequence = computed(backend, leaving)
    with monkeypatch.context() as patched:
        counts = Counts(patched)
        pool.park(sequence, as_tokens(leaving))
    disk.close()
    pool.cache.check_integrity()
    assert pool.cache.peek(leaving).length == LEAVING
    assert len(pool.idle) == others
    return counts.tokens / counts.blocks


def test_a_block_is_written_without_reading_the_context_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = tokens_per_block(tmp_path / "few", monkeypatch, 2, 10 * PIECE)
    many = tokens_per_block(tmp_path / "many", monkeypatch, 6, 40 * PIECE)
    assert many < few + 6 * PIECE
