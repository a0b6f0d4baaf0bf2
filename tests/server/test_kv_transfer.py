"""Prefill on one real server, decode on another: the text is the same, and no fault loses it."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.cache.identity import KvIdentity
from localllm.engine.cache.kv_file import KvEntry
from localllm.engine.cache.tree import as_tokens
from localllm.engine.transfer.frames import BLOCK, DONE, HEAD
from localllm.engine.transfer.wire import BLOCK_TOKENS, Frame, FrameReader
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.server.http.accounts import NamedKey, digest_of
from localllm_backends.contract import LoadSpec, LoraAdapter
from support.http_server import Running, running_server
from support.relay import Relay, relay_to
from support.ties import same
from support.until import until

MAC = "mac-mac-mac-mac-mac"
PHONE = "phone-phone-phone-phone"
ANNA = "anna-anna-anna-anna"
N_CTX = 4096
# Tokens in every step of a long prompt. It is fixed, because the learnt speed would change the
# steps' shapes, and other shapes round KV differently.
STEP_TOKENS = 64
# Largest difference of two log-probabilities that rounding may reverse. Other step sizes changed
# them by 0.06.
TIE = 0.1
# Seconds. With the long one, no block is late on a busy machine. With the short one, a block that
# never comes is soon given up.
PATIENCE_S = 60.0
SHORT_PATIENCE_S = 5.0
KEYS = (
    NamedKey("mac", digest_of(MAC.encode()), kv=True),
    NamedKey("phone", digest_of(PHONE.encode()), kv=True),
    NamedKey("anna", digest_of(ANNA.encode())),
)


def words(seed: int, n: int = 700) -> list[int]:
    """Return a prompt of `n` tokens that no other seed begins with."""
    return [1000 + (seed * 7919 + i * 31) % 20_000 for i in range(n)]


def worker(path: Path, *adapters: LoraAdapter, **engine: Any) -> Supervisor:
    spec = LoadSpec(str(path), N_CTX, n_seq_max=4, n_batch=STEP_TOKENS, adapters=adapters)
    return Supervisor(WorkerOptions(spec, engine=engine))


@contextmanager
def loaded_server(supervisor: Supervisor, **settings: Any) -> Iterator[Running]:
    """Yield a server that has loaded its model."""
    with running_server({"few": supervisor}, preload=True, **settings) as running:
        url = running.url + "/health"
        until(lambda: httpx.get(url, trust_env=False, timeout=60).status_code == 200)
        yield running


@contextmanager
def asking(
    path: Path,
    *urls: str,
    key: str = MAC,
    tokens: int = BLOCK_TOKENS,
    adapters: Sequence[LoraAdapter] = (),
    patience_s: float = PATIENCE_S,
) -> Iterator[Running]:
    """Yield a server that sends its prefill to the servers at `urls`."""
    engine = {
        "prefill_from": list(urls),
        "prefill_key": key,
        "prefill_from_tokens": tokens,
        "model_name": "few",
        "prefill_patience_s": patience_s,
    }
    with loaded_server(worker(path, *adapters, **engine)) as running:
        yield running


def ask(server: Running, prompt: list[int], *, key: str = MAC, **more: Any) -> httpx.Response:
    body = {"model": "few", "prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    return httpx.post(
        server.url + "/v1/completions",
        json={**body, **more},
        headers={"authorization": f"Bearer {key}"},
        trust_env=False,
        timeout=120,
    )


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    answer: str = response.json()["choices"][0]["text"]
    return answer


def metric(server: Running, name: str) -> float:
    page = httpx.get(server.url + "/metrics", trust_env=False).text
    return sum(float(x.split()[-1]) for x in page.splitlines() if x.startswith(f"localllm_{name}"))


def fallbacks(server: Running) -> dict[str, float]:
    page = httpx.get(server.url + "/metrics", trust_env=False).text
    found = {}
    for row in page.splitlines():
        if row.startswith("localllm_kv_fallbacks_total") and float(row.split()[-1]):
            found[row.split('reason="')[1].split('"')[0]] = float(row.split()[-1])
    return found


@pytest.fixture(scope="module")
def sender(few_layers: Path) -> Iterator[Running]:
    with loaded_server(worker(few_layers), keys=KEYS, api_key="owner-owner-owner") as running:
        yield running


@pytest.fixture(scope="module")
def alone(few_layers: Path) -> Iterator[Running]:
    with asking(few_layers) as running:
        yield running


@pytest.fixture(scope="module")
def relay(sender: Running) -> Iterator[Relay]:
    with relay_to(sender.port) as relay:
        yield relay


@pytest.fixture
def healthy(relay: Relay) -> Iterator[Relay]:
    relay.passed_bytes = 0
    yield relay
    relay.heal()


def probed(relay: Relay) -> None:
    """Wait until the link is measured through `relay`, which has passed no bytes before."""
    until(lambda: relay.passed_bytes > 2**20)


@pytest.fixture(scope="module")
def here(few_layers: Path, relay: Relay) -> Iterator[Running]:
    with asking(few_layers, relay.url) as running:
        yield running


# --- prefill there, decode here -------------------------------------------------------------------


def test_prompts_prefilled_on_another_server_give_the_same_text(
    here: Running, alone: Running, sender: Running
) -> None:
    # Twenty lengths of a partial last block after 5 to 9 full ones, and a prompt of 36 blocks.
    fills = [(500 + 97 * seed) % BLOCK_TOKENS for seed in range(20)]
    lengths = [(5 + seed % 5) * BLOCK_TOKENS + fill for seed, fill in enumerate(fills)]
    lengths.append(2343)
    for seed, n_tokens in enumerate(lengths):
        prompt = words(seed, n_tokens)
        answer = ask(here, prompt, logprobs=3)
        assert same(answer, ask(alone, prompt, logprobs=3), TIE)
        note = answer.headers["x-localllm-cache"]
        assert f"{n_tokens - 1} tokens were read by 127.0.0.1:" in note
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert fallbacks(here) == {}
    assert metric(here, "kv_fetched_tokens_total") == sum(lengths) - len(lengths)
    assert metric(here, "kv_fetched_bytes_total") > 100_000


def test_only_the_part_that_is_not_cached_here_is_fetched(here: Running, alone: Running) -> None:
    first = words(50)
    assert ask(here, first).status_code == 200
    before = metric(here, "kv_fetched_tokens_total")
    longer = [*first, *words(51, 400)]
    answer = ask(here, longer)
    assert text(answer) == text(ask(alone, longer))
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= len(first) - 1
    fetched = metric(here, "kv_fetched_tokens_total") - before
    assert fetched == len(longer) - 1 - cached


def test_a_short_prompt_is_prefilled_locally(here: Running) -> None:
    before = metric(here, "kv_fetched_tokens_total")
    assert "read by" not in ask(here, words(60, BLOCK_TOKENS)).headers["x-localllm-cache"]
    assert metric(here, "kv_fetched_tokens_total") == before


def test_a_prompt_without_cache_is_prefilled_locally(here: Running) -> None:
    answer = ask(here, words(61), cache_prompt=False)
    assert "read by" not in answer.headers["x-localllm-cache"]


def test_streams_and_transfers_at_the_same_time(here: Running, alone: Running) -> None:
    body = {"model": "few", "prompt": words(70, 40), "stream": True, "max_tokens": 300}
    body |= {"temperature": 0, "ignore_eos": True}
    with httpx.stream(
        "POST", here.url + "/v1/completions", json=body, trust_env=False, timeout=120
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        prompt = words(71, 900)
        answer = ask(here, prompt)
        assert "899 tokens were read by" in answer.headers["x-localllm-cache"]
        assert sum(1 for _ in lines) > 10
    assert text(answer) == text(ask(alone, prompt))


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "after_bytes", "reason"),
    [
        ("cut", 0, "cut"),
        ("cut", 400_000, "cut"),
        ("damage", 300_000, "damaged"),
        ("damage", 900_000, "damaged"),
        ("stall", 0, "late"),
        ("stall", 700_000, "late"),
    ],
)
def test_an_answer_is_complete_after_any_fault_of_the_link(
    fault: str, after_bytes: int, reason: str, few_layers: Path, healthy: Relay, alone: Running
) -> None:
    patience_s = SHORT_PATIENCE_S if fault == "stall" else PATIENCE_S
    with asking(few_layers, healthy.url, patience_s=patience_s) as here:
        probed(healthy)
        healthy.arm(fault, after_bytes)
        prompt = words(100 + after_bytes, 1500)
        assert text(ask(here, prompt)) == text(ask(alone, prompt))
        assert fallbacks(here) == {reason: 1}
        healthy.heal()
        before = metric(here, "kv_fetched_tokens_total")
        prompt = words(101 + after_bytes, 600)
        until(
            lambda: (
                "read by"
                in ask(here, prompt, cache_salt=os.urandom(4).hex()).headers["x-localllm-cache"]
            )
        )
        assert metric(here, "kv_fetched_tokens_total") > before


def test_a_cut_link_is_resumed_at_the_first_missing_block(
    few_layers: Path, healthy: Relay, alone: Running
) -> None:
    with asking(few_layers, healthy.url) as here:
        probed(healthy)
        connections = healthy.connections
        healthy.arm("cut", 2_000_000, times=1)
        prompt = words(300, 1500)
        before = healthy.passed_bytes
        answer = ask(here, prompt)
        assert text(answer) == text(ask(alone, prompt))
        assert "1499 tokens were read by" in answer.headers["x-localllm-cache"]
        assert fallbacks(here) == {}
        assert healthy.connections > connections
        fetched = metric(here, "kv_fetched_bytes_total")
        assert healthy.passed_bytes - before < 1.25 * fetched, "whole blocks were sent again"


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP])
def test_an_answer_is_complete_if_the_other_servers_engine_dies_or_stops(
    kill: signal.Signals, few_layers: Path, alone: Running
) -> None:
    supervisor = worker(few_layers)
    patience_s = SHORT_PATIENCE_S if kill == signal.SIGSTOP else PATIENCE_S
    with (
        loaded_server(supervisor, keys=KEYS) as other,
        relay_to(other.port) as relay,
        asking(few_layers, relay.url, patience_s=patience_s) as here,
    ):
        assert supervisor.client is not None
        pid = supervisor.client.pid
        with ThreadPoolExecutor(1) as pool:
            probed(relay)
            relay.arm("hold", 700_000, times=1)
            # 8 MB of KV, more than the socket buffers and queues hold.
            prompt = words(400 + kill, 3500)
            answer = pool.submit(ask, here, prompt)
            assert relay.held.wait(60)
            os.kill(pid, kill)
            relay.release()
            assert text(answer.result()) == text(ask(alone, prompt))
            # After SIGKILL, a new engine may have started in time to send the rest.
            receipt = answer.result().headers["x-localllm-cache"]
            resumed = kill == signal.SIGKILL and "3499 tokens were read by" in receipt
            assert resumed or sum(fallbacks(here).values()) == 1
            if kill == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("key", "model", "reason"),
    [("wrong-wrong-wrong", "few", "401"), (ANNA, "few", "403"), (MAC, "tiny", "404")],
)
def test_a_server_that_refuses_is_left_out_and_reported_once(
    key: str,
    model: str,
    reason: str,
    sender: Running,
    few_layers: Path,
    tiny_model: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tiny_model if model == "tiny" else few_layers
    engine = {"prefill_from": [sender.url], "prefill_key": key, "prefill_from_tokens": 256}
    supervisor = worker(path, **engine, model_name="another")
    with running_server({"few": supervisor}, preload=True) as here:
        until(lambda: any(reason in record.getMessage() for record in caplog.records))
        prompt = [3 + i % 200 for i in range(400)]
        assert ask(here, prompt).status_code == 200
        assert ask(here, [5, *prompt]).status_code == 200
        reports = [r for r in caplog.records if "without the KV" in r.getMessage()]
        assert len(reports) == 1
        assert key not in reports[0].getMessage()


def test_a_server_that_is_off_at_start_is_used_later(
    sender: Running, few_layers: Path, alone: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with relay_to(1) as relay, asking(few_layers, relay.url) as here:
        until(lambda: any("without the KV" in r.getMessage() for r in caplog.records))
        prompt = words(500)
        assert text(ask(here, prompt)) == text(ask(alone, prompt))
        relay.target = sender.port
        n = iter(range(501, 900))
        until(lambda: "read by" in ask(here, words(next(n))).headers["x-localllm-cache"])
        assert len([r for r in caplog.records if "without the KV" in r.getMessage()]) == 1


# --- access ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def identity(sender: Running) -> dict[str, str]:
    """The identity of the sender's KV, as its own worker states it."""
    (model,) = sender.app.state.server.models.list()
    found: dict[str, str] = model.worker.host.client.kv_identity
    return found


