"""JSON bodies: reading within limits of size, time, nesting and Content-Encoding."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

from starlette.requests import Request

from localllm.errors import BusyError, RequestError
from localllm.server.http.errors import BodyTooLargeError, EncodingError, SlowBodyError
from localllm.server.http.settings import ServerSettings

_GZIP_OR_ZLIB = 47
_RAW = -15
_GZIP_MAGIC = b"\x1f\x8b"
# A gzip body may have several members (RFC 1952, 2.2). A member can be as short as 20 bytes, and
# zlib copies the input that it leaves: the two limits bound the work that 32 MiB of members cost.
_MOST_MEMBERS = 10_000
_PACKED_PIECE_BYTES = 2**16
# In one go nobody else has a turn.
_PIECE_BYTES = _PIECE_CHARS = 2**18
# Larger bodies are read beside the event loop.
_SMALL_BYTES = 2**17
# They have two threads of their own, to be read and for what is made of them: more that compute
# would keep everybody waiting for each of them.
_LARGE_BODIES: Final = ThreadPoolExecutor(2, thread_name_prefix="large bodies")
# They are parsed and validated in one go each, so this bounds how long: 32 MiB could hold a hundred
# times as many. Real conversations with tools have thousands; a prompt of token numbers has as many
# values as tokens.
_MOST_CONTAINERS = 50_000
_MOST_VALUES = 1_000_000
# Of JSON text: up to the next string; and of a string, whole escapes and what lies between them, up
# to its end.
_PLAIN = re.compile(r'[^"]*("?)')
_QUOTED = re.compile(r'(?:[^"\\]+|\\.)*("?)', re.DOTALL)
# ASGI scope key of a body that was read already, for the next reader of the same request.
BODY = "localllm.body"
# Set where a request's body was a large one.
_LARGE: ContextVar[bool] = ContextVar("large body", default=False)
Made = TypeVar("Made")
# A decoded body, and the JSON object in it.
JsonBody: TypeAlias = tuple[bytes, dict[str, Any]]
_SURROGATE = re.compile("[\ud800-\udfff]")


def unpack(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """`body` decoded; at most `limit_bytes` and a piece are ever held.

    Raises EncodingError for an unsupported Content-Encoding, BodyTooLargeError, and RequestError
    for broken data."""
    wbits = _window_bits(body, encoding)
    if wbits is None:
        return body
    unpacked = bytearray()
    packed = memoryview(body)
    for _ in range(_MOST_MEMBERS):
        try:
            packed = _unpack_member(packed, wbits, unpacked, limit_bytes)
        except zlib.error:
            raise RequestError(
                f"the body is not what its Content-Encoding says ({encoding})"
            ) from None
        except EOFError:
            raise RequestError(
                f"the body ends before what is packed in it does ({encoding})"
            ) from None
        if not packed:
            return bytes(unpacked)
        if not body.startswith(_GZIP_MAGIC):
            raise RequestError(f"something stands behind the packed body ({encoding})")
    raise BodyTooLargeError(f"the body has more than {_MOST_MEMBERS:,} gzip members")


def _unpack_member(
    packed: memoryview, wbits: int, unpacked: bytearray, limit_bytes: int
) -> memoryview:
    """Append the first member of `packed` to `unpacked`; returns the data behind the member. Raises
    zlib.error, EOFError if the member is incomplete, and BodyTooLargeError."""
    unpacker = zlib.decompressobj(wbits)
    piece = b""
    while not unpacker.eof:
        if not packed and not piece:
            raise EOFError
        given = packed[:_PACKED_PIECE_BYTES]
        piece = unpacker.decompress(given, _PIECE_BYTES)
        left = len(unpacker.unconsumed_tail) + len(unpacker.unused_data)
        packed = packed[len(given) - left :]
        unpacked += piece
        if len(unpacked) > limit_bytes:
            raise BodyTooLargeError(f"the body unpacks to more than {limit_bytes} bytes")
    return packed


def _window_bits(body: bytes, encoding: str) -> int | None:
    """zlib's name for a Content-Encoding; None for a body that is not packed. Raises
    EncodingError."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name in ("gzip", "x-gzip"):
        return _GZIP_OR_ZLIB
    if name == "deflate":
        # Deflate means zlib's format; some clients send it raw (RFC 9110, 8.4.1.2).
        header = int.from_bytes(body[:2], "big")
        is_zlib = len(body) >= 2 and header >> 8 & 0x0F == 8 and header % 31 == 0
        return _GZIP_OR_ZLIB if is_zlib else _RAW
    raise EncodingError(f"the body is packed as {encoding!r}, which this server does not take")


