"""Bodies that were sent packed (Content-Encoding), unpacked to no more than the server reads."""

from __future__ import annotations

import zlib

from localllm.errors import RequestError
from localllm.server.http.errors import BodyTooLargeError, EncodingError

_GZIP, _ZLIB, _RAW = 31, 15, -15
_PIECE_BYTES = 2**18


def unpack(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """`body` as it was before it was packed; at most `limit_bytes` of it are ever held.

    Raises EncodingError for a way of packing that is not taken, BodyTooLargeError and RequestError."""
    match encoding.strip().lower():
        case "" | "identity":
            return body
        case "gzip" | "x-gzip":
            wbits = _GZIP
        case "deflate":
            # The standard means zlib's format; some programs send what is inside it (RFC 9110, 8.4.1.2).
            wbits = _ZLIB if _is_zlib(body) else _RAW
        case _:
            raise EncodingError(f"the body is packed as {encoding!r}, which this server does not take")
    pieces: list[bytes] = []
    size = 0
    rest = body
    while True:
        unpacker = zlib.decompressobj(wbits)
        try:
            while not unpacker.eof and (rest or size == 0):
                piece = unpacker.decompress(rest, min(_PIECE_BYTES, limit_bytes - size + 1))
                size += len(piece)
                if size > limit_bytes:
                    raise BodyTooLargeError(f"the body unpacks to more than {limit_bytes} bytes")
                pieces.append(piece)
                if not piece and not unpacker.unconsumed_tail:
                    break
                rest = unpacker.unconsumed_tail
        except zlib.error:
            raise RequestError(f"the body is not what its Content-Encoding says ({encoding})") from None
        if not unpacker.eof:
            raise RequestError(f"the body ends before what is packed in it does ({encoding})")
        rest = unpacker.unused_data
        if not rest:
            return b"".join(pieces)
        if wbits != _GZIP:
            raise RequestError(f"something stands behind the packed body ({encoding})")


def _is_zlib(body: bytes) -> bool:
    return len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
