"""The radix tree keeps its invariants in any history, and finds the same prefixes as a plain list
of sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from localllm.engine.cache.eviction import Block, IdleSequence
from localllm.engine.cache.matching import FollowedTree
from localllm.engine.cache.tree import Match, PrefixCache, as_tokens, common_prefix
from support.examples import examples

# A tiny alphabet makes shared prefixes, splits and repeats common.
lines = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def put(cache: PrefixCache, line: list[int], start: int = 0, size: int = 10) -> bool:
    return cache.insert(line, Block(bytes(size), 0 if cache.indivisible else start, len(line)))


@given(lines, lines)
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(np.array(a, dtype=np.int32), np.array(b, dtype=np.int32))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


@given(st.lists(lines, max_size=20), lines)
def test_a_segment_tree_finds_the_longest_stored_prefix(
    stored: list[list[int]], prompt: list[int]
) -> None:
    cache = PrefixCache(capacity_bytes=10**9)
    for line in stored:
        start = cache.peek(line).length
        if start < len(line):
            assert put(cache, line, start)
        cache.check_integrity()
    best = 0
    for line in stored:
        n = next(
            (i for i, (x, y) in enumerate(zip(line, prompt, strict=False)) if x != y),
            min(len(line), len(prompt)),
        )
        best = max(best, n)
    match = cache.match(prompt)
    assert match.length == match.saved == match.known == best
    position = 0
    for part in match.parts:
        assert part.start == position < part.stop
        assert part.block.start <= part.start
        assert part.stop <= part.block.stop
        position = part.stop
    assert position == best


@given(st.lists(lines, max_size=20), lines)
def test_a_tree_of_complete_snapshots_finds_the_longest_stored_sequence(
    stored: list[list[int]], prompt: list[int]
) -> None:
    cache = PrefixCache("state", capacity_bytes=10**9)
    for line in stored:
        put(cache, line)
        cache.check_integrity()
    best = max((len(s) for s in stored if prompt[: len(s)] == s), default=0)
    match = cache.match(prompt)
    assert match.length == best
    if best:
        (part,) = match.parts
        assert (part.block.start, part.start, part.stop, part.block.stop) == (0, 0, best, best)


def test_eviction_takes_the_oldest_leaf_and_never_a_locked_one() -> None:
    cache = PrefixCache(capacity_bytes=30)
    put(cache, [1, 1])
    put(cache, [1, 1, 2], 2)
    put(cache, [3])
    cache.match([1, 1, 2])
    put(cache, [4])
    assert cache.match([3]).length == 0, "the least recently used leaf goes first"
    assert cache.match([1, 1, 2]).length == 3, "a parent never goes before its child"
    held = cache.match([1, 1, 2])
    cache.lock(held)
    for token in range(5, 9):
        put(cache, [token])
    assert cache.match([1, 1, 2]).length == 3
    cache.unlock(held)
    cache.check_integrity()


def test_a_locked_block_cannot_be_evicted() -> None:
    cache = PrefixCache(capacity_bytes=100)
    put(cache, [1, 2])
    match = cache.match([1, 2])
    cache.lock(match)
    (part,) = match.parts
    with pytest.raises(AssertionError):
        cache.evict(part.block)
    cache.unlock(match)
    cache.evict(part.block)
    assert cache.held_bytes == 0


def test_a_block_larger_than_the_cache_is_not_stored() -> None:
    cache = PrefixCache(capacity_bytes=5)
    assert not put(cache, [1], size=6)
    assert cache.held_bytes == 0


def test_a_segment_without_its_parent_is_kept_and_reported_as_a_gap() -> None:
    cache = PrefixCache(capacity_bytes=100)
    assert put(cache, [1, 2, 3, 4], start=2)
    match = cache.match([1, 2, 3, 4])
    assert (match.length, match.saved, match.known) == (0, 2, 4)
    assert cache.gap([1, 2, 3, 4, 5]) == (0, 2)
    cache.check_integrity()
    assert put(cache, [1, 2])
    assert cache.peek([1, 2, 3, 4]).length == 4
    assert cache.gap([1, 2, 3, 4, 5]) == (4, 5)
    cache.check_integrity()


@dataclass(eq=False)
class Filed(Block):
    """A block whose copy on disk exists (`filed`) or is being written (`pending`)."""

    filed: bool = True
    in_memory: bool = True

    def demote(self) -> bool:
        self.in_memory = self.in_memory and not self.filed
        return self.filed

    def promote(self, data: bytes | memoryview) -> None:
        self.in_memory = True

    @property
    def held_bytes(self) -> int:
        return self.size_bytes if self.in_memory else 0


def test_blocks_on_disk_give_up_their_memory_for_new_blocks() -> None:
    cache = PrefixCache(capacity_bytes=30)
    line = list(range(10))
    for n in range(1, 11):
        assert cache.insert(line[:n], Filed(bytes(10), n - 1, n)), (
            "a cache that is full takes in what is new"
        )
        cache.check_integrity()
    assert cache.peek(line).length == 10, "demoted, not evicted"
    assert cache.held_bytes == 30


def test_eviction_waits_for_pending_writes() -> None:
    cache = PrefixCache(capacity_bytes=30)
    blocks = [Filed(bytes(10), 0, 1, filed=False, pending=True) for _ in range(3)]
    for token, block in enumerate(blocks):
        assert cache.insert([token], block)
    assert cache.budget.make_room(10) == "pending"
    assert not put(cache, [7])
    assert cache.held_bytes == 30, "nothing was evicted meanwhile"
    blocks[0].filed, blocks[0].pending = True, False
    assert cache.budget.make_room(10) == "free"
    assert put(cache, [7])
    assert cache.peek([0]).length == 1
    assert cache.budget.make_room(20, force=True) == "free", "who must have room does not wait"
    cache.check_integrity()


def test_eviction_does_not_wait_again_after_all_pending_writes_ended() -> None:
    cache = PrefixCache(capacity_bytes=30)
    blocks = [Filed(bytes(10), 0, 1, filed=False, pending=True), Block(bytes(20), 0, 1)]
    waited: list[bool] = []

    def wait() -> bool:
        """Finish the pending write the first time. A second wait would be useless and last until
        its limit."""
        waited.append(True)
        blocks[0].pending = False
        return True

    for token, block in enumerate(blocks):
        assert cache.insert([token], block)
    cache.budget.wait_for_writing = wait
    assert cache.budget.make_room(30, used_ns=0, force=True) == "full"
    assert waited == [True]


def test_a_wide_block_only_on_disk_can_be_shortened_for_a_narrow_one() -> None:
    cache = PrefixCache(capacity_bytes=100)
    line = list(range(10))
    assert cache.insert(line, Filed(bytes(50), 0, 10))
    assert not put(cache, line[:3]), "it has its tokens in memory"
    cache.budget.shrink(50)
    assert put(cache, line[:3])
    assert [(p.start, p.stop, p.block.stop) for p in cache.peek(line).parts] == [
        (0, 3, 3),
        (3, 10, 10),
    ]
    cache.check_integrity()


class History(RuleBasedStateMachine):
    """Insert, match, lock and unlock in any order; check the invariants after each action."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(capacity_bytes=60)
        self.held: list[tuple[Match, list[int]]] = []
        self.resident: list[IdleSequence] = []
        self.followed = FollowedTree(self.cache)

    @rule(line=lines, size=st.integers(1, 25))
    def insert(self, line: list[int], size: int) -> None:
        start = self.cache.peek(line).length
        if start < len(line):
            put(self.cache, line, start, size)

    @rule(line=lines)
    def match(self, line: list[int]) -> None:
        match = self.cache.match(line)
        assert match.length <= match.saved <= match.known <= len(line)

    @rule(line=lines)
    def lock(self, line: list[int]) -> None:
        match = self.cache.match(line)
        if match.length:
            self.cache.lock(match)
            self.held.append((match, line[: match.length]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        match, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.cache.unlock(match)

    @rule(line=lines)
    def compute(self, line: list[int]) -> None:
        self.resident.append(IdleSequence(0, as_tokens(line)))

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), n_tokens=st.integers(0, 12))
    def truncate(self, data: st.DataObject, n_tokens: int) -> None:
        idle = self.resident[data.draw(st.integers(0, len(self.resident) - 1))]
        idle.tokens = idle.tokens[:n_tokens]

    @rule(need=st.integers(0, 60))
    def evict(self, need: int) -> None:
        self.cache.budget.make_room(need)

    @invariant()
    def laws(self) -> None:
        self.cache.check_integrity()
        for _, line in self.held:
            assert self.cache.peek(line).length == len(line), "a held prefix was evicted"
        assert self.cache.held_bytes <= 60
        if not self.cache.indivisible:
            for idle in self.resident:
                blocks = self.cache.on_path(idle.tokens)
                found = [block for block in blocks if block.stop <= len(idle.tokens)]
                copies = self.followed.copies(idle, len(idle.tokens))
                assert [block for _, block in copies] == found


class WholeHistory(History):
    """The same for a tree of indivisible blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache("state", capacity_bytes=60)


TestHistory = History.TestCase
TestWholeHistory = WholeHistory.TestCase
TestHistory.settings = TestWholeHistory.settings = settings(
    max_examples=examples(60), stateful_step_count=40
)
