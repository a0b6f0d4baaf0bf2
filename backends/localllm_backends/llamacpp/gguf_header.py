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
from localllm_backends.llamacpp.native import GgufInitParams, ggml_function

# gguf.h: enum gguf_type
_STRING = 8
_ARRAY = 9
_NUMBERS: dict[int, Any] = {4: ctypes.c_uint32, 5: ctypes.c_int32, 7: ctypes.c_bool}


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
        parameters = GgufInitParams(True, None)
        self._file = ggml_function("gguf_init_from_file")(str(path).encode(), parameters)
        if not self._file:
            raise LoadError(f"the header of {path.name!r} can't be read")
        weakref.finalize(self, ggml_function("gguf_free"), self._file)

    def _get(self, what: str, key: int) -> Any:
        return ggml_function(f"gguf_get_{what}")(self._file, key)

    def text(self, key: str) -> str:
        """Return a string value; "" if the key does not exist."""
        at = ggml_function("gguf_find_key")(self._file, key.encode())
        if at < 0 or self._get("kv_type", at) != _STRING:
            return ""
        return str(self._get("val_str", at).decode("utf-8", "replace"))

    def numbers(self, key: str) -> list[int]:
        """Return a 32-bit integer or boolean value as a list, or the elements of such an array.

        Returns [] if the key does not exist.
        """
        at = ggml_function("gguf_find_key")(self._file, key.encode())
        if at < 0:
            return []
        kind = self._get("kv_type", at)
        n = 1
        what = "val_data"
        if kind == _ARRAY:
            kind = self._get("arr_type", at)
            n = self._get("arr_n", at)
            what = "arr_data"
        if kind not in _NUMBERS or not n:
            return []
        values = (_NUMBERS[kind] * n).from_address(self._get(what, at))
        return [int(value) for value in values]

    def number(self, key: str, otherwise: int = 0) -> int:
        """Return the first of `numbers`, or `otherwise` if there are no numbers."""
        return next(iter(self.numbers(key)), otherwise)

    def has_tensor(self, name: str) -> bool:
        return bool(ggml_function("gguf_find_tensor")(self._file, name.encode()) >= 0)
