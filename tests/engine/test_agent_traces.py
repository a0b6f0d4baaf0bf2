"""The cache on sessions of real coding agents that take turns: no worse than LRU over memory and context together."""

from __future__ import annotations

import pytest

from benchmarks.traces import Session, compare, interleaved, picked, read_shapes

# A context that two of these sessions fill, and none of them twice.
N_CTX = 65_536
SESSIONS, REQUESTS = 6, 9


def sessions() -> list[Session]:
    return [session[:REQUESTS] for session in picked([s[:REQUESTS] for s in read_shapes()], N_CTX, 3, SESSIONS)]


def test_one_agent_reads_nothing_twice() -> None:
    assert compare(interleaved(sessions(), 1), 1, 0, N_CTX).ours > 0.995


@pytest.mark.parametrize("memory_gib", [1, 4])
def test_agents_that_take_turns_find_what_lru_over_all_places_would_hold(memory_gib: float) -> None:
    reuse = compare(interleaved(sessions(), 3), memory_gib, 0, N_CTX)
    assert reuse.ours >= reuse.lru - 0.01
    assert reuse.lru < 0.99, "too little to lose: this would show nothing"


@pytest.mark.long
def test_a_disk_smaller_than_the_context_adds_what_the_context_does_not_hold() -> None:
    lines = interleaved(sessions(), 3)
    without, beside = compare(lines, 1, 0, N_CTX), compare(lines, 1, 4, N_CTX)
    assert beside.ours >= without.ours + 0.5 * (beside.lru - without.lru)
    assert beside.ours >= 0.95 * beside.reachable
    assert beside.lru > without.lru + 0.01, "this disk adds nothing"
