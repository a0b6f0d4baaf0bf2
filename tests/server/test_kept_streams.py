"""A stream with an Idempotency-Key survives the loss of its client.

For a limited time, the same API key can resume it at the point of interruption. Any other stream
ends when its client leaves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import openai
import pytest

from localllm.errors import BusyError
from localllm.server.http.accounts import NamedKey, digest_of
from support.http_server import running_server
from support.scripted_engine import Gate, ScriptedEngine
from support.until import until

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SAID = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID, "stream": True},
    RESPONSES: {"input": "Hi", "stream": True},
    MESSAGES: {"messages": SAID, "max_tokens": 99, "stream": True},
}
KEYED = {"Idempotency-Key": "one"}


class Halfway:
    """An engine that writes half of an answer, waits for the test, and writes the rest."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.engine = ScriptedEngine(("Hel", "lo", self.gate, " wor", "ld"))


@pytest.fixture
def half() -> Halfway:
    return Halfway()


@pytest.fixture
def http(half: Halfway) -> Iterator[httpx.Client]:
    with running_server({"m": half.engine}) as server:
        with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
            yield client
        half.gate.open()


def events(lines: Iterator[str], most: int | None = None) -> list[tuple[int, str]]:
    """Return up to `most` events of a stream as (id, data)."""
    found: list[tuple[int, str]] = []
    number = -1
    for line in lines:
        if line.startswith("id: "):
            number = int(line[4:])
        if line.startswith("data: "):
            found.append((number, line[6:]))
            if len(found) == most:
                break
    return found


def first(http: httpx.Client, path: str, most: int, **headers: str) -> list[tuple[int, str]]:
    """Return the first events of a stream, and leave it.

    A key with a limit of one request retries until its last request has ended.
    """
    while True:
        with http.stream("POST", path, json=BODIES[path], headers={**KEYED, **headers}) as r:
            if r.status_code != 429:
                assert r.status_code == 200
                return events(r.iter_lines(), most)


def rest(http: httpx.Client, path: str, **headers: str) -> list[tuple[int, str]]:
    with http.stream("POST", path, json=BODIES[path], headers={**KEYED, **headers}) as r:
        assert r.status_code == 200, r.read()
        return events(r.iter_lines())


@pytest.mark.parametrize("path", list(BODIES))
def test_a_client_that_reconnects_gets_every_event_once(
    half: Halfway, http: httpx.Client, path: str
) -> None:
    before = first(http, path, 3)
    assert [number for number, _ in before] == [0, 1, 2]
    until(lambda: half.engine.running == 1)
    half.gate.open()
    behind = rest(http, path, **{"Last-Event-ID": "2"})
    assert [number for number, _ in behind] == list(range(3, 3 + len(behind)))
    # The same stream again from the beginning: no text is generated twice.
    assert rest(http, path) == before + behind
    assert len(half.engine.requests) == 1
    assert half.engine.cancelled == []


def test_a_stream_continues_without_a_reader(half: Halfway, http: httpx.Client) -> None:
    first(http, CHAT, 2)
    half.gate.open()
    until(lambda: half.engine.running == 0)
    assert half.engine.cancelled == []
    texts = [
        json.loads(data)["choices"][0]["delta"].get("content") or ""
        for _, data in rest(http, CHAT)[:-1]
    ]
    assert "".join(texts) == "Hello world"


def test_without_an_idempotency_key_a_disconnect_ends_the_stream_at_once(
    half: Halfway, http: httpx.Client
) -> None:
    with http.stream("POST", CHAT, json=BODIES[CHAT]) as r:
        found = events(r.iter_lines(), 2)
    assert [number for number, _ in found] == [-1, -1]
    until(lambda: len(half.engine.cancelled) == 1)