class BadJsonError(RequestError, code="invalid_json"):
    """The body is not JSON, or not a JSON object."""


async def read_json(request: Request, settings: ServerSettings) -> dict[str, Any]:
    """The request's JSON object, decoded, within the limits of size, depth and time. Raises
    RequestError."""
    return (await read_body(request, settings))[1]


async def read_body(request: Request, settings: ServerSettings) -> JsonBody:
    """The same, behind its bytes."""
    known: JsonBody | None = request.scope.get(BODY)
    if known is not None:
        return known
    encoding = request.headers.get("content-encoding", "")
    small = min(_SMALL_BYTES, settings.max_body_bytes)
    with _Held(settings.max_bodies_bytes) as held:
        body = await _received(request, settings, held)
        if len(body) <= small:
            with contextlib.suppress(BodyTooLargeError):
                return _read(body, encoding, small)
        _LARGE.set(True)
        read_large = partial(_read, body, encoding, settings.max_body_bytes)
        return await asyncio.get_running_loop().run_in_executor(_LARGE_BODIES, read_large)


def _read(body: bytes, encoding: str, limit_bytes: int) -> JsonBody:
    raw = unpack(body, encoding, limit_bytes)
    return raw, parse(raw)


async def worked(work: Callable[[], Made], *, takes_ms: bool = False) -> Made:
    """What `work` makes of the body that was read for this request: in a thread where it `takes_ms`
    of any, and in one of those for large bodies where that was one."""
    if _LARGE.get():
        return await asyncio.get_running_loop().run_in_executor(
            _LARGE_BODIES, copy_context().run, work
        )
    if takes_ms:
        return await asyncio.to_thread(work)
    return work()


class _Held:
    """Bytes of one large body while it comes and waits to be read: at most `most_bytes` of all of
    them. Small ones are not counted: whoever sends large ones keeps nobody out. The event loop's alone."""

    all_bytes = 0

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *_: object) -> None:
        _Held.all_bytes -= self._bytes

    def grow(self, size: int) -> None:
        """It has `size` bytes by now. Raises BusyError."""
        if size <= _SMALL_BYTES:
            return
        more = size - self._bytes
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


def _check_counts(text: str) -> None:
    """Raises RequestError where `text` holds too many values. What stands in strings is none: they
    are told apart only where that matters."""
    brackets = text.count("[") + text.count("{")
    if brackets <= _MOST_CONTAINERS and brackets + text.count(",") <= _MOST_VALUES:
        return
    containers = values = strings = 0
    quoted = False
    found = _PLAIN.match(text, 0, _PIECE_CHARS)
    # Where nothing more is found the text ends, or is broken: then parsing it says where.
    while found is not None and found[0]:
        if not quoted:
            opened = found[0].count("[") + found[0].count("{")
            containers += opened
            values += opened + found[0].count(",")
            strings += bool(found[1])
        if containers > _MOST_CONTAINERS:
            raise BadJsonError(f"the body holds more than {_MOST_CONTAINERS:,} lists and objects")
        # An object has two strings for each of its commas.
        if max(values, strings / 2) > _MOST_VALUES:
            raise BodyTooLargeError(f"the body holds more than {_MOST_VALUES:,} values")
        quoted ^= bool(found[1])
        at = found.end()
        pattern = _QUOTED if quoted else _PLAIN
        found = pattern.match(text, at, at + _PIECE_CHARS)


def parse(body: bytes, max_depth: int = 96) -> dict[str, Any]:
    """The JSON object in `body`; raises BadJsonError, and BodyTooLargeError for too many values.
    Lone surrogates (editors cut text in mid-character) become U+FFFD, so that the result can
    be encoded as UTF-8."""
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        _check_counts(text)
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
    if isinstance(value, dict):
        value = value.values()
    for inner in value:
        _check_depth(inner, levels - 1, max_depth)


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        if _SURROGATE.search(value):
            return _SURROGATE.sub("\ufffd", value)
        return value
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(v) for v in value]
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise BadJsonError(f"the body is not JSON: {name} is not a JSON number")
