"""Isolation of keys: each key stands for one person.

One key gives no access to what another has stored, cached or running: it cannot read, detect or
cancel it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.drive import run
from localllm.cli.serve.api_keys import load_keys
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.tokens import salted
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.errors import UsageError
from localllm.server.http.accounts import NamedKey, digest_of
from localllm.server.models.router import ServedModel
from localllm.settings import config_path
from localllm_backends.contract import LoadSpec
from server.test_pool import pooled
from support.http_server import Running, running_server
from support.requests import request_for
from support.scripted_backend import ScriptedBackend
from support.scripted_engine import ScriptedEngine

OWNER = "the-owners-own-key"
NAMES = ("anna", "bob", "carl", "dora", "root")
CHAT = "/v1/chat/completions"


def secret_of(name: str) -> str:
    return f"{name}-{name}-{name}-{name}"


def key(name: str) -> NamedKey:
    share = "team" if name in ("carl", "dora") else ""
    return NamedKey(
        name, digest_of(secret_of(name).encode()), share_cache=share, admin=name == "root"
    )


KEYED: dict[str, Any] = {"keys": tuple(key(name) for name in NAMES), "api_key": OWNER}


@contextmanager
def as_(url: str, name: str) -> Iterator[httpx.Client]:
    """Yield a client with that person's key, or with the owner's key for ""."""
    sent = {"authorization": f"Bearer {secret_of(name) if name else OWNER}"}
    with httpx.Client(base_url=url, trust_env=False, headers=sent, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server([ServedModel("tiny", ScriptedEngine())], **KEYED) as running:
        yield running


@pytest.fixture(scope="module")
def front(server: Running) -> Iterator[str]:
    """Yield the URL of a pool's front, whose server knows only the front's key."""
    with (
        running_server(
            [ServedModel("tiny", ScriptedEngine())], api_key="the-fronts-own-key"
        ) as node,
        pooled(node.url, pool_key="the-fronts-own-key", keys=KEYED["keys"], api_key=OWNER) as pool,
    ):
        yield pool.url


@pytest.fixture(params=["server", "front"])
def url(request: pytest.FixtureRequest, server: Running, front: str) -> str:
    return server.url if request.param == "server" else front


def objects(url: str, name: str) -> dict[str, str]:
    """Store one object of each kind for `name`, and return the ids by the paths' parameter
    names."""
    with as_(url, name) as http:
        answer = http.post("/v1/responses", json={"model": "tiny", "input": "a secret"}).json()
    output = answer["output"][0]["id"]
    return {"response_id": answer["id"], "output": output}


@pytest.mark.parametrize("other", ["bob", "", "root", "carl"])
def test_no_route_returns_objects_stored_by_another_key(
    url: str, server: Running, other: str
) -> None:
    """No route returns an object that another key has stored.

    The routes come from the OpenAPI document, so new routes are included.
    """
    theirs = objects(url, "anna")
    with as_(server.url, "anna") as http:
        document = http.get("/openapi.json").json()
    asked = 0
    with as_(url, other) as http:
        for path, methods in document["paths"].items():
            ids = set(re.findall(r"{(\w+)}", path)) - {"model_id"}
            assert ids <= set(theirs), f"{path}: say whose that is"
            for method in methods if ids else ():
                at = path.format(**theirs)
                answer = http.request(method.upper(), at, json={} if method == "post" else None)
                assert answer.status_code == 404, f"{method} {at}: {answer.text}"
                assert "a secret" not in answer.text
                asked += 1
        continued = {
            "model": "tiny",
            "input": "go on",
            "previous_response_id": theirs["response_id"],
        }
        answer = http.post("/v1/responses", json=continued)
        assert answer.status_code == 404, answer.text
        reference = [{"type": "item_reference", "id": theirs["output"]}]
        assert (
            http.post("/v1/responses", json={"model": "tiny", "input": reference}).status_code
            == 400
        )
    assert asked >= 4
    with as_(url, "anna") as http:  # the objects are still there, unchanged
        assert (
            http.get(f"/v1/responses/{theirs['response_id']}").json()["id"] == theirs["response_id"]
        )


ADMIN = [
    ("POST", "/models/load", {"model": "tiny"}),
    ("POST", "/models/unload", {"model": "tiny"}),
    ("POST", "/api/pull", {"model": "tiny"}),
    ("DELETE", "/api/delete", {"model": "tiny"}),
    ("POST", "/api/chat", {"model": "tiny", "messages": [], "keep_alive": 0}),
    ("POST", "/api/generate", {"model": "tiny", "keep_alive": 0}),
]


@pytest.mark.parametrize(("method", "path", "body"), ADMIN)
def test_models_are_managed_by_admins_alone(
    url: str, method: str, path: str, body: dict[str, Any]
) -> None:
    answers = {}
    for name in ("anna", "carl", "root", ""):
        with as_(url, name) as http:
            answers[name] = http.request(method, path, json=body).status_code
    assert answers["anna"] == answers["carl"] == 403
    # This server allows no pulling and no deleting at all.
    assert answers["root"] == answers[""] == (400 if path in ("/api/pull", "/api/delete") else 200)


def test_keep_alive_of_others_is_named_as_ignored() -> None:
    with running_server([ServedModel("tiny", ScriptedEngine())], **KEYED) as server:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "keep_alive": 0,
            "stream": False,
        }
        for name, ignored in (("anna", "keep_alive"), ("root", None)):
            with as_(server.url, name) as http:
                assert (
                    http.post("/api/chat", json=body).headers.get("x-localllm-ignored") == ignored
                )


def test_counters_of_all_keys_are_visible_only_to_admins(server: Running) -> None:
    pages = {}
    for name in ("anna", "root", ""):
        with as_(server.url, name) as http:
            pages[name] = http.get("/metrics").text
    assert 'key="anna"' in pages["anna"]
    assert 'key="bob"' not in pages["anna"]
    assert "localllm_http_requests_total" not in pages["anna"]
    for name in ("root", ""):
        assert 'key="bob"' in pages[name]
        assert "localllm_http_requests_total" in pages[name]


def test_only_an_admin_key_may_name_another_user(server: Running) -> None:
    """The header by which a front names the user of a request requires an admin's key."""
    forged = {"x-localllm-for": f"{'0' * 32} - 1"}
    with as_(server.url, "anna") as http:
        assert http.get("/v1/models", headers=forged).status_code == 403
    with as_(server.url, "") as http:
        assert http.get("/v1/models", headers=forged).status_code == 200
        assert http.get("/v1/models", headers={"x-localllm-for": "anna"}).status_code == 403


