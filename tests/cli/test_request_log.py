"""`localllm serve` says a line for each request, and nothing of what was asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from localllm.cli.serve.run import with_lines


def told(path: str, status: int | None, method: str = "POST") -> list[str]:
    """The lines for one request that took a second and a half."""
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
        served = with_lines(app, lines.append, lambda: next(times))
        if status is None:
            with pytest.raises(asyncio.CancelledError):
                await served(scope, send, send)
        else:
            await served(scope, send, send)

    asyncio.run(main())
    return [line[10:] for line in lines]


def test_each_request_has_its_line() -> None:
    assert told("/v1/chat/completions", 200) == ["POST /v1/chat/completions  200  1.50 s"]
    assert told("/v1/chat/completions", None) == [
        "POST /v1/chat/completions  left before its answer  1.50 s"
    ]


def test_who_only_watches_has_one_where_it_fails() -> None:
    assert told("/health", 200, "GET") == []
    assert told("/v1/models", 401, "GET") == ["GET /v1/models  401  1.50 s"]


def test_a_path_is_not_obeyed() -> None:
    (line,) = told("/\x1b[2J\n" + "x" * 100, 404, "GET")
    assert "\x1b" not in line
    assert "\n" not in line
    assert len(line) < 90
