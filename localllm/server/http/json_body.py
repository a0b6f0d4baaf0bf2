"""JSON over HTTP: a body within the limits of size, time and depth, with finite numbers and valid Unicode; and replies."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from starlette.requests import Request

from localllm.errors import RequestError
from localllm.server.http.asgi import Send
from localllm.server.http.errors import BodyTooLargeError, SlowBodyError
from localllm.server.http.settings import ServerSettings

_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")


class BadJsonError(RequestError):
    """The body is not JSON, or not a JSON object."""

    code = "invalid_json"


async def read_json(request: Request, settings: ServerSettings) -> dict[str, Any]:
    """The request's JSON object, within the limits of size, depth and time. Raises RequestError."""

    async def collect() -> bytes:
        pieces: list[bytes] = []
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size > settings.max_body_bytes:
                raise BodyTooLargeError(f"the body is larger than {settings.max_body_bytes} bytes")
            pieces.append(piece)
        return b"".join(pieces)

    try:
        body = await asyncio.wait_for(collect(), settings.body_timeout_s)
    except TimeoutError as e:
        raise SlowBodyError(f"the body did not arrive within {settings.body_timeout_s:.0f} seconds") from e
    return parse(body, settings.max_json_depth)


async def send_json(send: Send, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
    """A whole JSON response."""
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    raw = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    raw += [(k.encode("latin-1"), v.encode("latin-1")) for k, v in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": data})


def parse(body: bytes, max_depth: int = 96) -> dict[str, Any]:
    """The JSON object in `body`; raises BadJsonError. Lone surrogates (editors cut text in mid-character) become
    U+FFFD, so that everything that comes out can be written as UTF-8."""
    if body.count(b"[") + body.count(b"{") > max_depth:
        _check_depth(body, max_depth)
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except UnicodeDecodeError as e:
        raise BadJsonError(f"the body is not UTF-8 text: byte {e.start} is invalid") from e
    except json.JSONDecodeError as e:
        raise BadJsonError(f"the body is not JSON: {e.msg} at line {e.lineno} column {e.colno}") from e
    except (ValueError, RecursionError) as e:
        raise BadJsonError("the body is not JSON this server can read: a number is too long or nesting too deep") from e
    if not isinstance(value, dict):
        raise BadJsonError("the body must be a JSON object")
    if b"\\ud" in body or b"\\uD" in body or b"\xed" in body:
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value


def _check_depth(body: bytes, max_depth: int) -> None:
    depth = 0
    for match in _STRUCTURE.finditer(body):
        token = match.group()
        if token in (b"[", b"{"):
            depth += 1
            if depth > max_depth:
                raise BadJsonError(f"the body nests deeper than {max_depth} levels")
        elif token in (b"]", b"}"):
            depth -= 1


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value) if _SURROGATE.search(value) else value
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(v) for v in value]
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise BadJsonError(f"the body is not JSON: {name} is not a JSON number")
