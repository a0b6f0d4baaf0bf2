"""Read a GGUF header as untrusted input: local, split or over HTTP. The weights are never read.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
Each count, length, offset and size is checked against the file's size and the limits below before
memory is allocated for it. CVE-2024-32878, CVE-2025-49847 and CVE-2026-7482 were caused by lengths
that were used before they were checked.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType

from localllm_catalog.byte_sources import ByteSource, FileSource, OpenSource
from localllm_catalog.errors import BadHeaderError, PartialFileError
from localllm_catalog.file_signs import other_kind
from localllm_catalog.names import split_parts
from localllm_catalog.quants import GGUF_TYPE_BY_ID, REMOVED_TYPE_IDS, tensor_bytes

# Real headers have 2-20 MB (a tokenizer of 262,144 tokens with merges), about 60 keys, and up to
# 2,000 tensors.
MAX_HEADER_BYTES = 64 << 20
MAX_KEYS = 20_000
MAX_TENSORS = 65_536
MAX_SPLITS = 1_000
MAX_STRING_BYTES = 4 << 20
MAX_KEPT_STRING_BYTES = 16 << 20
MAX_KEPT_ELEMENTS = 500_000
MAX_STRING_ELEMENTS = 2_000_000
MAX_KEPT_ARRAY = 4_096
_MAX_KEY_BYTES = 1_024
_MAX_NAME_BYTES = 256
_MAX_DIMS = 4
# https://github.com/ikawrakow/ik_llama.cpp ggml/include/ggml.h: its own types have much higher
# numbers than llama.cpp's.
_IK_LLAMA_TYPE_IDS = range(97, 400)

_U64 = struct.Struct("<Q")
_SCALARS: dict[int, struct.Struct] = {
    type_id: struct.Struct("<" + code)
    for type_id, code in enumerate(("B", "b", "H", "h", "I", "i", "f", "B"))
} | {10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d")}
_BOOL = 7
_STRING = 8
_ARRAY = 9

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class SkippedArray:
    """An array that was not kept (such as a vocabulary): only the number of its elements."""

    count: int


Value = Scalar | tuple[Scalar, ...] | SkippedArray


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as listed in the header. `shape` is in GGUF's order (row length first); `type` is
    a name in quants.GGUF_TYPES."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    n_bytes: int

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_expert(self) -> bool:
        """True for weights of routed experts. A token reads only those of its own experts."""
        return "_exps." in self.name


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file with all its splits. Sizes are in bytes, `files` in split order."""

    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_start: int
    alignment: int
    files: tuple[str, ...]
    file_bytes: int

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    @property
    def weights_bytes(self) -> int:
        """Sum of all tensors. The file also holds the tokenizer."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    def text(self, key: str) -> str:
        """Return a string value, or "" if it is missing or of another type."""
        value = self.metadata.get(key)
        if isinstance(value, str):
            return value
        return ""

    def integer(self, key: str, default: int = 0) -> int:
        """Return a whole number, or `default` if it is missing or of another type."""
        value = self.metadata.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        return default


def read(
    source: str | os.PathLike[str],
    open_source: OpenSource | None = None,
    ends: dict[int, int] | None = None,
) -> GgufHeader:
    """Read the header of a .gguf from a path or through `open_source`. Given any split, all splits
    are read.

    `ends`: the positions after long arrays of strings in this one file, by the positions of their
    starts. Those that are found are added. With the ends of an earlier read, a vocabulary need not
    be counted again.

    Raises BadHeaderError for a damaged, malicious or unsupported file (the message names the part).
    Raises SourceError if the file or one of its splits cannot be reached.
    """
    name = os.fspath(source)
    open_file = open_source or FileSource
    first = _read_one(open_file(name), ends)
    count = first.integer("split.count", 1)
    if count <= 1:
        return first
    return _read_splits(name, first, count, open_file)


def check_length(path: str | os.PathLike[str]) -> None:
    """Raise PartialFileError if the tensors of this one file extend past its end.

    Other splits are not opened. Raises like `read` for other faults.
    """
    _read_one(FileSource(os.fspath(path)))


def peek(path: str | os.PathLike[str]) -> tuple[Mapping[str, Value], int]:
    """Return the first keys of a GGUF, up to its tokenizer, and the number of tensors in this one
    file.

    This takes one read and is enough to tell kinds of files apart. Raises like `read`.
    """
    cursor = _Cursor(FileSource(os.fspath(path)))
    _, n_tensors, n_keys = _preamble(cursor)
    metadata: dict[str, Value] = {}
    for _ in range(n_keys):
        key = cursor.name(_MAX_KEY_BYTES, "a metadata key")
        if n_tensors and key.startswith("tokenizer.") and "general.architecture" in metadata:
            break
        metadata[key] = _value(cursor, key)
    return MappingProxyType(metadata), n_tensors


# --- splits ---------------------------------------------------------------------------------------


def split_names(name: str, count: int) -> list[str]:
    """Return all file names of a split model, given any one of them. Raises BadHeaderError if the
    name does not match the count."""
    parts = split_parts(name)
    if (
        not 1 < count <= MAX_SPLITS
        or len(parts) != count
        or ".." in name
        or {"/", "\\"} & set(name)
    ):
        raise BadHeaderError(
            f"the header says {count} splits, but the file name {name!r} does not",
            "keep the names the files were published under (…-00001-of-00003.gguf)",
        )
    return parts


def _read_splits(
    source: str, first_header: GgufHeader, count: int, open_source: OpenSource
) -> GgufHeader:
    own_name = re.split(r"[/\\]", source)[-1]
    names = [source.removesuffix(own_name) + sibling for sibling in split_names(own_name, count)]
    parts = []
    for index, name in enumerate(names):
        part = first_header if name == source else _read_one(open_source(name))
        if part.integer("split.no") != index or part.integer("split.count", 1) != count:
            raise BadHeaderError(f"{name} is not split {index + 1} of {count}", "download it again")
        parts.append(part)
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    stated_count = parts[0].integer("split.tensors.count", len(tensors))
    if len({tensor.name for tensor in tensors}) != len(tensors) or stated_count != len(tensors):
        raise BadHeaderError(
            f"{names[0]}: the splits hold {len(tensors)} tensors, {stated_count} were announced"
        )
    total_bytes = sum(part.file_bytes for part in parts)
    return replace(parts[0], tensors=tensors, files=tuple(names), file_bytes=total_bytes)


# --- one file -------------------------------------------------------------------------------------


def _read_one(source: ByteSource, ends: dict[int, int] | None = None) -> GgufHeader:
    try:
        return _parse(_Cursor(source, ends))
    except BadHeaderError as error:
        hint = error.hint or "download the file again"
        raise type(error)(f"{source.name}: {error.message}", hint) from error


class _Cursor:
    """A position in the header, with a window of it in memory. Each step is checked against the
    file's size."""

    def __init__(self, source: ByteSource, ends: dict[int, int] | None = None) -> None:
        self.source = source
        self._ends = {} if ends is None else ends
        self.limit = min(source.size, MAX_HEADER_BYTES)
        self.position = 0
        self._base = 0
        self._buffer = b""
        self._counted: Counter[str] = Counter()

    def need(self, count: int, subject: str) -> tuple[bytes, int]:
        """Return (buffer, index) with `count` bytes from the current position in memory. The
        position does not move."""
        end = self.position + count
        if end > self.limit:
            raise self.too_long(subject)
        index = self.position - self._base
        if index + count > len(self._buffer):
            size = min(max(count, self.source.chunk), self.limit - self.position)
            self._buffer = self.source.read(self.position, size)
            self._base = self.position
            index = 0
        return self._buffer, index

    def too_long(self, subject: str) -> BadHeaderError:
        if self.limit < self.source.size:
            limit = f"{MAX_HEADER_BYTES >> 20} MiB"
            return BadHeaderError(
                f"{subject} extends past the first {limit}, further than any real header"
            )
        return PartialFileError(
            f"{subject} extends past the end of the file ({self.source.size} bytes)",
            "it may be cut short",
        )

    def fits(self, count: int, each: int, subject: str) -> None:
        """Raise an error if the rest of the header cannot hold `count` items of at least `each`
        bytes."""
        if count * each > self.limit - self.position:
            raise self.too_long(f"{count} {subject}")

    def count(self, count: int, subject: str, maximum: int) -> None:
        """Raise an error if the whole header has more than `maximum` of an item."""
        self._counted[subject] += count
        if self._counted[subject] > maximum:
            raise BadHeaderError(f"the metadata holds more than {maximum:,} {subject}")

    def take(self, count: int, subject: str) -> bytes:
        """Return the next `count` bytes."""
        buffer, index = self.need(count, subject)
        self.position += count
        return buffer[index : index + count]

    def u32(self, subject: str) -> int:
        return int.from_bytes(self.take(4, subject), "little")

    def u64(self, subject: str) -> int:
        return int.from_bytes(self.take(8, subject), "little")

    def raw(self, limit: int, subject: str) -> bytes:
        length = self.u64(subject)
        if length > limit:
            raise BadHeaderError(f"{subject} of {length} bytes is longer than {limit}")
        return self.take(length, subject)

    def name(self, limit: int, subject: str) -> str:
        try:
            text = self.raw(limit, subject).decode("utf-8")
        except UnicodeDecodeError:
            raise BadHeaderError(f"{subject} is not UTF-8") from None
        if not text or not text.isprintable():
            raise BadHeaderError(f"{subject} {text[:40]!r} is empty or has control characters")
        return text

    def string(self, subject: str) -> str:
        length = self.u64(subject)
        self.fits(1, length, subject)
        # for example a complete tokenizer.json: llama.cpp skips it, and so do we
        if length > MAX_STRING_BYTES:
            self.position += length
            return ""
        self.count(length, "bytes of text", MAX_KEPT_STRING_BYTES)
        return self.take(length, subject).decode("utf-8", "replace")

    def skip_strings(self, count: int, subject: str) -> None:
        """Skip `count` strings. The file chooses the length of this loop, so the strings are
        counted."""
        self.count(count, "strings, more than any vocabulary", MAX_STRING_ELEMENTS)
        start_position = self.position
        if start_position in self._ends:
            self.position = self._ends[start_position]
            count = 0
        unpack = _U64.unpack_from
        while count:
            buffer, index = self.need(8, subject)
            start = index
            end = len(buffer) - 8
            for n_left in range(count - 1, -1, -1):
                index += 8 + unpack(buffer, index)[0]
                count = n_left
                if index > end:
                    break
            self.position += index - start
        if self.position > self.limit:
            raise self.too_long(subject)
        self._ends[start_position] = self.position