def test_reasoning_is_restored_only_for_the_key_that_received_it() -> None:
    """One key's reasoning is never part of another key's prompt."""
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}<think>{{ "
        "m.reasoning_content }}</think>"
        "{% endif %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif "
        "%}"
    )
    engine = ScriptedEngine(("<think>the vault is at 4711</think>", "fine"), chat_template=template)
    with running_server([ServedModel("tiny", engine)], **KEYED) as server:
        turn = [{"role": "user", "content": "think"}]
        body = {"model": "tiny", "messages": turn}
        with as_(server.url, "anna") as http:
            said = http.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
        again = [*turn, {"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]
        prompts = {}
        for name in ("bob", "anna"):
            with as_(server.url, name) as http:
                assert http.post(CHAT, json={**body, "messages": again}).status_code == 200
                prompts[name] = engine.requests[-1].prompt
    assert "4711" in prompts["anna"]
    assert "4711" not in prompts["bob"]


# --- the cache ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(few_layers: Path) -> Iterator[Running]:
    supervisor = Supervisor(WorkerOptions(LoadSpec(path=str(few_layers), n_ctx=4096, n_seq_max=4)))
    with running_server({"smollm2": supervisor}, **KEYED) as running:
        yield running


def usage(url: str, name: str, rules: str, **more: Any) -> dict[str, Any]:
    """Return the cached tokens and the cache header of a prompt that `name` sends.

    The prompt begins with `rules`, more than 100 tokens.
    """
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": "Who?"}]
    with as_(url, name) as http:
        body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 2, **more}
        answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()["usage"]
    assert found["prompt_tokens"] > 80
    return {
        "cached": found["prompt_tokens_details"]["cached_tokens"],
        "said": answer.headers["x-localllm-cache"],
    }


def rules(who: str) -> str:
    return (
        f"{who} is a librarian. "
        + ("She knows every book of the town, and tells where it stands. ") * 6
    )


def test_a_guessed_prefix_of_another_key_is_prefilled_like_a_new_one(real: Running) -> None:
    usage(real.url, "anna", rules("Her PIN is 31415926. Anna"))
    own = usage(real.url, "anna", rules("Her PIN is 31415926. Anna"))
    assert own["cached"] > 80
    for name in ("bob", "", "carl", "root"):
        usage(real.url, name, rules("Something else"))  # their common beginning
        right, wrong = (
            usage(real.url, name, rules(f"Her PIN is {pin}. Anna"))
            for pin in ("31415926", "27182818")
        )
        # The second guess matches the beginning of the first one, which belongs to the same key.
        fresh = usage(real.url, name, rules("His PIN is 31415926. Anna"))
        assert right == fresh, name
        assert right["cached"] < wrong["cached"] < 40, name


def test_a_group_shares_its_cache_and_a_salt_separates_it(real: Running) -> None:
    usage(real.url, "carl", rules("The team"))
    assert usage(real.url, "dora", rules("The team"))["cached"] > 80
    assert usage(real.url, "dora", rules("The team"), cache_salt="mine")["cached"] == 0
    assert usage(real.url, "dora", rules("The team"), cache_salt="mine")["cached"] > 80
    assert usage(real.url, "carl", rules("The team"), cache_salt="yours")["cached"] == 0
    assert usage(real.url, "bob", rules("The team"), cache_salt="mine")["cached"] == 0


def test_slots_show_details_only_of_the_keys_own_requests(real: Running) -> None:
    body = {
        "model": "smollm2",
        "prompt": "Once upon a time",
        "ignore_eos": True,
        "max_tokens": 3000,
        "stream": True,
    }
    with as_(real.url, "anna") as anna, anna.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert any(line.startswith("data:") for line in lines)
        slots = {}
        for name in ("anna", "bob", "root"):
            with as_(real.url, name) as http:
                slots[name] = next(s for s in http.get("/slots").json() if s["is_processing"])
    assert slots["anna"]["n_prompt_tokens"] == slots["root"]["n_prompt_tokens"] > 0
    assert set(slots["bob"]) == {"id", "n_ctx", "speculative", "is_processing", "state"}


@pytest.mark.parametrize(
    "shape", [{}, {"states": True, "rewind": "none"}, {"segments": False, "rewind": "none"}]
)
def test_kv_is_not_shared_between_keys_in_any_tier_or_running_request(
    shape: dict[str, Any], tmp_path: Path
) -> None:
    """KV is not shared between keys in memory, on disk, in the context, between running requests or
    after a restart. The test counts cached tokens in the engine itself."""
    prompt = "x" * 40 + "y" * 200

    def cached(engine: Engine, salt: str) -> int:
        return run(engine, request_for("a", prompt, 4, salt=salt)).finish("a").usage.cached_tokens

    for _ in range(2):  # the second pass reads from the disk
        engine = Engine(
            ScriptedBackend(n_ctx=2000, **shape), EngineSettings(disk_dir=str(tmp_path))
        )
        first = [cached(engine, salt) for salt in ("", "key anna\n", "key bob\n", "key bob\nmine")]
        again = [cached(engine, salt) for salt in ("", "key anna\n", "key bob\n", "key bob\nmine")]
        assert all(n > 100 for n in again)
        assert first == [0] * 4 or all(n > 100 for n in first)
        engine.check_integrity()
        engine.close()
    assert all(n > 100 for n in first), "nothing came back from disk"


def test_token_sequences_with_two_salts_have_no_common_prefix() -> None:
    line = list(range(50))
    one, other, none = salted(line, "a"), salted(line, "b"), salted(line, "")
    assert none.tolist() == line
    assert one[4:].tolist() == other[4:].tolist() == line[4:]
    assert len({*one[:4].tolist(), *other[:4].tolist(), *line[:4]}) == 12
    assert salted(line[2:], "a", 2).tolist() == one[2:].tolist()
    assert salted([-5, 3], "a")[0] == -5


# --- config.toml ----------------------------------------------------------------------------------


def test_groups_and_admins_are_configured() -> None:
    table = f'[keys.anna]\nsha256 = "{digest_of(b"x").hex()}"\nshare_cache = "team"\nadmin = true\n'
    config_path().parent.mkdir(parents=True, exist_ok=True)
    config_path().write_text(table)
    (found,) = load_keys()
    assert (found.share_cache, found.admin) == ("team", True)
    for wrong in ("admin = 1", "share_cache = true"):
        config_path().write_text(
            table.replace("admin = true", "").replace('share_cache = "team"', "") + wrong + "\n"
        )
        with pytest.raises(UsageError, match=wrong.partition(" ")[0]):
            load_keys()


class Counting(ScriptedEngine):
    """An engine that records the texts it tokenises."""

    def __init__(self) -> None:
        super().__init__(n_ctx=256)
        self.tokenized: list[str] = []

    async def tokenize(self, text: str, **options: Any) -> list[int]:
        self.tokenized.append(text)
        return await super().tokenize(text, **options)


def test_counting_time_does_not_reveal_messages_of_another_key() -> None:
    """Tokens are counted again for each key, even if another key's request has counted them
    before."""
    engine = Counting()
    turns = [{"role": r, "content": f"{r} said this " * 3} for r in ("user", "assistant")] * 3
    body = {"messages": [*turns, {"role": "user", "content": "now"}], "truncation": "auto"}

    def work_for(name: str) -> int:
        with as_(running.url, name) as http:
            before = len(engine.tokenized)
            assert http.post(CHAT, json=body).status_code == 200
            return len(engine.tokenized) - before

    with running_server([ServedModel("tiny", engine)], **KEYED) as running:
        first = work_for("anna")
        assert work_for("anna") < first
        assert work_for("bob") == first
