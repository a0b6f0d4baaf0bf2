"""The frames of a KV transfer: the response to POST /v1/kv is a series of them.

Each frame has a kind of four letters, its length as 64 bits little-endian, and a body:

    head    JSON: `cached` = tokens of the prompt that the server had in its cache
    kvbl    a block of KV, in the format of a file of the disk cache (cache/kv_file.py)
    stat    the state after the last token but one, in the same format
    done    JSON: empty; all blocks were sent
    fail    JSON: `message`; no more blocks follow
    pads    any bytes, to measure the link

Blocks come in the order of the prompt. Without the frame `done` the response was cut. The server's
process imports this module, so it imports no numpy.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

MEDIA_TYPE = "application/vnd.localllm.kv"
HEAD = b"head"
BLOCK = b"kvbl"
STATE = b"stat"
DONE = b"done"
FAIL = b"fail"
PADS = b"pads"
MAX_PADS_BYTES = 2**20
FRAME = struct.Struct("<4sQ")


def json_frame(kind: bytes, words: Mapping[str, Any]) -> bytes:
    """A frame with JSON."""
    body = json.dumps(words).encode()
    return FRAME.pack(kind, len(body)) + body


def pads_frame(n_bytes: int) -> bytes:
    return FRAME.pack(PADS, n_bytes) + bytes(n_bytes)
