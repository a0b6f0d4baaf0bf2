"""The conductor prefills a prompt on the server that is expected to deliver its first token
soonest, according to learned costs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from localllm.engine.cache.identity import identity_of
from localllm.engine.cache.tree import as_tokens
from localllm.engine.step_costs import PrefillCost
from localllm.engine.tokens import Tokens
from localllm.engine.transfer.conductor import Conductor
from localllm.engine.transfer.errors import TransferError
from localllm.engine.transfer.fetching import WantedKv
from localllm.engine.transfer.peer import KvAnswer, KvPeer
from support.scripted_backend import ScriptedBackend

PROMPT = as_tokens([5 + i % 200 for i in range(3001)])


class QuietPeer(KvPeer):
    """A server whose link is not measured and which sends no data."""

    def start(self) -> None:
        """Start no thread."""

    @contextmanager
    def open_response(self, body: dict[str, Any], silence_s: float = 0.0) -> Iterator[KvAnswer]:
        raise TransferError("it sends nothing", reason="refused")
        yield


def costing(token_s: float) -> PrefillCost:
    """Return the cost learned from many steps of two sizes."""
    cost = PrefillCost()
    for _ in range(40):
        for n_tokens in (256, 2048):
            cost.learn(n_tokens, n_tokens * token_s)
    return cost


def conductor(here_s: float | None, *there_s: float | None, **fields: Any) -> Conductor:
    """Return a conductor with these seconds per token for this server and for the others (None: not
    measured)."""
    backend = ScriptedBackend(n_ctx=4096)
    identity = identity_of(backend)
    peers = []
    for number, token_s in enumerate(there_s):
        peer = QuietPeer(f"http://server{number}:1", None, "m", identity.to_json(), print)
        if token_s is not None:
            peer.cost = costing(token_s)
        peers.append(peer)
    speed = PrefillCost() if here_s is None else costing(here_s)
    return Conductor(backend, identity, peers, speed, threading.Event(), **fields)


def chosen(
    found: Conductor, prompt: Tokens = PROMPT, start: int = 0, *, streams: bool = False
) -> str | None:
    """Return the name of the server that prefills the prompt (None: this one)."""
    fetch = found.begin(WantedKv(prompt, start, ""), is_decoding=streams)
    if fetch is None:
        return None
    fetch.close()
    return fetch.peer.name


@pytest.mark.parametrize(
    ("here_s", "there_s", "expected"),
    [
        (0.01, [0.001], "server0:1"),
        (0.001, [0.01], None),
        (0.01, [0.005, 0.002], "server1:1"),
        (0.01, [0.02, 0.03], None),
        (None, [0.01], "server0:1"),
        (0.001, [None], "server0:1"),
    ],
)
def test_the_fastest_server_prefills_the_prompt(
    here_s: float | None, there_s: list[float | None], expected: str | None
) -> None:
    assert chosen(conductor(here_s, *there_s)) == expected


def test_local_streams_double_the_cost_of_local_prefill() -> None:
    found = conductor(0.01, 0.015)
    assert chosen(found) is None
    assert chosen(found, streams=True) == "server0:1"


def test_only_the_uncached_part_counts() -> None:
    """A transfer has a fixed cost, so a short uncached part is prefilled here."""
    found = conductor(0.001)
    peer = QuietPeer("http://far:1", None, "m", found.identity.to_json(), print)
    for _ in range(40):
        for n_tokens in (256, 2048):
            peer.cost.learn(n_tokens, 0.5 + n_tokens * 0.0002)
    found.peers = [peer]
    assert chosen(found) == "far:1"
    assert chosen(found, start=2600) is None
    assert chosen(found, start=2900) is None, "less than a block"


def test_a_fixed_limit_overrides_the_costs() -> None:
    found = conductor(0.001, 0.01, always_from=2000)
    assert chosen(found) == "server0:1"
    assert chosen(found, PROMPT[:1500]) is None


def test_a_server_that_failed_or_has_a_smaller_context_is_left_out() -> None:
    found = conductor(0.01, 0.001, 0.002)
    fast, slow = found.peers
    fast.max_tokens = 1000
    assert chosen(found) == "server1:1"
    slow.record_failure(TransferError("gone", reason="unreachable"))
    assert chosen(found) is None
    slow.record_success()
    assert chosen(found) == "server1:1"
    assert chosen(found, PROMPT[:900]) == "server0:1"


def test_measured_transfer_times_change_the_choice() -> None:
    found = conductor(0.002, 0.001)
    assert chosen(found) == "server0:1"
    for _ in range(40):
        found.peers[0].cost.learn(3000, 3000 * 0.01)
    assert chosen(found) is None


def test_a_missing_block_delays_the_prompt_by_the_time_of_256_tokens() -> None:
    """A block is due after 0.256 s, and computing it here takes 2.56 s."""
    now_s = 0.0
    found = conductor(0.01, 0.001, clock=lambda: now_s)
    fetch = found.begin(WantedKv(PROMPT, 0, ""), is_decoding=False)
    assert fetch is not None
    fetch.close()
    for now_s, late in ((0.25, False), (2.8, False), (2.9, True)):
        assert found.late(fetch) == late, now_s


def test_servers_are_asked_for_copies_in_the_given_order() -> None:
    found = conductor(0.001)
    identity = found.identity.to_json()
    first, second = (
        QuietPeer(f"http://{name}:1", None, "m", identity, print) for name in ("first", "second")
    )
    found.pool = [second, first]

    def holder(names: list[str], prompt: Tokens = PROMPT) -> str | None:
        fetch = found.copy(WantedKv(prompt, 0, ""), names)
        if fetch is None:
            return None
        fetch.close()
        return fetch.peer.name

    names = ["stranger:1", "first:1", "second:1"]
    assert holder(names) == "first:1"
    first.record_failure(TransferError("gone", reason="unreachable"))
    assert holder(names) == "second:1"
    assert holder(["stranger:1"]) is None
    assert holder(names, PROMPT[:900]) is None, "too short"
