"""A pool of several servers at one address.

A conversation stays on the server that has its cache, and no request is lost with a server.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.server.http.run import serve_on
from localllm.server.http.settings import ServerSettings
from localllm.server.http.sockets import bind
from localllm.server.models.router import ServedModel
from localllm.server.proxy.pool import (
    PoolFront,
    PoolNode,
    by_preference,
    conversation_key,
    session_key,
    system_key,
)
from localllm_backends.contract import LoadSpec
from support.http_server import Running, running_server
from support.scripted_engine import Gate, ScriptedEngine
from support.until import until

SYSTEM = {"role": "system", "content": "You answer briefly. " * 12}


class Front:
    def __init__(self, url: str, front: PoolFront) -> None:
        self.url, self.front = url, front
        self.http = httpx.Client(base_url=url, trust_env=False, timeout=900)

    def ask(
        self,
        messages: list[dict[str, Any]],
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> httpx.Response:
        body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 12, **more}
        return self.http.post("/v1/chat/completions", json=body, headers=headers)


@contextmanager
def pooled(*urls: str, pool_key: str | None = None, **limits: Any) -> Iterator[Front]:
    """A front for the servers at `urls`, in its own thread."""
    nodes = [PoolNode(str(i), url) for i, url in enumerate(urls)]
    (sock,) = bind("127.0.0.1", 0)
    own = ServerSettings(port=sock.getsockname()[1], **limits)
    front = PoolFront(nodes, own, pool_key)
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        try:
            await serve_on(front.app, [sock], own, quiet=True)
        finally:
            await front.http.close()

    task = loop.create_task(serve())

    def run() -> None:
        asyncio.set_event_loop(loop)
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    served = Front(f"http://127.0.0.1:{own.port}", front)
    try:
        yield served
    finally:
        served.http.close()
        loop.call_soon_threadsafe(task.cancel)
        thread.join(timeout=20)
        assert not thread.is_alive()


def begun(stack: ExitStack, model: ServedModel, **settings: Any) -> Running:
    """Start a server and let it answer once.

    The servers start one after another. The framework builds its routes at the first request,
    under a filter of warnings that all threads share.
    """
    running = stack.enter_context(running_server([model], **settings))
    httpx.get(running.url + "/health", trust_env=False)  # matched after all other routes
    return running


@contextmanager
def scripted(n: int) -> Iterator[tuple[Front, list[ScriptedEngine], list[Running]]]:
    engines = [ScriptedEngine() for _ in range(n)]
    with ExitStack() as stack:
        running = [begun(stack, ServedModel("tiny", e)) for e in engines]
        yield stack.enter_context(pooled(*(r.url for r in running))), engines, running


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_conversation_stays_on_the_server_where_it_began() -> None:
    with scripted(3) as (front, engines, _):
        where: dict[int, set[str]] = {}
        talks = {i: [SYSTEM, user(f"question {i}")] for i in range(12)}
        for _ in range(3):
            for i, talk in talks.items():
                answer = front.ask(talk)
                assert answer.status_code == 200
                where.setdefault(i, set()).add(answer.headers["x-localllm-ran-on"])
                talk += [answer.json()["choices"][0]["message"], user("go on")]
        assert all(len(names) == 1 for names in where.values())
        assert all(engine.requests for engine in engines), "every server has its share"
        assert front.http.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_a_pool_skips_a_stopped_server_until_it_returns() -> None:
    with scripted(2) as (front, _, running):
        at = front.ask([user("hi")]).headers["x-localllm-ran-on"]
        gone = running[int(at)]
        gone.stop()
        until(lambda: not reachable(gone.url))
        answers = [front.ask([user("hi")]) for _ in range(3)]
        assert [a.status_code for a in answers] == [200] * 3
        assert {a.headers["x-localllm-ran-on"] for a in answers} != {at}


def reachable(url: str) -> bool:
    try:
        httpx.get(url + "/health", trust_env=False)
    except httpx.HTTPError:
        return False
    return True


def test_a_server_that_stops_before_its_answer_loses_no_request() -> None:
    with scripted(2) as (front, engines, running):
        gates = [Gate(), Gate()]
        for engine, gate in zip(engines, gates, strict=True):
            engine.script = (gate, "the answer")
        said: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: said.append(front.ask([user("hi")])))
        thread.start()
        until(lambda: any(e.running for e in engines))
        at = 0 if engines[0].running else 1
        gates[1 - at].open()
        running[at].stop()
        thread.join(timeout=30)
        assert said[0].status_code == 200
        assert "the answer" in said[0].text
        assert "error" not in said[0].text


@pytest.mark.long
def test_a_server_that_stops_after_the_first_token_causes_an_error_without_repetition() -> None:
    with scripted(2) as (front, engines, running):
        gate = Gate()
        for engine in engines:
            engine.script = ("begun", gate, "ended")
        body = {"model": "tiny", "messages": [user("hi")], "stream": True}
        with front.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert any("begun" in line for line in lines)
            running[int(answer.headers["x-localllm-ran-on"])].stop()
            rest = "\n".join(lines)
        assert "begun" not in rest
        assert "error" in rest


def test_a_pool_without_any_server_is_an_error() -> None:
    with pooled("http://127.0.0.1:9") as front:
        answer = front.ask([user("hi")])
        assert answer.status_code in (502, 503)
        assert front.http.get("/health").status_code == 503


def test_the_front_of_a_pool_checks_keys_and_hosts_too() -> None:
    with pooled("http://127.0.0.1:9", api_key="k") as front:
        assert front.http.get("/metrics").status_code == 401
        assert front.http.get("/metrics", headers={"host": "evil.example"}).status_code == 403


def test_new_conversations_are_spread_evenly_over_the_servers() -> None:
    nodes = [PoolNode(n, n) for n in "abc"]
    for talk in range(60):
        key = conversation_key({"messages": [SYSTEM, user(f"talk {talk}")]})
        first = by_preference(nodes, key, 0.0)[0]
        assert first.active <= min(node.active for node in nodes) + 8
        first.active += 1
    key = conversation_key({"messages": [SYSTEM, user("one")]})
    for node in nodes:
        node.active = 0
    home = by_preference(nodes, key, 0.0)[0]
    home.active = 9
    assert by_preference(nodes, key, 0.0)[0] is not home
    home.active, home.failed_s = 0, 100.0
    assert by_preference(nodes, key, 101.0)[-1] is home
    assert by_preference(nodes, key, 200.0)[0] is home
    nodes[0].active, nodes[1].active, nodes[2].active = 2, 0, 1
    assert [node.name for node in by_preference(nodes, None, 200.0)] == ["b", "c", "a"]


def test_removing_a_server_moves_only_its_own_conversations() -> None:
    nodes = [PoolNode(n, n) for n in "abcd"]
    for talk in range(40):
        key = conversation_key({"messages": [user(f"talk {talk}")]})
        order = by_preference(nodes, key, 0.0)
        assert by_preference([n for n in nodes if n is not order[-1]], key, 0.0) == order[:-1]


def test_turns_of_every_dialect_belong_together() -> None:
    turns = [SYSTEM, user("a")]
    more = [*turns, {"role": "assistant", "content": "b"}, user("c")]
    assert conversation_key({"messages": turns}) == conversation_key({"messages": more})
    assert conversation_key({"input": turns}) == conversation_key({"input": more})
    assert conversation_key({"messages": turns}) != conversation_key(
        {"messages": [SYSTEM, user("x")]}
    )
    assert conversation_key({"prompt": "x" * 1500}) == conversation_key(
        {"prompt": "x" * 1500 + "y" * 600}
    )
    assert conversation_key({"prompt": list(range(300))}) is not None
    assert conversation_key({"model": "m", "input": ["embed", "these"]}) is None
    assert conversation_key({}) is None


def marked(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def test_fields_that_change_with_each_turn_do_not_move_a_conversation() -> None:
    """Fields that a client changes in each turn do not change the key of the conversation.

    Claude Code marks the newest message for caching, and counts its requests in the system
    prompt.
    """
    cached = {"cache_control": {"type": "ephemeral"}}

    def turn(count: int, first: dict[str, Any], *later: dict[str, Any]) -> dict[str, Any]:
        billed = marked(f"x-anthropic-billing-header: cc_version=2; cch={count};\nBe brief.")
        messages = [{"role": "user", "content": [first]}, *later]
        return {"model": "m", "system": [billed], "messages": messages}

    first = turn(1, marked("a", **cached))
    second = turn(2, marked("a"), {"role": "assistant", "content": "b"}, user("c"))
    assert conversation_key(first) == conversation_key(second)
    assert system_key(first) == system_key(second)
    assert session_key("s", first) == session_key("s", second)
    other = turn(1, marked("another", **cached))
    assert conversation_key(first) != conversation_key(other)


@pytest.mark.parametrize("header", ["x-claude-code-session-id", "session-id", "session_id"])
def test_siblings_of_one_parent_go_to_one_server(header: str) -> None:
    helper = {"role": "system", "content": "You search files. " * 12}
    with scripted(3) as (front, _, _):

        def places(session: str, system: dict[str, Any]) -> set[str]:
            headers = {header: session} if session else None
            talks = [[system, user(f"search {i}")] for i in range(8)]
            answers = [front.ask(talk, headers) for talk in talks]
            assert {answer.status_code for answer in answers} == {200}
            return {answer.headers["x-localllm-ran-on"] for answer in answers}

        assert len(places("", helper)) == 3
        of_sessions = [places(f"session {i}", helper) for i in range(8)]
        assert [len(found) for found in of_sessions] == [1] * 8
        assert len(set.union(*of_sessions)) > 1, "sessions are spread"
        of_parents = [places(f"session {i}", SYSTEM) for i in range(8)]
        assert of_parents != of_sessions, "another system prompt has nothing in common"


def test_a_sibling_without_a_system_prompt_stays_with_its_conversation() -> None:
    turns = {"messages": [user("a"), {"role": "assistant", "content": "b"}, user("c")]}
    assert session_key("s", turns) is None
    assert session_key("", {"messages": [SYSTEM, user("a")]}) is None
    tools = {"messages": [SYSTEM, user("a")], "tools": [{"name": "read"}]}
    assert session_key("s", tools) == session_key("s", {"messages": [SYSTEM, user("b")]})


def test_requests_with_one_system_prompt_prefill_it_once(tiny_model: Path) -> None:
    helper = {"role": "system", "content": "You search files. " * 30}
    options = WorkerOptions(LoadSpec(path=str(tiny_model), n_ctx=2048, n_seq_max=4))
    with ExitStack() as stack:
        models = [ServedModel("tiny", Supervisor(options)) for _ in range(2)]
        urls = [begun(stack, model).url for model in models]
        front = stack.enter_context(pooled(*urls))
        cached = []
        for i in range(6):
            talk = [helper, user(f"search {i}")]
            usage = front.ask(talk, {"session-id": "one"}).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        whole = usage["prompt_tokens"]
    assert cached[0] == 0
    assert min(cached[1:]) > 0.8 * whole


def test_a_stored_response_is_found_on_any_server() -> None:
    with scripted(3) as (front, _, running):
        for at in running:
            stored = httpx.post(
                at.url + "/v1/responses", json={"model": "tiny", "input": "hi"}, trust_env=False
            ).json()
            assert front.http.get(f"/v1/responses/{stored['id']}").json()["id"] == stored["id"]
            more = {"model": "tiny", "input": "go on", "previous_response_id": stored["id"]}
            assert front.http.post("/v1/responses", json=more).status_code == 200
        assert front.http.get("/v1/responses/resp_nobody").status_code == 404


def conversations(
    ask: Callable[[list[dict[str, Any]]], dict[str, Any]], n: int, turns: int
) -> float:
    """Return the cached tokens in `n` conversations of `turns` turns.

    Each turn visits the conversations in a random order.
    """
    order = random.Random(7)
    talks = [
        [SYSTEM, user(f"Tell me about number {i}, please. " + "It matters. " * (i % 5))]
        for i in range(n)
    ]
    cached = 0
    for _ in range(turns):
        for talk in order.sample(talks, n):
            said = ask(talk)
            assert "usage" in said, said
            cached += said["usage"]["prompt_tokens_details"]["cached_tokens"]
            talk += [said["choices"][0]["message"], user("And what then?")]
    return cached


def real(path: Path, n_ctx: int = 4096) -> ServedModel:
    host = Supervisor(WorkerOptions(LoadSpec(path=str(path), n_ctx=n_ctx, n_seq_max=4)))
    return ServedModel("tiny", host, n_ctx=n_ctx)


def reuse(path: Path, n: int, turns: int, servers: int) -> float:
    with ExitStack() as stack:
        running = [begun(stack, real(path)) for _ in range(servers)]
        front = stack.enter_context(pooled(*(r.url for r in running)))
        return conversations(lambda talk: front.ask(talk).json(), n, turns)


def test_turns_reuse_the_cached_prompt_of_earlier_turns(tiny_model: Path) -> None:
    """A turn's repeated prompt comes from the cache of whichever server has it.

    There are two servers with a real engine.
    """
    with ExitStack() as stack:
        running = [begun(stack, real(tiny_model)) for _ in range(2)]
        front = stack.enter_context(pooled(*(r.url for r in running)))
        talks = [[user(f"Tell me about number {i}, please.")] for i in range(4)]
        before = [0] * 4
        for turn in range(3):
            for i, talk in enumerate(talks):
                said = front.ask(talk, max_tokens=6).json()
                cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert not turn or cached >= 0.9 * before[i]
                before[i] = said["usage"]["prompt_tokens"]
                talk += [said["choices"][0]["message"], user("And what then?")]
        assert all(server.app.state.server.requests for server in running)


@contextmanager
def process(path: Path, port: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `localllm serve` in a process that a test can kill."""
    own = {f"LOCALLLM_{n}_DIR": str(folder / n.lower()) for n in ("CONFIG", "DATA", "CACHE", "LOG")}
    command = [
        sys.executable,
        "-m",
        "localllm",
        "serve",
        str(path),
        "--only",
        "--port",
        str(port),
        "--quiet",
    ]
    with subprocess.Popen([*command, "--alias", "tiny"], env={**os.environ, **own}) as served:
        try:
            yield served
        finally:
            served.terminate()


