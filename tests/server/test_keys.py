"""Named keys: authentication, permissions and usage counts.

No text of requests or answers is recorded.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import logging
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.cli.serve.api_keys import load_keys
from localllm.cli.serve.upstreams import load_upstreams
from localllm.errors import UsageError
from localllm.server.http.accounts import (
    Account,
    NamedKey,
    RateLimitError,
    TokenBucket,
    digest_of,
)
from localllm.server.http.settings import ServerSettings
from localllm.server.models.router import ServedModel
from localllm.settings import config_path
from support.http_server import Running, running_server
from support.scripted_engine import Gate, ScriptedEngine

ANNA, BOB, OWNER = "anna-anna-anna-anna", "bob-bob-bob-bob-bob", "owner-owner-owner"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a secret"}]}


def key(name: str, text: str, **limits: Any) -> NamedKey:
    return NamedKey(name, digest_of(text.encode()), **limits)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def server(engine: ScriptedEngine) -> Iterator[Running]:
    keys = (key("anna", ANNA, parallel=1), key("bob", BOB, requests_per_minute=2))
    with running_server([ServedModel("tiny", engine)], keys=keys, api_key=OWNER) as running:
        yield running


def as_(server: Running, text: str) -> httpx.Client:
    return httpx.Client(
        base_url=server.url, trust_env=False, headers={"authorization": f"Bearer {text}"}
    )


def test_named_keys_are_let_in_and_no_others(server: Running) -> None:
    for text, status in ((ANNA, 200), (OWNER, 200), ("wrong", 401), ("anna", 401)):
        with as_(server, text) as http:
            assert http.get("/v1/models").status_code == status
    anna = httpx.post(
        server.url + "/v1/messages",
        json={**CHAT, "max_tokens": 5},
        headers={"x-api-key": ANNA},
        trust_env=False,
    )
    assert anna.status_code == 200


def test_the_engine_receives_the_name_of_the_key(server: Running, engine: ScriptedEngine) -> None:
    for text, name in ((ANNA, "anna"), (BOB, "bob"), (OWNER, "")):
        with as_(server, text) as http:
            http.post("/v1/chat/completions", json=CHAT)
            http.post(
                "/v1/chat/completions", json={**CHAT, "stream": True}
            ) if name != "bob" else None
        assert engine.requests[-1].generation.tenant == name


def test_a_keys_limits_of_parallel_requests_and_requests_per_minute_apply(
    server: Running, engine: ScriptedEngine
) -> None:
    gate = Gate()
    engine.script = ("first", gate, "last")
    with (
        as_(server, ANNA) as http,
        http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as first,
    ):
        lines = first.iter_lines()
        assert any("first" in line for line in lines)
        refused = http.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        gate.open()
        assert "last" in "".join(lines)
    engine.script = ("fine",)
    with as_(server, ANNA) as http:
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    with as_(server, BOB) as http:
        statuses = [http.post("/v1/chat/completions", json=CHAT) for _ in range(3)]
        assert [a.status_code for a in statuses] == [200, 200, 429]
        assert 1 <= int(statuses[-1].headers["retry-after"]) <= 30


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["whole", "streamed"])
@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "one"}], ids=["plain", "kept"])
def test_the_end_of_an_answer_makes_room_for_the_next_request(
    server: Running, more: dict[str, Any], headers: dict[str, str]
) -> None:
    """The client sends its next request inside the call that receives the last bytes.

    The server must have released the key's slot by then.
    """
    statuses: list[int] = []

    async def ask() -> None:
        body = json.dumps({**CHAT, **more}).encode()
        sent = {
            "host": "localhost",
            "authorization": f"Bearer {ANNA}",
            "content-type": "application/json",
            **headers,
        }
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(k.lower().encode(), v.encode()) for k, v in sent.items()],
            "client": ("127.0.0.1", 1),
        }
        requests = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if requests:
                return requests.pop()
            return await asyncio.get_running_loop().create_future()

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
                return
            text = message["body"]
            at_end = b"[DONE]" in text or not (more or message.get("more_body"))
            if at_end and len(statuses) < 3:
                headers.pop("Idempotency-Key", None)
                await ask()

        await server.app(scope, receive, send)

    asyncio.run(ask())
    assert statuses == [200, 200, 200]


def test_every_route_counts_as_a_request() -> None:
    for path in ("/openapi.json", "/v1/models", "/usage.csv", "/no-such-path"):
        keys = (key("bob", BOB, requests_per_minute=2),)
        with (
            running_server([ServedModel("tiny", ScriptedEngine())], keys=keys) as fresh,
            as_(fresh, BOB) as http,
        ):
            statuses = [http.get(path).status_code for _ in range(4)]
            assert statuses[2:] == [429, 429]
            assert 429 not in statuses[:2]
            assert http.delete("/v1/responses/none").status_code == 429
            assert http.get("/health").status_code == 200


def rows(http: httpx.Client) -> dict[str, dict[str, str]]:
    return {r["key"]: r for r in csv.DictReader(io.StringIO(http.get("/usage.csv").text))}


def test_a_keys_usage_is_counted_and_visible_to_that_key(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "localllm")
    with as_(server, ANNA) as anna, as_(server, OWNER) as owner, as_(server, BOB) as bob:
        answer = anna.post("/v1/chat/completions", json=CHAT).json()
        anna.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert list(rows(anna)) == ["anna"]
        assert list(rows(bob)) == ["bob"]
        seen = rows(owner)
        assert list(seen) == ["anna", "bob"]
        assert seen["anna"]["requests"] == "2"
        assert int(seen["anna"]["prompt_tokens"]) == 2 * answer["usage"]["prompt_tokens"]
        assert int(seen["anna"]["completion_tokens"]) == 2 * answer["usage"]["completion_tokens"]
        metrics = owner.get("/metrics").text
        assert 'localllm_key_requests_total{key="anna"} 2' in metrics
        assert 'key="anna"' not in bob.get("/metrics").text
    assert "a secret" not in caplog.text + metrics
    assert ANNA not in caplog.text + metrics


def test_a_token_bucket_refills_evenly_and_waits_longer_after_an_overdraft() -> None:
    now = [0.0]
    bucket = TokenBucket(60, lambda: now[0])
    assert bucket.wait_s(1) == 0
    bucket.take(90)
    assert bucket.wait_s(1) == pytest.approx(31)
    now[0] = 31
    assert bucket.wait_s(1) == pytest.approx(0)
    now[0] = 10_000
    assert bucket.wait_s(60) == 0
    bucket.take(60)
    assert bucket.wait_s(1) > 0


def test_tokens_from_the_cache_cost_nothing_of_the_limit() -> None:
    account = Account(NamedKey("anna", tokens_per_minute=100), lambda: 0.0)
    account.charge(1000, 950, 40)
    with account.request():
        pass
    account.charge(0, 0, 200)
    with pytest.raises(RateLimitError) as refused, account.request():
        pass
    assert refused.value.retry_after_s > 60
    assert account.used.refused == 1


# --- config.toml ----------------------------------------------------------------------------------


def configured(text: str) -> None:
    config_path().parent.mkdir(parents=True, exist_ok=True)
    config_path().write_text(text)


def test_keys_come_as_a_hash_a_variable_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text(BOB + "\n")
    monkeypatch.setenv("CARLS", "carl-carl-carl-carl")
    configured(
        f'[keys.anna]\nsha256 = "{digest_of(ANNA.encode()).hex()}"\nparallel = 2\n'
        f'[keys.bob]\nfile = "{tmp_path}/key"\ntokens_per_minute = 5000\n[keys.carl]\nenv = '
        '"CARLS"\n'
    )
    keys = load_keys()
    assert [(k.name, k.digest) for k in keys] == [
        ("anna", digest_of(ANNA.encode())),
        ("bob", digest_of(BOB.encode())),
        ("carl", digest_of(b"carl-carl-carl-carl")),
    ]
    assert keys[0].parallel == 2
    assert ANNA not in repr(keys)
    secured = ServerSettings(host="0.0.0.0", keys=keys).secured()
    assert secured.keyed
    assert secured.api_key is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[keys.a]\nsha256 = 'x'", "64 hexadecimal"),
        ("[keys.a]\nenv = 'NOT_SET_AT_ALL'", "not set"),
        ("[keys.a]\nfile = '/no/such'", "can't be read"),
        ("[keys.a]\nparallel = 2", "exactly one of"),
        ("[keys.a]\nenv = 'SHORT'", "guessed"),
        ("[keys.a]\nenv = 'LONG'\nparallel = 0", "1 or more"),
        ("[keys.a]\nenv = 'LONG'\nparalel = 1", "unknown key: paralel"),
        ("[keys.a]\nenv = 'LONG'\n[keys.b]\nenv = 'LONG'", "the same key"),
        ("keys = 3", "one table per key"),
    ],
)
def test_an_invalid_table_of_keys_is_an_error_with_the_reason(
    text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHORT", "abc")
    monkeypatch.setenv("LONG", "long-long-long-long")
    configured(text)
    with pytest.raises(UsageError, match=says):
        load_keys()


def upstream(**values: str) -> str:
    return "[[upstream]]\n" + "".join(
        f"{k} = {v}\n" for k, v in {"name": "'lab'", **values}.items()
    )


def test_upstreams_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_upstreams(()) is None
    monkeypatch.setenv("LAB_KEY", "secret")
    configured(
        upstream(
            url="'http://10.1.2.3:8000/v1/'",
            models="{big = 'Org/Big'}",
            key_env="'LAB_KEY'",
            spill="true",
        )
    )
    found = load_upstreams(("10.0.0.0/8",))
    assert found is not None
    (model,) = found.models()
    assert (model.name, model.upstream_name, model.upstream.base_url) == (
        "big",
        "Org/Big",
        "http://10.1.2.3:8000/v1",
    )
    assert model.upstream.spill
    assert "secret" not in repr(model)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (upstream(url="'http://10.1.2.3/v1'"), "allow_upstream does not list"),
        (upstream(url="'ftp://localhost'"), "must be http"),
        (upstream(url="'http://u:p@localhost/v1'"), "must be http"),
        (upstream(url="'http://allowed.example/v1'", key_env="'LAB_KEY'"), "unencrypted"),
        (upstream(url="'http://localhost/v1'", key_env="'NOT_SET'"), "not set"),
        (upstream(url="'http://localhost/v1'", models="3"), "models in"),
        (upstream(url="'http://localhost/v1'", speaks="['latin']"), "speaks in"),
        (upstream(url="'http://localhost/v1'", adress="1"), "unknown key: adress"),
        (upstream(url="'http://localhost/v1'") * 2, "two tables"),
        ("upstream = 3", "as a table"),
    ],
)
def test_an_invalid_upstream_is_an_error_with_the_reason(
    text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_KEY", "secret")
    configured(text)
    with pytest.raises(UsageError, match=says):
        load_upstreams(("allowed.example",))
