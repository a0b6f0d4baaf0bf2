"""JSON bodies: reads them within limits of size, time, nesting and Content-Encoding."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

from pydantic_core import from_json
from starlette.requests import Request

from localllm.errors import BusyError, RequestError
from localllm.json_limits import (
    MAX_DEPTH,
    TooDeepError,
    TooManyContainersError,
    TooManyValuesError,
    check_counts,
    check_depth,
)
from localllm.server.http.errors import BodyTooLargeError, EncodingError, SlowBodyError
from localllm.server.http.settings import ServerSettings
from localllm.server.http.text_memory import text_bytes

_GZIP_OR_ZLIB = 47
_RAW = -15
_GZIP_MAGIC = b"\x1f\x8b"
# A gzip body may have several members (RFC 1952, 2.2). A member can be as short as 20 bytes, and
# zlib copies the input that remains after it. These two limits bound the work for 32 MiB of
# members.
_MAX_MEMBERS = 10_000
_PACKED_PIECE_BYTES = 2**16
# Longer pieces would block the event loop.
_PIECE_BYTES = 2**18
# Larger bodies are read in a thread.
_SMALL_BYTES = 2**17
# Reads large bodies and does the work that depends on them. More than two computing threads would
# delay all other requests.
_LARGE_BODIES: Final = ThreadPoolExecutor(2, thread_name_prefix="large bodies")
# ASGI scope key of a body that has been read, for the next reader of the same request.
BODY = "localllm.body"
# True if the request's body was a large one.
_LARGE: ContextVar[bool] = ContextVar("large body", default=False)
Made = TypeVar("Made")
# The bytes of a decoded body, and its JSON object.
JsonBody: TypeAlias = tuple[bytes, dict[str, Any]]
Received: TypeAlias = bytes | bytearray
_SURROGATE = re.compile("[\ud800-\udfff]")


def unpack(body: Received, encoding: str, limit_bytes: int) -> Received:
    """Return `body` decoded. Holds at most `limit_bytes` plus one piece.

    Raises EncodingError for an unsupported Content-Encoding, BodyTooLargeError, and RequestError
    for invalid data."""
    wbits = _window_bits(body, encoding)
    if wbits is None:
        return body
    unpacked = bytearray()
    packed = memoryview(body)
    for _ in range(_MAX_MEMBERS):
        try:
            packed = _unpack_member(packed, wbits, unpacked, limit_bytes)
        except zlib.error:
            raise RequestError(
                f"the body does not match its Content-Encoding ({encoding})"
            ) from None
        except EOFError:
            raise RequestError(f"the {encoding} body is truncated") from None
        if not packed:
            return unpacked
        if not body.startswith(_GZIP_MAGIC):
            raise RequestError(f"the {encoding} body has more data after its end")
    raise BodyTooLargeError(f"the body has more than {_MAX_MEMBERS:,} gzip members")


def _unpack_member(
    packed: memoryview, wbits: int, unpacked: bytearray, limit_bytes: int
) -> memoryview:
    """Append the first member of `packed` to `unpacked`. Return the data after the member.

    Raises zlib.error, EOFError if the member is incomplete, and BodyTooLargeError."""
    unpacker = zlib.decompressobj(wbits)
    piece = b""
    while not unpacker.eof:
        if not packed and not piece:
            raise EOFError
        packed_piece = packed[:_PACKED_PIECE_BYTES]
        piece = unpacker.decompress(packed_piece, _PIECE_BYTES)
        left = len(unpacker.unconsumed_tail) + len(unpacker.unused_data)
        packed = packed[len(packed_piece) - left :]
        unpacked += piece
        if len(unpacked) > limit_bytes:
            raise BodyTooLargeError(f"the decompressed body has more than {limit_bytes} bytes")
    return packed


def _window_bits(body: Received, encoding: str) -> int | None:
    """Return zlib's window bits for a Content-Encoding, or None if the body is not compressed.
    Raises EncodingError."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name in ("gzip", "x-gzip"):
        return _GZIP_OR_ZLIB
    if name == "deflate":
        # Deflate means zlib's format, but some clients send it without zlib's header (RFC 9110,
        # 8.4.1.2).
        header = int.from_bytes(body[:2], "big")
        is_zlib = len(body) >= 2 and header >> 8 & 0x0F == 8 and header % 31 == 0
        return _GZIP_OR_ZLIB if is_zlib else _RAW
    raise EncodingError(f"this server does not support the Content-Encoding {encoding!r}")


