"""One file of the disk tier: what it says of its block, the block's bytes, and a checksum over all of it.

    magic | lengths | header (JSON) | the line's tokens, int32 | the exported KV | SHA-256 of everything before

The whole line's tokens are in each file, not only the block's own: a block is of use only behind exactly those tokens,
and a restarted engine enters it into its tree although the files before it may be gone.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from localllm.engine.cache_budget import Tokens
from localllm.engine.prefix_cache import as_tokens

_MAGIC = b"localllm-kv-3\n"
_LENGTHS = struct.Struct("<IQQ")
# SHA-256: every processor that this is for computes it in hardware, twice as fast as BLAKE2b.
_DIGEST_BYTES = 32
_MAX_HEADER_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Entry:
    """What a file holds: KV of the last tokens of the line `tokens`, from `start` on, in `n_data` bytes, or the `state` behind
    the line."""

    tokens: Tokens
    start: int
    n_data: int
    stamp_ns: int
    state: bool

    @property
    def stop(self) -> int:
        """Where the block ends: at the line's end."""
        return len(self.tokens)


def name(identity: str, tokens: Tokens, start: int, *, state: bool = False) -> str:
    """The name of the block's file, without its suffix."""
    digest = hashlib.blake2b(identity.encode(), digest_size=20, person=b"state" if state else b"")
    digest.update(struct.pack("<I", start))
    digest.update(tokens.tobytes())
    return digest.hexdigest()


def pieces(
    identity: str, tokens: Tokens, start: int, data: bytes | memoryview, *, state: bool = False
) -> list[bytes | memoryview]:
    """The file's content, in order."""
    header = json.dumps({"identity": identity, "start": start, "stop": len(tokens), "state": state}).encode()
    line = tokens.tobytes()
    content = [_MAGIC, _LENGTHS.pack(len(header), len(line), len(data)), header, line, data]
    digest = hashlib.sha256()
    for piece in content:
        digest.update(piece)
    return [*content, digest.digest()]


def read_index(path: Path, identity: str) -> Entry | None:
    """What the file says it holds, its data not read; None for anything that is not a file of ours under that name."""
    try:
        stat = path.stat()
        with path.open("rb") as f:
            fixed = f.read(len(_MAGIC) + _LENGTHS.size)
            if not fixed.startswith(_MAGIC) or len(fixed) < len(_MAGIC) + _LENGTHS.size:
                return None
            n_header, n_line, n_data = _LENGTHS.unpack_from(fixed, len(_MAGIC))
            if len(fixed) + n_header + n_line + n_data + _DIGEST_BYTES != stat.st_size or n_header > _MAX_HEADER_BYTES:
                return None
            header = json.loads(f.read(n_header))
            tokens = as_tokens(np.frombuffer(f.read(n_line), dtype=np.int32))
    except (OSError, ValueError):
        return None
    if not isinstance(header, dict) or header.get("identity") != identity:
        return None
    # A flipped bit leaves valid JSON often enough: any key may be missing, any value of another type.
    start, stop = header.get("start"), header.get("stop")
    if not isinstance(start, int) or stop != len(tokens) or not 0 <= start < len(tokens):
        return None
    state = header.get("state", False)
    if not isinstance(state, bool) or path.stem != name(identity, tokens, start, state=state):
        return None
    return Entry(tokens, start, n_data, stat.st_mtime_ns, state)


def checked(raw: bytes, identity: str) -> memoryview | None:
    """The exported KV in a whole file's bytes; None where the checksum or the identity is not right."""
    whole = memoryview(raw)
    body, digest = whole[:-_DIGEST_BYTES], whole[-_DIGEST_BYTES:]
    fixed = len(_MAGIC) + _LENGTHS.size
    if len(body) < fixed or body[: len(_MAGIC)] != _MAGIC:
        return None
    n_header, n_line, n_data = _LENGTHS.unpack_from(body, len(_MAGIC))
    if fixed + n_header + n_line + n_data != len(body) or hashlib.sha256(body).digest() != digest:
        return None
    try:
        header = json.loads(bytes(body[fixed : fixed + n_header]))
    except ValueError:
        return None
    if not isinstance(header, dict) or header.get("identity") != identity:
        return None
    return body[fixed + n_header + n_line :]