def ports(n: int) -> list[int]:
    socks = [bind("127.0.0.1", 0)[0] for _ in range(n)]
    found = [s.getsockname()[1] for s in socks]
    for s in socks:
        s.close()
    return found


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_three_servers_reuse_nearly_as_many_tokens_as_one(smollm2: Path) -> None:
    """Three servers reuse at least 95 % as many tokens as one server."""
    one = reuse(smollm2, 40, 5, 1)
    three = reuse(smollm2, 40, 5, 3)
    print(json.dumps({"one": one, "three": three, "share": three / one}))
    assert three >= 0.95 * one


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_request_is_lost_when_a_server_is_killed(smollm2: Path, tmp_path: Path) -> None:
    """SIGKILL of a server loses none of twelve requests whose prompts are being read."""
    with ExitStack() as stack:
        at = ports(3)
        served = [stack.enter_context(process(smollm2, p, tmp_path / str(p))) for p in at]
        front = stack.enter_context(pooled(*(f"http://127.0.0.1:{p}" for p in at)))
        for p in at:
            until(lambda p=p: reachable(f"http://127.0.0.1:{p}"), timeout_s=120)
        talks = [[user(f"{i} " + "some words of a long text " * 100)] for i in range(12)]
        said: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda talk=talk: said.append(front.ask(talk)))
            for talk in talks
        ]
        for thread in threads:
            thread.start()
        until(lambda: sum(node.active for node in front.front.nodes) == 12, timeout_s=60)
        victim = max(front.front.nodes, key=lambda node: node.active)
        served[int(victim.name)].kill()
        for thread in threads:
            thread.join(timeout=420)
        assert [a.status_code for a in said] == [200] * 12
        assert not any('"error"' in a.text for a in said)