def _parse(cursor: _Cursor) -> GgufHeader:
    version, n_tensors, n_keys = _preamble(cursor)
    metadata: dict[str, Value] = {}
    for _ in range(n_keys):
        key = cursor.name(_MAX_KEY_BYTES, "a metadata key")
        if key in metadata:
            raise BadHeaderError(f"the metadata key {key!r} occurs twice")
        metadata[key] = _value(cursor, key)
    alignment = metadata.get("general.alignment", 32)
    if (
        not isinstance(alignment, int)
        or not 8 <= alignment <= 1 << 20
        or alignment & (alignment - 1)
    ):
        raise BadHeaderError(f"an alignment of {alignment!r} is not a power of two from 8 to 1 MiB")
    tensors = [_tensor(cursor, alignment) for _ in range(n_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    _check_data(tensors, data_start, cursor.source.size)
    return GgufHeader(
        version=version,
        metadata=MappingProxyType(metadata),
        tensors=tuple(tensors),
        data_start=data_start,
        alignment=alignment,
        files=(cursor.source.name,),
        file_bytes=cursor.source.size,
    )


def _preamble(cursor: _Cursor) -> tuple[int, int, int]:
    magic = cursor.take(8, "the magic number")
    if magic[:4] != b"GGUF":
        hint = "give a .gguf file; convert other formats, or use MLX files"
        raise other_kind(magic, "GGUF", hint)
    cursor.position -= 4
    version = cursor.u32("the version")
    if version not in (2, 3):
        if version and not version & 0xFFFF:
            raise BadHeaderError("this GGUF file is big-endian", "download the little-endian file")
        raise BadHeaderError(
            f"GGUF version {version} is not supported (only 2 and 3)",
            "download a newer or requantised file",
        )
    n_tensors = cursor.u64("the tensor count")
    n_keys = cursor.u64("the key count")
    if n_tensors > MAX_TENSORS or n_keys > MAX_KEYS:
        raise BadHeaderError(f"{n_tensors} tensors and {n_keys} keys are more than any model has")
    cursor.fits(n_keys, 13, "keys")
    cursor.fits(n_tensors, 25, "tensors")
    return version, n_tensors, n_keys


def _value(cursor: _Cursor, key: str) -> Value:
    type_id = cursor.u32(key)
    if type_id == _STRING:
        return cursor.string(key)
    if type_id == _ARRAY:
        return _array(cursor, key)
    return _numbers(cursor, key, type_id, 1)[0]


def _array(cursor: _Cursor, key: str) -> Value:
    type_id = cursor.u32(key)
    count = cursor.u64(key)
    if type_id == _ARRAY:
        raise BadHeaderError(f"{key} is an array of arrays, which GGUF readers reject")
    if type_id == _STRING:
        cursor.fits(count, 8, f"strings of {key}")
        if count > MAX_KEPT_ARRAY:
            cursor.skip_strings(count, key)
            return SkippedArray(count)
        cursor.count(count, "elements of short arrays", MAX_KEPT_ELEMENTS)
        return tuple(cursor.string(key) for _ in range(count))
    size = _scalar(key, type_id).size
    cursor.fits(count, size, f"elements of {key}")
    if count > MAX_KEPT_ARRAY:
        cursor.position += count * size
        return SkippedArray(count)
    cursor.count(count, "elements of short arrays", MAX_KEPT_ELEMENTS)
    return _numbers(cursor, key, type_id, count)


def _scalar(key: str, type_id: int) -> struct.Struct:
    scalar_type = _SCALARS.get(type_id)
    if scalar_type is None:
        raise BadHeaderError(f"{key} has the unknown type {type_id}")
    return scalar_type


def _numbers(cursor: _Cursor, key: str, type_id: int, count: int) -> tuple[Scalar, ...]:
    scalar_type = _scalar(key, type_id)
    values = struct.unpack(
        f"<{count}{scalar_type.format[-1]}", cursor.take(scalar_type.size * count, key)
    )
    if type_id == _BOOL:
        if any(value > 1 for value in values):
            raise BadHeaderError(f"{key} is a boolean other than 0 and 1")
        return tuple(bool(value) for value in values)
    return values


def _tensor(cursor: _Cursor, alignment: int) -> TensorInfo:
    name = cursor.name(_MAX_NAME_BYTES, "a tensor name")
    n_dims = cursor.u32(name)
    if not 1 <= n_dims <= _MAX_DIMS:
        raise BadHeaderError(f"{name} has {n_dims} dimensions")
    shape = tuple(cursor.u64(name) for _ in range(n_dims))
    type_id = cursor.u32(name)
    offset = cursor.u64(name)
    tensor_type = GGUF_TYPE_BY_ID.get(type_id)
    if tensor_type is None:
        raise _unknown_type(name, type_id)
    n_elements = math.prod(shape)
    if not n_elements or n_elements >= 1 << 63:
        raise BadHeaderError(f"{name} has the impossible shape {shape}")
    if shape[0] % tensor_type.block:
        raise BadHeaderError(
            f"rows of {shape[0]} in {name} are not a multiple "
            f"of {tensor_type.name}'s block size {tensor_type.block}"
        )
    if offset % alignment:
        raise BadHeaderError(
            f"{name} starts at {offset}, not a multiple of the alignment {alignment}"
        )
    return TensorInfo(
        name, shape, tensor_type.name, offset, tensor_bytes(tensor_type.name, n_elements)
    )


def _unknown_type(name: str, type_id: int) -> BadHeaderError:
    if type_id in REMOVED_TYPE_IDS:
        return BadHeaderError(
            f"{name} is in a format that llama.cpp removed (type {type_id})",
            "download a newer file",
        )
    if type_id in _IK_LLAMA_TYPE_IDS:
        return BadHeaderError(
            f"{name} is in a format of ik_llama.cpp's (type {type_id})",
            "run it with that program, or use another quant",
        )
    return BadHeaderError(
        f"{name} has the unknown tensor type {type_id}", "a newer localllm may know it"
    )


def _check_data(tensors: list[TensorInfo], data_start: int, file_bytes: int) -> None:
    names: set[str] = set()
    end_offset = 0
    for tensor in sorted(tensors, key=attrgetter("offset")):
        if tensor.name in names:
            raise BadHeaderError(f"the tensor {tensor.name} occurs twice")
        names.add(tensor.name)
        if tensor.offset < end_offset:
            raise BadHeaderError(f"{tensor.name} overlaps the tensor before it")
        end_offset = tensor.offset + tensor.n_bytes
        if data_start + end_offset > file_bytes:
            raise PartialFileError(
                f"{tensor.name} ends at byte {data_start + end_offset} of a file of {file_bytes}",
                "it may be cut short",
            )