def test_a_response_is_joined_by_its_id(half: Halfway, http: httpx.Client) -> None:
    before = [json.loads(data) for _, data in first(http, RESPONSES, 4)]
    made = before[0]["response"]["id"]
    half.gate.open()
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)
    with (
        client,
        client.responses.retrieve(
            made, stream=True, starting_after=before[-1]["sequence_number"]
        ) as stream,
    ):
        behind = list(stream)
    assert [e.sequence_number for e in behind] == list(range(4, 4 + len(behind)))
    assert behind[-1].type == "response.completed"
    assert behind[-1].response.output_text == "Hello world"
    for wrong, status in (({"starting_after": "x"}, 400), ({"starting_after": "999"}, 404)):
        assert (
            http.get(f"{RESPONSES}/{made}", params={"stream": "true", **wrong}).status_code
            == status
        )
    # A request without an Idempotency-Key has no stream to resume.
    whole = http.post(RESPONSES, json={"input": "Hi"}).json()
    missing = http.get(f"{RESPONSES}/{whole['id']}", params={"stream": "true"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "stream_gone")


def test_a_key_belongs_to_one_request(half: Halfway, http: httpx.Client) -> None:
    first(http, CHAT, 2)
    other = http.post(CHAT, json={**BODIES[CHAT], "temperature": 0}, headers=KEYED)
    assert (other.status_code, other.json()["error"]["param"]) == (400, "Idempotency-Key")
    for key in ("", "x" * 256):
        assert (
            http.post(CHAT, json=BODIES[CHAT], headers={"Idempotency-Key": key}).status_code == 400
        )
    odd = http.post(CHAT, json=BODIES[CHAT], headers={**KEYED, "Last-Event-ID": "-1"})
    assert odd.status_code == 400


def test_a_request_that_failed_before_its_first_event_may_be_sent_again(
    half: Halfway, http: httpx.Client
) -> None:
    half.gate.open()
    half.engine.load_error = BusyError("there is no room")
    assert http.post(CHAT, json=BODIES[CHAT], headers=KEYED).status_code == 503
    half.engine.load_error = None
    assert rest(http, CHAT)[-1][1] == "[DONE]"


def test_two_clients_may_read_one_stream(half: Halfway, http: httpx.Client) -> None:
    with http.stream("POST", CHAT, json=BODIES[CHAT], headers=KEYED) as one:
        lines = one.iter_lines()
        begun = events(lines, 2)
        with http.stream("POST", CHAT, json=BODIES[CHAT], headers=KEYED) as two:
            half.gate.open()
            whole = events(two.iter_lines())
        assert begun + events(lines) == whole


def test_a_stream_without_a_reader_ends_after_its_retention_time() -> None:
    half = Halfway()
    with (
        running_server({"m": half.engine}, kept_stream_s=0.05) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        made = json.loads(first(http, RESPONSES, 1)[0][1])["response"]["id"]
        until(lambda: len(half.engine.cancelled) == 1)
        gone = http.get(f"{RESPONSES}/{made}", params={"stream": "true"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "stream_gone")


def test_a_key_has_separate_streams_and_as_many_unread_ones_as_parallel_requests() -> None:
    half = Halfway()
    secrets = {name: f"secret-of-{name}-0123456789" for name in ("anna", "bert")}
    keys = tuple(NamedKey(n, digest_of(s.encode()), parallel=1) for n, s in secrets.items())
    anna, bert = ({"authorization": f"Bearer {secret}"} for secret in secrets.values())
    with (
        running_server({"m": half.engine}, keys=keys) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=30) as http,
    ):
        made = json.loads(first(http, RESPONSES, 1, **anna)[0][1])["response"]["id"]
        there = f"{RESPONSES}/{made}?stream=true"
        until(lambda: http.get(there, headers=bert).status_code == 404)
        # The same Idempotency-Key of another API key starts a stream of its own.
        first(http, RESPONSES, 1, **bert)
        assert len(half.engine.requests) == 2
        # The key may have one request, so its second stream without a reader replaces the first.
        until(lambda: half.engine.running == 2)
        other = {"Idempotency-Key": "two", **anna}
        first(http, RESPONSES, 1, **other)
        until(lambda: len(half.engine.cancelled) == 1)
        assert half.engine.cancelled == [half.engine.requests[0].id]
        until(lambda: http.get(there, headers=anna).status_code == 404)
        half.gate.open()
        until(lambda: half.engine.running == 0)
        assert len(first(http, RESPONSES, 4, **other)) == 4


@contextmanager
def two_keys(engine: ScriptedEngine) -> Iterator[tuple[httpx.Client, dict[str, Any]]]:
    """Yield a client of a server with two named keys, and the headers of each key."""
    secrets = {name: f"secret-of-{name}-0123456789" for name in ("anna", "bert")}
    keys = tuple(NamedKey(n, digest_of(s.encode())) for n, s in secrets.items())
    with (
        running_server({"m": engine}, keys=keys) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=30) as http,
    ):
        yield http, {n: {"authorization": f"Bearer {s}"} for n, s in secrets.items()}


def test_many_streams_of_one_key_end_no_stream_of_another() -> None:
    half = Halfway()
    with two_keys(half.engine) as (http, who):
        before = first(http, CHAT, 2, **who["anna"])
        quick = {"messages": SAID, "stream": True, "max_tokens": 1}
        for i in range(40):
            http.post(CHAT, json=quick, headers={"Idempotency-Key": f"k{i}", **who["bert"]})
        half.gate.open()
        last = str(before[-1][0])
        behind = rest(http, CHAT, **{"Last-Event-ID": last}, **who["anna"])
        assert [number for number, _ in behind] == list(range(2, 2 + len(behind)))
        assert behind[-1][1] == "[DONE]"
        assert half.engine.cancelled == []


def test_resuming_an_unknown_stream_is_a_404_and_starts_no_request(
    half: Halfway, http: httpx.Client
) -> None:
    for path in BODIES:
        gone = http.post(path, json=BODIES[path], headers={**KEYED, "Last-Event-ID": "1"})
        assert gone.status_code == 404
        assert "stream" in gone.text
    assert half.engine.requests == []


def test_few_streams_run_on_without_a_reader(half: Halfway, http: httpx.Client) -> None:
    for i in range(12):
        first(http, CHAT, 1, **{"Idempotency-Key": f"left {i}"})
    until(lambda: len(half.engine.cancelled) == 8)
    # Streams with readers do not count. Deleting an iterator closes its connection.
    readers = []
    with ExitStack() as read:
        for i in range(8):
            sent = {"Idempotency-Key": f"read {i}"}
            stream = http.stream("POST", CHAT, json=BODIES[CHAT], headers=sent)
            lines = read.enter_context(stream).iter_lines()
            events(lines, 1)
            readers.append(lines)
        assert half.engine.running >= 8


def test_the_stored_events_of_streams_are_limited() -> None:
    # JSON writes this character with six characters.
    long = ScriptedEngine(lambda _: ["\x01" * 350] * 1500 + ["end"], n_ctx=2**23)
    with (
        running_server({"m": long}) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http,
    ):
        sent = rest(http, CHAT)
        assert sent[-1][1] == "[DONE]"
        again = http.post(CHAT, json=BODIES[CHAT], headers=KEYED)
        assert (again.status_code, again.json()["error"]["code"]) == (404, "stream_gone")
        behind = rest(http, CHAT, **{"Last-Event-ID": str(sent[-5][0])})
        assert behind == sent[-4:]
        # More streams than the server keeps: those that were left first are dropped.
        quick = {"messages": SAID, "stream": True, "max_tokens": 1}
        for i in range(40):
            http.post(CHAT, json=quick, headers={"Idempotency-Key": f"k{i}"})
        before = len(long.requests)
        for i in (0, 39):
            http.post(CHAT, json=quick, headers={"Idempotency-Key": f"k{i}"})
        assert len(long.requests) == before + 1
