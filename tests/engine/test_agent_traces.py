"""The cache with real sessions of coding agents that take turns: at least as good as LRU over
memory, disk and context together."""

from __future__ import annotations

import pytest

from benchmarks.traces import (
    TOKEN_BYTES,
    Session,
    by_server,
    compare,
    interleaved,
    our_hits,
    picked,
    read_shapes,
)

# A context that any two of these sessions fill and that no single session fills twice.
N_CTX = 65_536
SESSIONS, REQUESTS = 6, 9


def sessions() -> list[Session]:
    return [
        session[:REQUESTS]
        for session in picked([s[:REQUESTS] for s in read_shapes()], N_CTX, 3, SESSIONS)
    ]


def test_a_single_agent_computes_no_token_twice() -> None:
    assert compare(interleaved(sessions(), 1), 1, 0, N_CTX).ours > 0.995


@pytest.mark.parametrize(("memory_gib", "disk_gib"), [(1, 0), (4, 0), (1, 2), (3, 2)])
def test_agents_that_take_turns_reuse_as_much_as_one_lru_over_context_memory_and_disk(
    memory_gib: float, disk_gib: float
) -> None:
    """A disk smaller than the context, or than memory, adds the data that those do not hold."""
    reuse = compare(interleaved(sessions(), 3), memory_gib, disk_gib, N_CTX)
    assert reuse.ours >= reuse.lru - 0.01
    assert reuse.ours >= 0.95 * reuse.reachable
    assert reuse.lru < 0.99, "too little to lose: this would show nothing"


def test_two_servers_reuse_as_much_as_one_with_the_memory_of_both() -> None:
    """A pool serves each session on one server, so its cache is divided, not duplicated."""
    lines = interleaved(sessions(), 3)
    memory_tokens = 10**9 // TOKEN_BYTES
    one = our_hits(lines, 2 * memory_tokens, 0, 2 * N_CTX)
    two = sum(our_hits(part, memory_tokens, 0, N_CTX) for part in by_server(lines, 2))
    assert two >= 0.95 * one
