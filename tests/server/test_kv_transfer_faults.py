"""Random faults during a transfer.

Every answer is complete and the same as without the other server. At most one block that had
arrived is computed again.
"""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from localllm.engine.transfer.wire import BLOCK_TOKENS
from localllm.server.http.accounts import NamedKey, digest_of
from server.test_kv_transfer import (
    MAC,
    SHORT_PATIENCE_S,
    ask,
    asking,
    fallbacks,
    loaded_server,
    metric,
    probed,
    worker,
)
from support.http_server import Running
from support.relay import Relay, relay_to
from support.ties import same
from support.until import until

KEYS = (NamedKey("mac", digest_of(MAC.encode()), kv=True),)
TOKENS = 1200
# Largest difference of two log-probabilities that rounding may reverse. The median difference of
# the two best tokens is 0.17.
TIE = 0.02


def prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, 250) for _ in range(TOKENS)]


def read_there(here: Running, draw: random.Random) -> bool:
    """Return whether the other server is used for a new prompt."""
    return "read by" in ask(here, prompt(draw.getrandbits(60))).headers["x-localllm-cache"]


def passed(relay: Relay, n_bytes: int, answer: Future[httpx.Response]) -> bool:
    return relay.passed_bytes > n_bytes or answer.done()


def check(n_faults: int, path: Path) -> dict[str, float]:
    """Check `n_faults` answers, and return how often each reason ended a transfer."""
    draw = random.Random(n_faults)
    supervisor = worker(path)
    with (
        loaded_server(supervisor, keys=KEYS) as sender,
        relay_to(sender.port) as relay,
        asking(path, relay.url, patience_s=SHORT_PATIENCE_S) as here,
        asking(path) as alone,
        ThreadPoolExecutor(1) as pool,
    ):
        probed(relay)
        before = relay.passed_bytes
        until(lambda: read_there(here, draw))
        transfer_bytes = relay.passed_bytes - before
        block_bytes = transfer_bytes * BLOCK_TOKENS // (TOKENS - 1)
        for _ in range(n_faults):
            fault = draw.choice(["cut", "stall", "damage", "cut", "damage", "kill", "stop"])
            asked = prompt(draw.getrandbits(60))
            after_bytes = draw.randrange(transfer_bytes)
            pid = 0
            if fault in ("kill", "stop"):
                relay.rate_bytes_s = 2 * transfer_bytes
                assert supervisor.client is not None
                pid = supervisor.client.pid
            else:
                relay.arm(fault, after_bytes, draw.choice([1, 99]))
            fetched = metric(here, "kv_fetched_tokens_total")
            before = relay.passed_bytes
            answer = pool.submit(ask, here, asked, logprobs=3)
            arrived_bytes = after_bytes
            if pid:
                until(partial(passed, relay, before + after_bytes // 2, answer))
                arrived_bytes = relay.passed_bytes - before
                os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            # A request that is cut and sent again shares steps with its first attempt.
            assert same(answer.result(), ask(alone, asked, logprobs=3), TIE), fault
            fetched = metric(here, "kv_fetched_tokens_total") - fetched
            arrived_blocks = arrived_bytes // block_bytes
            assert fetched >= min(BLOCK_TOKENS * (arrived_blocks - 1), TOKENS - 1), fault
            relay.heal()
            relay.rate_bytes_s = 0.0
            if fault == "stop":
                os.kill(pid, signal.SIGCONT)
            until(lambda: read_there(here, draw), timeout_s=120)
        return fallbacks(here)


@pytest.mark.parametrize(
    "n_faults", [6, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_answers_are_correct_after_random_faults_of_a_transfer(
    n_faults: int, tiny_model: Path
) -> None:
    found = check(n_faults, tiny_model)
    assert set(found) <= {"cut", "late", "damaged", "refused", "unreachable"}
    assert n_faults < 100 or len(found) > 2
