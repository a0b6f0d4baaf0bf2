"""JSON over HTTP: a body within the limits of size, time and depth, with finite numbers and valid Unicode; and replies."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.requests import Request

from localllm.errors import RequestError
from localllm.server.http.asgi import Scope, Send
from localllm.server.http.errors import BodyTooLargeError, SlowBodyError
from localllm.server.http.json_depth import containers, nests_deeper
from localllm.server.http.settings import ServerSettings
from localllm.server.http.unpacking import unpack

# A larger body is read in a thread: looking at its depth takes longer than the loop should stand still.
_SMALL_BYTES = 2**17
# Python reads JSON without letting another thread run: this many are a tenth of a second, and 32 MiB could hold a
# hundred times as many. The largest conversation with tools has thousands.
_MOST_CONTAINERS = 500_000
# Under this key of its scope a request may have its body, where that was read already.
_READ = "localllm.body"
_SURROGATE = re.compile("[\ud800-\udfff]")


class BadJsonError(RequestError):
    """The body is not JSON, or not a JSON object."""

    code = "invalid_json"


@dataclass(frozen=True, slots=True)
class Body:
    """A body as it was sent, unpacked (`raw`), and the object in it."""

    raw: bytes
    value: dict[str, Any]


def keep_body(scope: Scope, body: Body) -> None:
    """Remember what was read of a request, for whoever reads it next."""
    scope[_READ] = body


async def read_json(request: Request, settings: ServerSettings) -> dict[str, Any]:
    """The request's JSON object, unpacked where it was sent packed, within the limits of size, depth and time. Raises
    RequestError."""
    return (await read_body(request, settings)).value


async def read_body(request: Request, settings: ServerSettings) -> Body:
    """The same, with the bytes it was read from."""
    known = request.scope.get(_READ)
    if isinstance(known, Body):
        return known

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
    encoding = request.headers.get("content-encoding", "")
    if encoding or len(body) > _SMALL_BYTES:
        return await asyncio.to_thread(_unpacked, body, encoding, settings)
    return Body(body, parse(body, settings.max_json_depth))


def _unpacked(body: bytes, encoding: str, settings: ServerSettings) -> Body:
    raw = unpack(body, encoding, settings.max_body_bytes)
    return Body(raw, parse(raw, settings.max_json_depth))


async def send_json(send: Send, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
    """A whole JSON response."""
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    raw = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    raw += [(k.encode("latin-1"), v.encode("latin-1")) for k, v in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": data})


async def send_text(send: Send, text: str, content_type: str) -> None:
    """A whole response of text."""
    data = text.encode()
    raw = [(b"content-type", content_type.encode("latin-1")), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": raw})
    await send({"type": "http.response.body", "body": data})


def parse(body: bytes, max_depth: int = 96) -> dict[str, Any]:
    """The JSON object in `body`; raises BadJsonError. Lone surrogates (editors cut text in mid-character) become
    U+FFFD, so that everything that comes out can be written as UTF-8."""
    brackets = body.count(b"[") + body.count(b"{")
    if brackets > _MOST_CONTAINERS and containers(body) > _MOST_CONTAINERS:
        raise BadJsonError(f"the body holds more than {_MOST_CONTAINERS:,} lists and objects")
    if brackets > max_depth and nests_deeper(body, max_depth):
        raise BadJsonError(f"the body nests deeper than {max_depth} levels")
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
