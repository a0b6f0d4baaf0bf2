"""Read importance matrices: GGUF files, and the .dat files of older llama.cpp releases.

An importance matrix has, for each tensor, the mean of the squared inputs of each column over a
text. Files are untrusted: every count is compared with the size of the file before it is used.
"""

from __future__ import annotations

import io
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import LoadError
from localllm_backends.llamacpp.gguf_header import NativeHeader

_LARGEST_BYTES = 4 << 30
_LONGEST_NAME_BYTES = 256
# Names of tensors and keys in llama.cpp's files (common/imatrix-loader.cpp).
_SUMS = ".in_sum2"
_COUNTS = ".counts"

Values = NDArray[np.float32]


@dataclass(slots=True)
class ImportanceMatrix:
    """`values`: for each tensor name, float32 [columns × experts].

    `n_chunks`: chunks of text that it was computed on (0: unknown). `dataset`: name of that text.
    """

    values: dict[str, Values] = field(default_factory=dict)
    n_chunks: int = 0
    dataset: str = ""


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Read the importance matrix in `path`. Raises LoadError for another or a damaged file."""
    try:
        if path.exists() and not path.is_file():
            raise LoadError(f"{path.name!r} is not a file")
        if path.stat().st_size > _LARGEST_BYTES:
            raise LoadError(f"{path.name!r} is too large for an importance matrix")
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        if is_gguf:
            matrix = _read_gguf(path)
        else:
            matrix = _read_older(path)
    except OSError as e:
        raise LoadError(f"{path.name!r} can't be read: {e.strerror or e}") from e
    if not matrix.values:
        raise LoadError(f"{path.name!r} is not an importance matrix")
    for name, values in matrix.values.items():
        if not np.isfinite(values).all():
            raise LoadError(f"{path.name!r} holds numbers that are not finite (for {name})")
    return matrix


def _read_gguf(path: Path) -> ImportanceMatrix:
    header = NativeHeader(path)
    places = header.float_tensors()
    datasets = header.texts("imatrix.datasets")
    matrix = ImportanceMatrix(n_chunks=header.number("imatrix.chunk_count"))
    if datasets:
        matrix.dataset = datasets[0]
    for name in places:
        tensor = name.removesuffix(_SUMS)
        if tensor == name or tensor + _COUNTS not in places:
            continue
        sums = _floats(path, *places[name])
        counts = np.rint(_floats(path, *places[tensor + _COUNTS]))
        if not len(counts) or len(sums) % len(counts):
            raise LoadError(f"{path.name!r} is damaged: the counts of {tensor} do not match it")
        # One count for each expert. An expert that was never used has no information: all of its
        # columns count alike, as in llama-quantize.
        rows = sums.reshape(len(counts), -1)
        used = counts > 0
        means = np.ones_like(rows)
        means[used] = rows[used] / counts[used, None]
        matrix.values[tensor] = means.ravel()
    return matrix


def _floats(path: Path, offset: int, n: int) -> Values:
    if offset + 4 * n > path.stat().st_size:
        raise LoadError(f"{path.name!r} is cut short")
    return np.fromfile(path, dtype="<f4", count=n, offset=offset)


def _read_older(path: Path) -> ImportanceMatrix:
    """Read a .dat file: entries with a name, a number of calls and sums of means, then the number
    of chunks and the name of the text."""
    matrix = ImportanceMatrix()
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        n_entries = _number(file)
        # Each entry takes at least 13 bytes.
        if not 0 < n_entries <= size_bytes // 13:
            return matrix
        for _ in range(n_entries):
            name = _text(file)
            n_calls = _number(file)
            n_values = _number(file)
            if not 0 < n_values <= size_bytes // 4:
                raise _damaged(path)
            values = np.fromfile(file, dtype="<f4", count=n_values)
            if len(values) != n_values:
                raise _damaged(path)
            if n_calls > 0:
                values = values / np.float32(n_calls)
            matrix.values[name] = values
        if file.peek(1):
            matrix.n_chunks = max(0, _number(file))
            matrix.dataset = _text(file)
    return matrix


def _number(file: io.BufferedReader) -> int:
    raw = file.read(4)
    if len(raw) < 4:
        return -1
    return int(struct.unpack("<i", raw)[0])


def _text(file: io.BufferedReader) -> str:
    n_bytes = _number(file)
    if not 0 < n_bytes <= _LONGEST_NAME_BYTES:
        return ""
    return os.fsdecode(file.read(n_bytes))


def _damaged(path: Path) -> LoadError:
    return LoadError(f"{path.name!r} is no importance matrix, or is damaged")