class BadJsonError(RequestError, code="invalid_json"):
    """The body is not JSON, or not a JSON object."""


async def read_json(request: Request, settings: ServerSettings) -> dict[str, Any]:
    """Return the JSON object of the request's body, within the limits of size, depth and time.
    Raises RequestError."""
    known: JsonBody | None = request.scope.get(BODY)
    if known is not None:
        return known[1]
    return await _read(request, settings, parse)


async def read_json_list(request: Request, settings: ServerSettings) -> list[Any]:
    """Return the JSON array of the request's body, which must be small. Raises RequestError."""
    body = await _received(request, settings)
    limit_bytes = min(_SMALL_BYTES, settings.max_body_bytes)
    value = _value(unpack(body, request.headers.get("content-encoding", ""), limit_bytes))
    if not isinstance(value, list):
        raise BadJsonError("the body must be a JSON array")
    return value


async def read_raw(request: Request, settings: ServerSettings) -> bytes:
    """Return the bytes of a body that is no JSON, within the limits of size and time. Raises
    RequestError."""
    body = await _received(request, settings)
    _LARGE.set(len(body) > _SMALL_BYTES)
    return bytes(body)


async def read_body(request: Request, settings: ServerSettings) -> JsonBody:
    """Return the bytes of the request's body and its JSON object, as `read_json` does. Raises
    RequestError."""
    known: JsonBody | None = request.scope.get(BODY)
    if known is not None:
        return known
    return await _read(request, settings, _with_bytes)


async def _read(
    request: Request, settings: ServerSettings, decode: Callable[[Received], Made]
) -> Made:
    """Return the body as `decode` makes it, which runs in a thread for a large body."""
    encoding = request.headers.get("content-encoding", "")
    small = min(_SMALL_BYTES, settings.max_body_bytes)
    body = await _received(request, settings)
    if len(body) <= small:
        with contextlib.suppress(BodyTooLargeError):
            return decode(unpack(body, encoding, small))
    _LARGE.set(True)
    read_large = partial(
        _read_large, body, encoding, settings.max_body_bytes, decode, _BODY_MEMORY.get()
    )
    return await asyncio.get_running_loop().run_in_executor(_LARGE_BODIES, read_large)


def _read_large(
    body: Received,
    encoding: str,
    limit_bytes: int,
    decode: Callable[[Received], Made],
    memory: _BodyMemory,
) -> Made:
    """Return the body as `decode` makes it, if there is memory for its texts. Raises BusyError."""
    unpacked = unpack(body, encoding, limit_bytes)
    memory.grow(max(len(unpacked), text_bytes(unpacked)))
    return decode(unpacked)


def _with_bytes(body: Received) -> JsonBody:
    return bytes(body), parse(body)


async def process_body(work: Callable[[], Made], *, takes_ms: bool = False) -> Made:
    """Return the result of `work`, which processes the body of the current request.

    It runs in a thread if `takes_ms` is set, and in a thread for large bodies if the body was
    large."""
    if _LARGE.get():
        return await asyncio.get_running_loop().run_in_executor(
            _LARGE_BODIES, copy_context().run, work
        )
    if takes_ms:
        return await asyncio.to_thread(work)
    return work()


class _BodyMemory:
    """Counts the bytes of one large body while it arrives, and those of its texts until the model's
    prompt is made from them. All large bodies together may hold `max_bytes`.

    Small bodies are not counted, so large ones cannot block them."""

    all_bytes = 0
    _lock = threading.Lock()

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._ended = False

    def end(self) -> None:
        """Stop counting the body, also if a thread still reads it."""
        with self._lock:
            _BodyMemory.all_bytes -= self._bytes
            self._bytes = 0
            self._ended = True

    def grow(self, size: int) -> None:
        """Record that the body takes `size` bytes now. Raises BusyError."""
        if size <= _SMALL_BYTES:
            return
        with self._lock:
            more = size - self._bytes
            if self._ended or not more:
                return
            if _BodyMemory.all_bytes + more > self._max_bytes:
                raise BusyError(
                    "the large request bodies in progress already hold "
                    f"{_BodyMemory.all_bytes // 2**20} MiB"
                )
            _BodyMemory.all_bytes += more
            self._bytes = size


