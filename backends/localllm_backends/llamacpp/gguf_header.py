"""Read headers of GGUF files with ggml's own reader: keys and tensor names, before anything is
loaded."""

from __future__ import annotations

import ctypes
import glob
import re
import weakref
from pathlib import Path
from typing import Any

from localllm_backends.contract import LoadError
from localllm_backends.llamacpp.native import bindings

# Types of values that are read as numbers (gguf.h: enum gguf_type).
_NUMBERS: dict[str, Any] = {
    "UINT32": ctypes.c_uint32,
    "INT32": ctypes.c_int32,
    "BOOL": ctypes.c_bool,
}


def parts(path: Path) -> list[Path]:
    """Return all files of a split GGUF, or the single file."""
    named = re.fullmatch(r"(.*-)00001(-of-\d{5}\.gguf)", path.name)
    if named is None:
        return [path]
    number = "[0-9]" * 5
    pattern = glob.escape(named[1]) + number + glob.escape(named[2])
    return sorted(path.parent.glob(pattern))


class NativeHeader:
    """The header of one GGUF file, read by ggml (gguf.h). It is freed with this object."""

    def __init__(self, path: Path) -> None:
        parameters = bindings().gguf_init_params(True, None)
        self._file = bindings().gguf_init_from_file(str(path).encode(), parameters)
        if not self._file:
            raise LoadError(f"the header of {path.name!r} can't be read")
        weakref.finalize(self, bindings().gguf_free, self._file)

    def _get(self, kind: str, key: int) -> Any:
        return getattr(bindings(), f"gguf_get_{kind}")(self._file, key)

    def text(self, key: str) -> str:
        """Return a string value; "" if the key does not exist."""
        at = bindings().gguf_find_key(self._file, key.encode())
        if at < 0 or self._get("kv_type", at) != bindings().GGUF_TYPE_STRING:
            return ""
        return str(self._get("val_str", at).decode("utf-8", "replace"))

    def numbers(self, key: str) -> list[int]:
        """Return a 32-bit integer or boolean value as a list, or the elements of such an array.

        Returns [] if the key does not exist.
        """
        at = bindings().gguf_find_key(self._file, key.encode())
        if at < 0:
            return []
        kind = self._get("kv_type", at)
        n = 1
        what = "val_data"
        if kind == bindings().GGUF_TYPE_ARRAY:
            kind = self._get("arr_type", at)
            n = self._get("arr_n", at)
            what = "arr_data"
        for name, number in _NUMBERS.items():
            if kind == getattr(bindings(), f"GGUF_TYPE_{name}") and n:
                values = (number * n).from_address(self._get(what, at))
                return [int(value) for value in values]
        return []

    def number(self, key: str, otherwise: int = 0) -> int:
        """Return the first of `numbers`, or `otherwise` if there are no numbers."""
        return next(iter(self.numbers(key)), otherwise)

    def texts(self, key: str) -> list[str]:
        """Return the elements of an array of strings; [] if there is no such key."""
        at = bindings().gguf_find_key(self._file, key.encode())
        if at < 0 or self._get("kv_type", at) != bindings().GGUF_TYPE_ARRAY:
            return []
        if self._get("arr_type", at) != bindings().GGUF_TYPE_STRING:
            return []
        n = self._get("arr_n", at)
        found = (bindings().gguf_get_arr_str(self._file, at, i) for i in range(n))
        return [text.decode("utf-8", "replace") for text in found]

    def float_tensors(self) -> dict[str, tuple[int, int]]:
        """Return the place of each F32 tensor: (offset in the file in bytes, number of values)."""
        llama = bindings()
        start = llama.gguf_get_data_offset(self._file)
        found = {}
        for i in range(llama.gguf_get_n_tensors(self._file)):
            if llama.gguf_get_tensor_type(self._file, i) == llama.GGML_TYPE_F32:
                name = llama.gguf_get_tensor_name(self._file, i).decode("utf-8", "replace")
                at = start + llama.gguf_get_tensor_offset(self._file, i)
                found[name] = (at, llama.gguf_get_tensor_size(self._file, i) // 4)
        return found

    @property
    def end_bytes(self) -> int:
        """The end of the last tensor in the file. A shorter file is incomplete."""
        llama = bindings()
        start = llama.gguf_get_data_offset(self._file)
        ends = (
            llama.gguf_get_tensor_offset(self._file, i) + llama.gguf_get_tensor_size(self._file, i)
            for i in range(llama.gguf_get_n_tensors(self._file))
        )
        return int(start + max(ends, default=0))

    def has_tensor(self, name: str) -> bool:
        return bool(bindings().gguf_find_tensor(self._file, name.encode()) >= 0)
