"""Exported keys, values and states as bytes: a header that says what they are, then the arrays one after another."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from localllm_backends.contract import BackendFailure

_HEAD = struct.Struct("<4sI")
_MAGIC = b"LMX1"
# NumPy has no bfloat16 and needs none: the bytes travel as unsigned integers of the same size.
_CARRIER = {1: (np.uint8, "uint8"), 2: (np.uint16, "uint16"), 4: (np.uint32, "uint32"), 8: (np.uint64, "uint64")}


@dataclass(frozen=True, slots=True)
class BlobPart:
    """One leaf of a sequence: its arrays, and the absolute position of their first token."""

    position: int
    arrays: list[Any]


@dataclass(frozen=True, slots=True)
class Blob:
    """Tokens [start, stop) of a sequence."""

    start: int
    stop: int
    parts: list[BlobPart]


def pack(identity: str, blob: Blob) -> bytes:
    """The bytes of `blob`; `identity` names the model and how its memory is stored."""
    bodies = [_carried(a) for part in blob.parts for a in part.arrays]
    mx.eval(bodies)
    header = _described(identity, blob)
    return b"".join([_HEAD.pack(_MAGIC, len(header)), header, *(memoryview(b) for b in bodies)])


def packed_bytes(identity: str, blob: Blob) -> int:
    """How many bytes `pack` gives, without computing them."""
    held = sum(int(a.nbytes) for part in blob.parts for a in part.arrays)
    return _HEAD.size + len(_described(identity, blob)) + held


def _described(identity: str, blob: Blob) -> bytes:
    leaves = [[part.position, [[list(a.shape), _name(a)] for a in part.arrays]] for part in blob.parts]
    return json.dumps({"of": identity, "start": blob.start, "stop": blob.stop, "leaves": leaves}).encode()


def unpack(identity: str, data: bytes | memoryview) -> Blob:
    """The blob in `data`; BackendFailure where it is not one of `identity`, whole and of the sizes it says."""
    view = memoryview(data).cast("B")
    header = _header(view)
    if header.get("of") != identity:
        raise BackendFailure("this KV block was written by another model or with another KV type")
    try:
        at = _HEAD.size + int(header["header_bytes"])
        parts = []
        for position, described in header["leaves"]:
            arrays = []
            for shape, name in described:
                array, at = _array(view, at, [int(n) for n in shape], str(name))
                arrays.append(array)
            parts.append(BlobPart(int(position), arrays))
        blob = Blob(int(header["start"]), int(header["stop"]), parts)
    except (KeyError, TypeError, ValueError) as e:
        raise BackendFailure(f"this KV block is damaged: {e}") from e
    if at != len(view):
        raise BackendFailure("this KV block is damaged: it has another length than it says")
    return blob


def _header(view: memoryview) -> dict[str, Any]:
    if len(view) < _HEAD.size:
        raise BackendFailure("this is not an exported KV block: too short")
    magic, size = _HEAD.unpack_from(view, 0)
    if magic != _MAGIC or _HEAD.size + size > len(view):
        raise BackendFailure("this is not an exported KV block")
    try:
        header = json.loads(bytes(view[_HEAD.size : _HEAD.size + size]))
    except ValueError as e:
        raise BackendFailure(f"this KV block is damaged: {e}") from e
    if not isinstance(header, dict):
        raise BackendFailure("this KV block is damaged: its header is no object")
    return {**header, "header_bytes": size}


def _array(view: memoryview, at: int, shape: Sequence[int], name: str) -> tuple[Any, int]:
    dtype = getattr(mx, name, None)
    if not isinstance(dtype, mx.Dtype) or any(n < 0 for n in shape):
        raise ValueError(f"unknown array {name} {list(shape)}")
    carrier, _ = _CARRIER[dtype.size]
    count = math.prod(shape)
    if at + count * dtype.size > len(view):
        raise ValueError("it is cut short")
    body = np.frombuffer(view, dtype=carrier, count=count, offset=at).reshape(shape)
    return mx.array(body).view(dtype), at + count * dtype.size


def _name(array: Any) -> str:
    return str(array.dtype).rpartition(".")[2]


def _carried(array: Any) -> Any:
    return mx.contiguous(array).view(getattr(mx, _CARRIER[array.dtype.size][1]))


def same_arrays(one: Sequence[Any], other: Sequence[Any], *, axis: int | None) -> bool:
    """Equal types and shapes; the length along `axis` may differ."""

    def shape(a: Any) -> tuple[int, ...]:
        return tuple(0 if i == axis else int(n) for i, n in enumerate(a.shape))

    return len(one) == len(other) and all(
        a.dtype == b.dtype and shape(a) == shape(b) for a, b in zip(one, other, strict=True)
    )
