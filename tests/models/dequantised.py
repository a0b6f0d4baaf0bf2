"""A real GGUF with every weight dequantised to a 32-bit number: the reference for exact
arithmetic."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from models.first_layers import Header

_ALIGNMENT = 32


def write_dequantised(source: Path, target: Path) -> Path:
    """Write `source` with F32 weights to `target` (four bytes a weight). Its metadata stay the
    same, byte for byte."""
    data = np.memmap(source, mode="r")
    header = Header(memoryview(data))  # type: ignore[arg-type]
    header.at = 8
    n_tensors, n_fields = header.number("Q"), header.number("Q")
    for _ in range(n_fields):
        assert header.string() != b"general.alignment", "only the usual alignment is written"
        header.skip(header.number("I"))
    head, tensors, end = bytes(data[: header.at]), [], 0
    for _ in range(n_tensors):
        name = header.string()
        shape = [header.number("Q") for _ in range(header.number("I"))]
        kind, begin = GGMLQuantizationType(header.number("I")), header.number("Q")
        head += struct.pack(f"<Q{len(name)}sI{len(shape)}Q", len(name), name, len(shape), *shape)
        head += struct.pack("<IQ", GGMLQuantizationType.F32, end)
        end += _aligned(4 * int(np.prod(shape)))
        tensors.append((shape, kind, begin))
    first = _aligned(header.at)
    with target.open("wb") as file:
        file.write(head.ljust(_aligned(len(head)), b"\0"))
        for shape, kind, begin in tensors:
            weights, block_bytes = GGML_QUANT_SIZES[kind]
            n_bytes = int(np.prod(shape)) // weights * block_bytes
            body = dequantize(
                data[first + begin :][:n_bytes].reshape(-1, shape[0] // weights * block_bytes), kind
            )
            values = np.ascontiguousarray(body, dtype="<f4").tobytes()
            file.write(values.ljust(_aligned(len(values)), b"\0"))
    return target


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
