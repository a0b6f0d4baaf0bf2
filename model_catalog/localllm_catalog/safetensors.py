"""Check the length of a safetensors file by its header. The weights are never read.

Layout: https://github.com/huggingface/safetensors#format (the header's length, the header as JSON,
the tensors one after another).
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any

from localllm_catalog.byte_sources import FileSource
from localllm_catalog.errors import BadHeaderError, PartialFileError
from localllm_catalog.file_signs import other_kind

# The format's own limit. Real headers have up to 10 MB.
_MAX_HEADER_BYTES = 100_000_000
_LENGTH = struct.Struct("<Q")
_CUT_HINT = "it may be cut short"


def check_length(path: str | os.PathLike[str]) -> None:
    """Raise PartialFileError if the file ends before its last tensor, or is no safetensors file.

    Raises BadHeaderError for a header of another form, SourceError if the file can't be read.
    """
    source = FileSource(os.fspath(path))
    start = source.read(0, min(_LENGTH.size + 1, source.size))
    if len(start) <= _LENGTH.size:
        raise PartialFileError(
            f"the header extends past the end of a file of {source.size}", _CUT_HINT
        )
    (n_bytes,) = _LENGTH.unpack(start[: _LENGTH.size])
    if n_bytes > _MAX_HEADER_BYTES or start[-1:] != b"{":
        raise other_kind(start, "safetensors", "download the file again")
    data_start = _LENGTH.size + n_bytes
    if data_start > source.size:
        raise PartialFileError(
            f"the header ends at byte {data_start} of a file of {source.size}", _CUT_HINT
        )
    end, name = max(_tensor_ends(source.read(_LENGTH.size, n_bytes)), default=(0, ""))
    if data_start + end > source.size:
        raise PartialFileError(
            f"{name} ends at byte {data_start + end} of a file of {source.size}", _CUT_HINT
        )


def _tensor_ends(header: bytes) -> list[tuple[int, str]]:
    """Return where each tensor ends, counted from the end of the header, and its name."""
    try:
        tensors: dict[str, Any] = json.loads(header)
        tensors.pop("__metadata__", None)
        return [(int(tensor["data_offsets"][1]), name) for name, tensor in tensors.items()]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as e:
        raise BadHeaderError("the header is not of the format of safetensors files") from e