def test_the_second_choice_is_the_server_of_the_system_prompt() -> None:
    nodes = [PoolNode(str(i), "") for i in range(8)]
    tools = [{"name": "read"}]
    bodies = [{"messages": [SYSTEM, user(f"talk {i}")], "tools": tools} for i in range(64)]
    system = system_key(bodies[0])
    home = by_preference(nodes, system, 0.0)[0]
    firsts = set()
    for body in bodies:
        key = conversation_key(body)
        order = by_preference(nodes, key, 0.0, system_key(body))
        assert order[0] is by_preference(nodes, key, 0.0)[0]
        assert home in order[:2]
        assert {node.name for node in order} == {node.name for node in nodes}
        firsts.add(order[0].name)
        order[0].active = 9
        assert by_preference(nodes, key, 0.0, system)[0] is order[1]
        order[0].active = 0
    assert len(firsts) == 8


def test_the_system_part_is_found_in_every_dialect() -> None:
    same = system_key({"messages": [SYSTEM, user("a")]})
    assert same == system_key({"messages": [SYSTEM, user("b"), SYSTEM]})
    assert same != system_key({"messages": [SYSTEM, user("a")], "tools": [{"name": "x"}]})
    assert same != system_key({"messages": [SYSTEM, user("a")], "model": "another"})
    assert system_key({"system": "be brief", "messages": [user("a")]}) is not None
    assert system_key({"instructions": "be brief", "input": "a"}) is not None
    assert system_key({"messages": [user("a")]}) is None
    assert system_key({"prompt": "a"}) is None