_BODY_MEMORY: ContextVar[_BodyMemory] = ContextVar("body memory")


@contextlib.contextmanager
def body_memory(settings: ServerSettings) -> Iterator[None]:
    """Context of one request, which counts the memory of its body."""
    memory = _BodyMemory(settings.max_bodies_bytes)
    _BODY_MEMORY.set(memory)
    try:
        yield
    finally:
        memory.end()


def release_body() -> None:
    """Stop counting the body of the current request, because the model has got its prompt."""
    _BODY_MEMORY.get().end()


async def _received(request: Request, settings: ServerSettings) -> bytearray:
    """Return the bytes of the body, which must arrive at the minimum rate. Raises
    BodyTooLargeError, SlowBodyError and BusyError."""
    # Pieces that are joined at the end would be a second copy, made without a pause.
    body = bytearray()
    memory = _BODY_MEMORY.get()
    latest_s = asyncio.get_running_loop().time() + settings.body_timeout_s
    try:
        async with asyncio.timeout_at(latest_s) as limit:
            async for piece in request.stream():
                if len(body) + len(piece) > settings.max_body_bytes:
                    raise BodyTooLargeError(
                        f"the body is larger than {settings.max_body_bytes} bytes"
                    )
                body += piece
                memory.grow(len(body))
                limit.reschedule(latest_s + len(body) / settings.min_body_bytes_s)
    except TimeoutError as e:
        raise SlowBodyError(
            f"{len(body)} bytes of the body arrived within "
            f"{settings.body_timeout_s + len(body) / settings.min_body_bytes_s:.0f} seconds",
            hint=f"send it at {settings.min_body_bytes_s // 1000} kB/s or more",
        ) from e
    return body


def parse(body: Received, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Return the JSON object in `body`. Raises BadJsonError, and BodyTooLargeError for too many
    values."""
    value = _value(body, max_depth)
    if not isinstance(value, dict):
        raise BadJsonError("the body must be a JSON object")
    return value


def _value(body: Received, max_depth: int = MAX_DEPTH) -> Any:
    """Return the JSON value in `body`. Raises the same errors as `parse`.

    Lone surrogates become U+FFFD, so that the result can be encoded as UTF-8. Editors produce them
    when they cut text within a character."""
    try:
        body = _as_utf8(body)
        n_brackets = check_counts(body)
        value = _parsed(body)
    except TooManyContainersError as e:
        raise BadJsonError(f"the body holds {e}") from e
    except TooManyValuesError as e:
        raise BodyTooLargeError(f"the body holds {e}") from e
    except UnicodeDecodeError as e:
        raise BadJsonError(f"the body is not UTF-8 text: byte {e.start} is invalid") from e
    except json.JSONDecodeError as e:
        raise BadJsonError(
            f"the body is not JSON: {e.msg} at line {e.lineno} column {e.colno}"
        ) from e
    except (ValueError, RecursionError) as e:
        raise BadJsonError(
            "the body is not JSON that this server can parse: a number is too long, or "
            "the nesting is too deep"
        ) from e
    if n_brackets > max_depth:
        try:
            check_depth(value, max_depth)
        except TooDeepError as e:
            raise BadJsonError(f"the body {e}") from e
    if _may_have_surrogates(body):
        return _without_surrogates(value)
    return value


def _may_have_surrogates(body: Received) -> bool:
    # A search for one byte takes a tenth of the time of a search for several.
    if b"\\" in body and (b"\\ud" in body or b"\\uD" in body):
        return True
    return not body.isascii() and b"\xed" in body


def _as_utf8(body: Received) -> Received:
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return body
    if encoding == "utf-8-sig":
        return body[len(BOM_UTF8) :]
    return body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")


def _parsed(body: Received) -> Any:
    """Return the JSON value in `body`, which is UTF-8. Raises ValueError and RecursionError."""
    # This parser reads bytes. `json` needs the whole body as one text, which takes four bytes a
    # character if one of them is an emoji.
    with contextlib.suppress(ValueError):
        return from_json(body, allow_inf_nan=False, cache_strings="keys")
    # `json` reads lone surrogates, too, and its errors have the position in characters.
    return json.loads(body.decode("utf-8", "surrogatepass"), parse_constant=_refuse_constant)


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
