"""`localllm serve` logs one line for each request, without the request's content."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from localllm.cli.serve.run import with_request_log
from localllm.server.app import create_app
from localllm.server.http.settings import ServerSettings
from localllm.server.models.router import ModelRouter
from support.scripted_engine import ScriptedEngine


def told(path: str, status: int | None, method: str = "POST") -> list[str]:
    """Return the log lines of one request that took 1.5 s."""
    lines: list[str] = []
    times = iter((10.0, 11.5))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if status is None:
            raise asyncio.CancelledError
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"secret"})

    async def send(message: Any) -> None:
        pass

    async def main() -> None:
        scope = {"type": "http", "path": path, "method": method, "query_string": b"key=secret"}
        served = with_request_log(app, lines.append, lambda: next(times))
        if status is None:
            with pytest.raises(asyncio.CancelledError):
                await served(scope, send, send)
        else:
            await served(scope, send, send)

    asyncio.run(main())
    return [line[10:] for line in lines]


def test_each_request_has_a_log_line() -> None:
    assert told("/v1/chat/completions", 200) == ["POST /v1/chat/completions  200  1.50 s"]
    assert told("/v1/chat/completions", None) == [
        "POST /v1/chat/completions  client disconnected before the answer  1.50 s"
    ]


def test_a_status_request_has_a_log_line_only_if_it_fails() -> None:
    assert told("/health", 200, "GET") == []
    assert told("/v1/models", 401, "GET") == ["GET /v1/models  401  1.50 s"]


def test_a_health_request_while_the_model_loads_has_no_log_line() -> None:
    assert told("/health", 503, "GET") == []
    assert told("/v1/health", 503, "GET") == []
    assert told("/health", 500, "GET") == ["GET /health  500  1.50 s"]
    assert told("/v1/models", 503, "GET") == ["GET /v1/models  503  1.50 s"]


def test_control_characters_of_a_path_are_not_logged() -> None:
    (line,) = told("/\x1b[2J\n" + "x" * 100, 404, "GET")
    assert "\x1b" not in line
    assert "\n" not in line
    assert len(line) < 90


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_line_of_an_answer_has_its_figures(stream: bool) -> None:
    engine = ScriptedEngine(["one ", "two"])
    engine.cached_tokens = 3
    lines: list[str] = []
    body = {"model": "m", "messages": [{"role": "user", "content": "secret"}], "stream": stream}

    async def main() -> None:
        router = ModelRouter({"m": engine, "other": ScriptedEngine()})
        app = create_app(router, settings=ServerSettings(port=1))
        transport = httpx.ASGITransport(with_request_log(app, lines.append))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            await http.post("/v1/chat/completions", json=body)

    asyncio.run(main())
    (line,) = lines
    for figure in (
        "prompt tokens (3 cached)",
        "7 output tokens at 300.0 tokens/s",
        "first token after 0.01 s",
    ):
        assert figure in line
    assert line.endswith(", m")
    assert "secret" not in line
