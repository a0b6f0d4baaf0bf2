"""JSON bodies: reading within limits of size, time, nesting and Content-Encoding, and writing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

from starlette.requests import Request

from localllm.errors import BusyError, RequestError
from localllm.server.http.asgi import Send
from localllm.server.http.errors import BodyTooLargeError, EncodingError, SlowBodyError
from localllm.server.http.settings import ServerSettings

_GZIP, _ZLIB, _RAW = 31, 15, -15
_PIECE_BYTES = _PIECE_CHARS = 2**18
# Larger bodies are read beside the event loop, which comes first after each slice of work.
_SMALL_BYTES = 2**17
_SLICE_S, _PAUSE_S = 0.002, 0.001
# They have two threads of their own, to be read and for what is made of them: more that compute
# would keep everybody waiting for each of them.
_LARGE_BODIES: Final = ThreadPoolExecutor(2, thread_name_prefix="large bodies")
# They are parsed and validated in one go each, so this bounds how long: 32 MiB could hold a hundred
# times as many. Real conversations with tools have thousands; a prompt of token numbers has as many
# values as tokens.
_MOST_CONTAINERS, _MOST_VALUES = 50_000, 1_000_000
# Of JSON text: up to the next mark that counts; and of a string, whole escapes and what lies
# between them, up to its end.
_PLAIN = re.compile(r'[^"\[{,]*(.?)', re.DOTALL)
_QUOTED = re.compile(r'(?:[^"\\]+|\\.)*("?)', re.DOTALL)
# ASGI scope key of a body that was read already, for the next reader of the same request.
BODY = "localllm.body"
# Set where a request's body was a large one.
_LARGE: ContextVar[bool] = ContextVar("large body", default=False)
Made = TypeVar("Made")
_SURROGATE = re.compile("[\ud800-\udfff]")


def unpack(
    body: bytes,
    encoding: str,
    limit_bytes: int,
    between_pieces: Callable[[], object] = lambda: None,
) -> bytes:
    """`body` decoded; at most `limit_bytes` and a piece are ever held. `between_pieces` is called
    between them.

    Raises EncodingError for an unsupported Content-Encoding, BodyTooLargeError, and RequestError
    for broken data."""
    wbits = _window_bits(body, encoding)
    if wbits is None:
        return body
    pieces: list[bytes] = []
    size, packed = 0, body
    while True:
        unpacker = zlib.decompressobj(wbits)
        try:
            piece = b""
            while not unpacker.eof and (packed or piece):
                piece = unpacker.decompress(packed, _PIECE_BYTES)
                packed = unpacker.unconsumed_tail
                size += len(piece)
                if size > limit_bytes:
                    raise BodyTooLargeError(f"the body unpacks to more than {limit_bytes} bytes")
                pieces.append(piece)
                between_pieces()
        except zlib.error:
            raise RequestError(
                f"the body is not what its Content-Encoding says ({encoding})"
            ) from None
        if not unpacker.eof:
            raise RequestError(f"the body ends before what is packed in it does ({encoding})")
        packed = unpacker.unused_data
        if not packed:
            return b"".join(pieces)
        if wbits != _GZIP:
            raise RequestError(f"something stands behind the packed body ({encoding})")


def _window_bits(body: bytes, encoding: str) -> int | None:
    """zlib's name for a Content-Encoding; None for a body that is not packed. Raises
    EncodingError."""
    match encoding.strip().lower():
        case "" | "identity":
            return None
        case "gzip" | "x-gzip":
            return _GZIP
        case "deflate":
            # The standard means zlib's format; some clients send raw deflate (RFC 9110, 8.4.1.2).
            is_zlib = len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
            return _ZLIB if is_zlib else _RAW
    raise EncodingError(f"the body is packed as {encoding!r}, which this server does not take")


class BadJsonError(RequestError, code="invalid_json"):
    """The body is not JSON, or not a JSON object."""


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A decoded body (`raw`) and the JSON object in it."""

    raw: bytes
    value: dict[str, Any]


async def read_json(request: Request, settings: ServerSettings) -> dict[str, Any]:
    """The request's JSON object, decoded, within the limits of size, depth and time. Raises
    RequestError."""
    return (await read_body(request, settings)).value


async def read_body(request: Request, settings: ServerSettings) -> JsonBody:
    """The same, with its bytes."""
    known = request.scope.get(BODY)
    if isinstance(known, JsonBody):
        return known

    encoding = request.headers.get("content-encoding", "")
    small = min(_SMALL_BYTES, settings.max_body_bytes)
    with _Held(settings.max_bodies_bytes) as held:
        body = await _received(request, settings, held)
        if len(body) <= small:
            with contextlib.suppress(BodyTooLargeError):
                raw = unpack(body, encoding, small)
                return JsonBody(raw, parse(raw, settings.max_json_depth))
        _LARGE.set(True)
        return await asyncio.get_running_loop().run_in_executor(
            _LARGE_BODIES, _large, body, encoding, settings
        )


async def worked(work: Callable[[], Made], *, takes_ms: bool = False) -> Made:
    """What `work` makes of the body that was read for this request: in a thread where it `takes_ms`
    of any, and in one of those for large bodies where that was one."""
    if _LARGE.get():
        return await asyncio.get_running_loop().run_in_executor(
            _LARGE_BODIES, copy_context().run, work
        )
    return await asyncio.to_thread(work) if takes_ms else work()


