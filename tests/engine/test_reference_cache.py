"""The reference cache against which the real cache is measured. It is checked by hand-computed
examples and by its invariants."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.reference_cache import ReferenceCache
from support.examples import examples

BYTES = 10


def cache(memory: int, disk: int = 0, piece: int = 4) -> ReferenceCache:
    """Return a cache with room for that many tokens in memory and on disk."""
    return ReferenceCache(memory * BYTES, disk * BYTES, BYTES, piece)


def line(name: str, n: int) -> list[int]:
    """Return `n` tokens that share no token with the sequence of another name."""
    return [ord(name) * 1000 + i for i in range(n)]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    held = cache(100)
    a = line("a", 10)
    assert held.reuse(a) == 0
    held.finished(a)
    assert held.reuse(a) == 9
    assert held.reuse([*a, 1]) == 10
    assert held.reuse(a[:6]) == 5
    assert held.reuse([]) == 0


def test_a_prefix_shared_with_any_other_sequence_is_reused_to_the_token() -> None:
    held = cache(100)
    a = line("a", 10)
    held.finished(a)
    branch = [*a[:5], *line("b", 7)]
    assert held.reuse(branch) == 5
    held.finished(branch)
    assert held.reuse([*a, 1]) == 10
    assert held.reuse([*branch, 1]) == 12


def test_a_split_piece_costs_its_bytes_once() -> None:
    held = cache(100)
    a = line("a", 10)
    held.finished(a)
    held.finished([*a[:5], *line("b", 7)])
    held.finished([*a[:5], *line("b", 3)])
    assert held.held_tokens == 17


def test_pieces_start_where_a_sequence_leaves_the_stored_prefix() -> None:
    """Of b, only the piece [5, 9) fits, so [9, 12) is dropped."""
    held = cache(10 + 6)
    a = line("a", 10)
    b = [*a[:5], *line("b", 7)]
    held.finished(a)
    held.finished(b)
    # The first two pieces of a (8 tokens) and the piece of b were used last; the end of a (2
    # tokens) was used before them.
    assert held.held_tokens == 15
    assert held.reuse([*b, 1]) == 12
    assert held.reuse([*a, 1]) == 8


def test_a_sequence_larger_than_memory_keeps_the_first_complete_pieces() -> None:
    held = cache(10)
    a = line("a", 30)
    held.finished(a)
    assert held.reuse(a) == 8


def test_the_last_used_sequence_stays_and_ends_are_evicted_before_beginnings() -> None:
    held = cache(12)
    a, b, c = line("a", 6), line("b", 6), line("c", 4)
    held.finished(a)
    held.finished(b)
    assert held.reuse([*a, 1]) == 6
    held.finished(c)
    assert held.reuse([*b, 1]) == 0
    assert held.reuse([*a, 1]) == 6
    assert held.reuse([*c, 1]) == 4


def test_a_shared_prefix_is_as_recent_as_the_last_sequence_that_uses_it() -> None:
    held = cache(10)
    a = line("a", 8)
    held.finished(a)
    held.finished([*a[:4], *line("b", 4)])
    assert held.reuse([*a, 1]) == 4
    assert held.reuse([*a[:4], *line("b", 4), 1]) == 8


@pytest.mark.parametrize(
    ("memory", "disk", "found"), [(8, 100, 12), (100, 8, 12), (8, 8, 8), (8, 0, 8), (0, 8, 8)]
)
def test_reuse_counts_tokens_in_memory_or_on_disk(memory: int, disk: int, found: int) -> None:
    held = cache(memory, disk)
    a = line("a", 12)
    held.finished(a)
    assert held.reuse([*a, 1]) == found


@pytest.mark.parametrize(("memory", "disk", "found"), [(8, 100, 12), (100, 8, 8), (100, 0, 0)])
def test_after_a_restart_only_tokens_on_disk_are_reused(memory: int, disk: int, found: int) -> None:
    held = cache(memory, disk)
    a = line("a", 12)
    held.finished(a)
    held.restart(clean=True)
    assert held.reuse([*a, 1]) == found


def test_after_a_kill_the_last_sequence_is_not_expected() -> None:
    held = cache(100, 100)
    a = line("a", 12)
    held.finished(a)
    held.finished([*a, *line("b", 3)])
    held.restart(clean=False)
    assert held.reuse([*a, *line("b", 3), 1]) == 12


def test_tokens_read_from_disk_after_a_restart_are_in_memory_again() -> None:
    """The disk (8 tokens) drops a for b. a remains only if its use brought it into memory."""
    a, b = line("a", 8), line("b", 8)
    for used in (True, False):
        held = cache(100, 8)
        held.finished(a)
        held.restart(clean=True)
        if used:
            assert held.reuse([*a, 1]) == 8
        held.finished(b)
        assert held.reuse([*a, 1]) == (8 if used else 0)


def test_with_complete_snapshots_the_longest_fitting_one_is_reused() -> None:
    held = ReferenceCache(20 * BYTES, 0, BYTES, 4, whole=True)
    a, b = line("a", 12), line("b", 6)
    held.finished(a, [4, 8, 12])
    assert held.held_tokens == 20, "behind 12 and behind 8"
    assert held.reuse([*a, 1]) == 12
    assert held.reuse([*a[:10], 1, 1]) == 8
    held.finished(b, [6])
    assert held.reuse([*a, 1]) == 8, "used last, it stayed, and the longer one left"


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12)
steps = st.lists(st.one_of(tokens, st.booleans()), max_size=25)


@settings(max_examples=examples(300))
@given(steps=steps, memory=st.integers(0, 30), disk=st.integers(0, 30), piece=st.integers(1, 5))
def test_reuse_is_at_most_all_seen_sequences_and_at_least_the_last_one(
    steps: list[list[int] | bool], memory: int, disk: int, piece: int
) -> None:
    held = cache(memory, disk, piece)
    told: list[list[int]] = []
    for step in steps:
        if isinstance(step, bool):
            held.restart(clean=step)
            continue
        known = max((len(_shared(step[:-1], other)) for other in told), default=0)
        assert held.reuse(step) <= known
        held.finished(step)
        told.append(step)
        assert held.held_tokens <= memory + disk
        if len(step) * piece <= max(memory, disk):
            # The pieces of other sequences that contain its tokens all fit.
            assert held.reuse([*step, 2]) == len(step)


@settings(max_examples=examples(200))
@given(lines=st.lists(tokens, max_size=20), piece=st.integers(1, 5))
def test_with_room_for_everything_nothing_is_ever_computed_twice(
    lines: list[list[int]], piece: int
) -> None:
    held = cache(10**6, 0, piece)
    told: list[list[int]] = []
    for one in lines:
        assert held.reuse(one) == max((len(_shared(one[:-1], other)) for other in told), default=0)
        held.finished(one)
        told.append(one)
    assert held.held_tokens == len({tuple(one[: i + 1]) for one in told for i in range(len(one))})


def _shared(a: list[int], b: list[int]) -> list[int]:
    return [x for i, x in enumerate(a) if a[: i + 1] == b[: i + 1]]