def asked(server: Running, key: str | None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.post(
        server.url + "/v1/kv", json=body, headers=headers, trust_env=False, timeout=60
    )


def frames(response: httpx.Response) -> Sequence[Frame]:
    assert response.status_code == 200, response.text
    return [*FrameReader(2**26).feed(response.content)]


def test_blocks_come_in_order_and_are_named_by_their_tokens(
    sender: Running, identity: dict[str, str]
) -> None:
    prompt = words(600)
    head, *blocks, done = frames(asked(sender, MAC, tokens=prompt, identity=identity))
    assert (head.kind, done.kind) == (HEAD, DONE)
    assert [b.kind for b in blocks] == [BLOCK] * 11
    name = KvIdentity.from_json(identity).name
    for i, block in enumerate(blocks):
        stop = min(BLOCK_TOKENS * (i + 1), 699)
        entry = KvEntry(name, as_tokens(prompt[:stop]), BLOCK_TOKENS * i)
        assert entry.checked_data(block.body) is not None
    later = frames(asked(sender, MAC, tokens=prompt, identity=identity, start=640))
    assert [bytes(f.body) for f in later if f.kind == BLOCK] == [bytes(blocks[10].body)]


def test_invalid_or_unauthorised_kv_requests_are_refused(
    sender: Running, identity: dict[str, str]
) -> None:
    good: dict[str, Any] = {"tokens": words(610, 100), "identity": identity}
    other = {**identity, "layout": "another"}
    cases: list[tuple[str | None, dict[str, Any], int]] = [
        (None, good, 401),
        ("unknown-unknown-unknown", good, 401),
        (ANNA, good, 403),
        ("owner-owner-owner", good, 403),
        (MAC, {**good, "identity": {}, "model": "no-such-model"}, 404),
        (MAC, {**good, "identity": other}, 409),
        (MAC, {**good, "tokens": [7] * N_CTX}, 413),
        (MAC, {**good, "tokens": [10**6, 5, 6]}, 400),
        (MAC, {**good, "tokens": [-1, 5, 6]}, 400),
        (MAC, {**good, "tokens": ["a"]}, 400),
        (MAC, {**good, "tokens": None}, 400),
        (MAC, {**good, "start": 99}, 400),
        (MAC, {**good, "start": -1}, 400),
        (MAC, {**good, "salt": "x" * 1025}, 400),
        (MAC, {**good, "identity": {str(i): "" for i in range(17)}}, 400),
        (MAC, {"tokens": [], "identity": identity, "pads": 2**20 + 1}, 400),
    ]
    for key, body, status in cases:
        response = asked(sender, key, **body)
        assert response.status_code == status, (body.keys(), response.text)
        assert response.json()["error"]["message"]


def test_nothing_shows_that_another_key_has_cached_a_prompt(
    sender: Running, identity: dict[str, str]
) -> None:
    prompt = words(620, 600)
    chat = httpx.post(
        sender.url + "/v1/completions",
        json={"prompt": prompt, "max_tokens": 1},
        headers={"authorization": f"Bearer {ANNA}"},
        trust_env=False,
        timeout=60,
    )
    assert chat.status_code == 200

    def cached(key: str, salt: str = "") -> Any:
        return frames(asked(sender, key, tokens=prompt, identity=identity, salt=salt))[0].words()

    assert cached(MAC) == {"cached": 0}
    assert cached(MAC) == {"cached": len(prompt) - 1}
    assert cached(PHONE) == {"cached": 0}
    assert cached(MAC, "another user of that server") == {"cached": 0}


def test_a_client_that_disconnects_ends_the_request(
    sender: Running, identity: dict[str, str]
) -> None:
    body = {"tokens": words(630, 1800), "identity": identity}
    headers = {"authorization": f"Bearer {MAC}"}
    url = sender.url + "/v1/kv"
    with httpx.stream("POST", url, json=body, headers=headers, trust_env=False) as answer:
        next(answer.iter_raw())
    until(lambda: requests_at(sender) == 0)


def requests_at(server: Running) -> int:
    """Return the number of requests that use the model."""
    (model,) = server.app.state.server.models.list()
    n: int = model.worker.in_use
    return n


def reader_of(server: Running, prompt: list[int], identity: dict[str, str]) -> socket.socket:
    """Return the socket of a client that has requested KV and has not read the answer."""
    body = json.dumps({"tokens": prompt, "identity": identity}).encode()
    head = f"POST /v1/kv HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {MAC}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    reader = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    reader.sendall(head.encode() + body)
    return reader


def test_a_client_that_reads_no_data_ends_the_request(
    few_layers: Path, identity: dict[str, str]
) -> None:
    # 8 MB of KV, more than the buffers of both sockets hold.
    prompt = words(640, 3500)
    with (
        loaded_server(worker(few_layers), keys=KEYS, idle_timeout_s=0.5) as server,
        reader_of(server, prompt, identity) as reader,
    ):
        assert reader.recv(12) == b"HTTP/1.1 200"
        until(lambda: requests_at(server) == 0)
        # The server closes the connection after the data in the system's buffers.
        while reader.recv(2**20):
            pass


def test_a_request_without_an_answer_ends_when_its_client_leaves(
    few_layers: Path, identity: dict[str, str]
) -> None:
    supervisor = worker(few_layers)
    with loaded_server(supervisor, keys=KEYS) as server:
        assert supervisor.client is not None
        os.kill(supervisor.client.pid, signal.SIGSTOP)
        try:
            with reader_of(server, words(650), identity):
                until(lambda: requests_at(server) == 1)
            until(lambda: requests_at(server) == 0)
        finally:
            os.kill(supervisor.client.pid, signal.SIGCONT)


def test_the_link_is_measured_with_a_request_of_its_own(
    sender: Running, identity: dict[str, str]
) -> None:
    head, pads, done = frames(asked(sender, MAC, tokens=[], identity=identity, pads=5000))
    assert head.words()["most_tokens"] == N_CTX - 1
    assert (len(pads.body), done.kind) == (5000, DONE)