class _Held:
    """Bytes of one large body while it comes and waits to be read: at most `most_bytes` of all of
    them. Small ones are not counted: whoever sends large ones keeps nobody out. The event loop's alone."""

    all_bytes = 0

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._bytes = most_bytes, 0

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *_: object) -> None:
        _Held.all_bytes -= self._bytes

    def grow(self, size: int) -> None:
        """It has `size` bytes by now. Raises BusyError."""
        more = size - self._bytes if size > _SMALL_BYTES else 0
        if more and _Held.all_bytes + more > self._most_bytes:
            raise BusyError(
                f"large bodies that are being read hold {_Held.all_bytes // 2**20} MiB already"
            )
        _Held.all_bytes += more
        self._bytes += more


async def _received(request: Request, settings: ServerSettings, held: _Held) -> bytes:
    """The bytes of the body, which must come at the least rate. Raises BodyTooLargeError,
    SlowBodyError and BusyError."""
    pieces: list[bytes] = []
    size = 0
    latest_s = asyncio.get_running_loop().time() + settings.body_timeout_s
    try:
        async with asyncio.timeout_at(latest_s) as limit:
            async for piece in request.stream():
                size += len(piece)
                if size > settings.max_body_bytes:
                    raise BodyTooLargeError(
                        f"the body is larger than {settings.max_body_bytes} bytes"
                    )
                held.grow(size)
                pieces.append(piece)
                limit.reschedule(latest_s + size / settings.min_body_bytes_s)
    except TimeoutError as e:
        raise SlowBodyError(
            f"{size} bytes of the body came within "
            f"{settings.body_timeout_s + size / settings.min_body_bytes_s:.0f} seconds",
            hint=f"send it at {settings.min_body_bytes_s // 1000} kB/s or more",
        ) from e
    return b"".join(pieces)


class _Turns:
    """Work in a thread that lets others come first after each slice of it. It may take `most_s`
    seconds of processor time."""

    def __init__(self, most_s: float) -> None:
        self._most_s, self._latest_s = most_s, time.thread_time() + most_s
        self._slice_ends_s = time.monotonic() + _SLICE_S

    def give(self) -> None:
        """Raises BodyTooLargeError where it has taken too long."""
        if time.monotonic() < self._slice_ends_s:
            return
        if time.thread_time() > self._latest_s:
            raise BodyTooLargeError(
                f"the body takes more than {self._most_s:g} seconds to read",
                hint="send fewer values at once",
            )
        time.sleep(_PAUSE_S)
        self._slice_ends_s = time.monotonic() + _SLICE_S


def _large(body: bytes, encoding: str, settings: ServerSettings) -> JsonBody:
    """The same as `unpack` and `parse`, in turn with others."""
    turns = _Turns(settings.body_work_s)
    raw = unpack(body, encoding, settings.max_body_bytes, turns.give)
    value = parse(raw, settings.max_json_depth, lambda text: _check_counts(text, turns))
    turns.give()
    return JsonBody(raw, value)


def _check_counts(text: str, turns: _Turns) -> None:
    """Raises RequestError where `text` holds too many values. What stands in strings is none: they
    are told apart only where that matters."""
    brackets = text.count("[") + text.count("{")
    if brackets <= _MOST_CONTAINERS and brackets + text.count(",") <= _MOST_VALUES:
        return
    at = containers = values = 0
    quoted = False
    found = _PLAIN.match(text, at, _PIECE_CHARS)
    # Where nothing more is found the text ends, or is broken: then parsing it says where.
    while found is not None and found.end() > at:
        at, mark = found.end(), found[1]
        quoted ^= mark == '"'
        containers += mark in ("[", "{")
        values += mark in ("[", "{", ",")
        if containers > _MOST_CONTAINERS:
            raise BadJsonError(f"the body holds more than {_MOST_CONTAINERS:,} lists and objects")
        if values > _MOST_VALUES:
            raise BodyTooLargeError(f"the body holds more than {_MOST_VALUES:,} values")
        turns.give()
        found = (_QUOTED if quoted else _PLAIN).match(text, at, at + _PIECE_CHARS)


async def send_json(
    send: Send, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> None:
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    await _send_body(send, status, data, {"content-type": "application/json", **(headers or {})})


async def send_text(send: Send, text: str, content_type: str) -> None:
    await _send_body(send, 200, text.encode(), {"content-type": content_type})


async def _send_body(send: Send, status: int, data: bytes, headers: Mapping[str, str]) -> None:
    sized = {**headers, "content-length": str(len(data))}
    raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in sized.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": data})


def parse(
    body: bytes, max_depth: int = 96, look: Callable[[str], object] = lambda text: None
) -> dict[str, Any]:
    """The JSON object in `body`, after a `look` at its text; raises BadJsonError, and what `look`
    does. Lone surrogates (editors cut text in mid-character) become U+FFFD, so that the result can
    be encoded as UTF-8."""
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        look(text)
        value = json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError as e:
        raise BadJsonError(f"the body is not UTF-8 text: byte {e.start} is invalid") from e
    except json.JSONDecodeError as e:
        raise BadJsonError(
            f"the body is not JSON: {e.msg} at line {e.lineno} column {e.colno}"
        ) from e
    except (ValueError, RecursionError) as e:
        raise BadJsonError(
            "the body is not JSON this server can read: a number is too long or nesting too deep"
        ) from e
    if not isinstance(value, dict):
        raise BadJsonError("the body must be a JSON object")
    if body.count(b"[") + body.count(b"{") > max_depth:
        _check_depth(value, max_depth, max_depth)
    if b"\\ud" in body or b"\\uD" in body or b"\xed" in body:
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value


def _check_depth(value: Any, levels: int, max_depth: int) -> None:
    """Raises BadJsonError where `value` nests deeper than `levels`."""
    if not isinstance(value, dict | list):
        return
    if not levels:
        raise BadJsonError(f"the body nests deeper than {max_depth} levels")
    for inner in value.values() if isinstance(value, dict) else value:
        _check_depth(inner, levels - 1, max_depth)


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
