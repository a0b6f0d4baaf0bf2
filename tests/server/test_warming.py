"""Instructions that are prefilled before the first question.

They are those of a file, and those that each client sent last. A request stops the prefill at
once.
"""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.cli.serve.warm_file import warming_request
from localllm.engine.messages import Request
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.errors import UsageError
from localllm.server.app import create_app
from localllm.server.http.settings import ServerSettings
from localllm.server.models.router import ModelRouter
from localllm.server.warming import Warming, kept_path
from localllm_backends.contract import LoadSpec
from support.scripted_engine import Gate, ScriptedEngine

CHAT = "/v1/chat/completions"
SYSTEM = "You keep the log of a ship and answer in one word. " * 60
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@asynccontextmanager
async def serving(host: Any, wanted: str) -> AsyncIterator[tuple[Warming, httpx.AsyncClient]]:
    """A server with a loaded model and its warming."""
    router = ModelRouter({"m": host})
    app = create_app(router, settings=ServerSettings(allow_users=True))
    await router.preload()
    warming = Warming(app.state.server, warming_request(wanted))
    app.state.server.warming = warming
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:11535") as http:
        yield warming, http
    await router.close()


async def ask(http: httpx.AsyncClient, system: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Where are we?"}]
    headers = {"user-agent": more.pop("program", "agent/1.0")}
    body = {"messages": messages, "max_tokens": 4, **more}
    reply = await http.post(CHAT, json=body, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


@pytest.fixture(params=["text", "json"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "instructions"
    text = SYSTEM
    if request.param == "json":
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hi"}]
        text = json.dumps({"messages": messages, "tools": TOOLS})
    path.write_text(text, encoding="utf-8")
    return path


def test_a_files_instructions_are_a_prefix_of_the_first_prompt(file: Path) -> None:
    engine = ScriptedEngine(["Here."])

    async def play() -> None:
        async with serving(engine, str(file)) as (warming, http):
            await warming.run()
            await ask(http, SYSTEM, tools=TOOLS if '"tools"' in file.read_text() else [])

    asyncio.run(play())
    warmed, asked = engine.requests
    assert (warmed.generation.max_tokens, warmed.generation.priority) == (0, -1)
    assert str(asked.prompt).startswith(str(warmed.prompt))
    assert len(str(warmed.prompt)) > len(SYSTEM)


def test_the_instructions_of_each_client_are_kept_for_the_next_start() -> None:
    before, after = ScriptedEngine(["Here."]), ScriptedEngine(["Here."])

    async def first() -> None:
        async with serving(before, "last") as (_, http):
            await ask(http, "Old. " + SYSTEM)
            await ask(http, "One. " + SYSTEM)
            await ask(http, "Two. " + SYSTEM, program="other/2.0", tools=TOOLS)
            await ask(http, "Short.", program="third/3.0")

    async def second() -> None:
        async with serving(after, "last") as (warming, http):
            await warming.run()
            await ask(http, "Two. " + SYSTEM, program="other/2.0", tools=TOOLS)

    asyncio.run(first())
    if kept_path().stat().st_mode & 0o777:
        assert stat.S_IMODE(kept_path().stat().st_mode) & 0o077 == 0
    asyncio.run(second())
    newest, older, asked = [str(request.prompt) for request in after.requests]
    assert ("Two. You" in newest, "One. You" in older) == (True, True)
    assert asked.startswith(newest)
    assert "Where" not in newest


def test_a_request_stops_the_prefill_and_idle_time_continues_it(file: Path) -> None:
    gate = Gate()

    def script(request: Request) -> list[Any]:
        return [gate] if request.generation.max_tokens == 0 else ["Here."]

    engine = ScriptedEngine(script)

    async def play() -> None:
        async with serving(engine, str(file)) as (warming, http):
            running = asyncio.create_task(warming.run())
            await asyncio.to_thread(gate.reached.wait, 30)
            (warmed,) = engine.requests
            await ask(http, SYSTEM)
            assert engine.cancelled == [warmed.id]
            gate.open()
            await running
            assert warming.done.is_set()

    asyncio.run(play())
    assert [request.generation.max_tokens for request in engine.requests] == [0, 4, 0]


def test_a_file_that_can_not_be_read_is_an_error(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing", binary):
        with pytest.raises(UsageError, match="can't be read"):
            warming_request(str(path))


def test_the_first_question_to_a_real_model_comes_from_the_cache(
    few_layers: Path, tmp_path: Path
) -> None:
    path = tmp_path / "system.txt"
    path.write_text(SYSTEM, encoding="utf-8")
    host = Supervisor(WorkerOptions(LoadSpec(path=str(few_layers), n_ctx=2048, n_seq_max=2)))

    async def play() -> dict[str, Any]:
        async with serving(host, str(path)) as (warming, http):
            await warming.run()
            return await ask(http, SYSTEM)

    usage = asyncio.run(play())["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= usage["prompt_tokens"] - 16 > 500
