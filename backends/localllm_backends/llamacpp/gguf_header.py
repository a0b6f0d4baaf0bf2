"""Headers of GGUF files through ggml's own reader: keys and tensor names, before anything is
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

_STRING, _ARRAY = 8, 9  # gguf.h: enum gguf_type
_NUMBERS: dict[int, Any] = {4: ctypes.c_uint32, 5: ctypes.c_int32, 7: ctypes.c_bool}


def parts(path: Path) -> list[Path]:
    """All files of a split GGUF, or the one."""
    named = re.fullmatch(r"(.*-)00001(-of-\d{5}\.gguf)", path.name)
    if named is None:
        return [path]
    return sorted(
        path.parent.glob(f"{glob.escape(named[1])}[0-9][0-9][0-9][0-9][0-9]{glob.escape(named[2])}")
    )


class NativeHeader:
    """The header of one GGUF file, through ggml's own reader (gguf.h), as long as this lives."""

    class _Params(ctypes.Structure):
        _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))

    def __init__(self, path: Path) -> None:
        self._library = bindings("_ggml").libggml
        self._library.gguf_init_from_file.restype = ctypes.c_void_p
        found = self._library.gguf_init_from_file(str(path).encode(), self._Params(True, None))
        if not found:
            raise LoadError(f"the header of {path.name!r} can't be read")
        self._file = ctypes.c_void_p(found)
        weakref.finalize(self, self._library.gguf_free, self._file)

    def _find(self, kind: str, name: str) -> int:
        """The number of a "key" or "tensor"; negative where there is none of that name."""
        function = getattr(self._library, f"gguf_find_{kind}")
        function.restype = ctypes.c_int64
        return int(function(self._file, name.encode()))

    def _get(self, what: str, result: Any, key: int) -> Any:
        function = getattr(self._library, f"gguf_get_{what}")
        function.restype = result
        return function(self._file, ctypes.c_int64(key))

    def text(self, key: str) -> str:
        """A text; "" where there is none of that name."""
        at = self._find("key", key)
        if at < 0 or self._get("kv_type", ctypes.c_int, at) != _STRING:
            return ""
        return str(self._get("val_str", ctypes.c_char_p, at).decode("utf-8", "replace"))

    def numbers(self, key: str) -> list[int]:
        """The whole numbers of 32 bits, or truth values, of an array or by themselves; [] where
        there are none of that name."""
        at = self._find("key", key)
        if at < 0:
            return []
        kind, n, data = self._get("kv_type", ctypes.c_int, at), 1, "val_data"
        if kind == _ARRAY:
            kind, n, data = (
                self._get("arr_type", ctypes.c_int, at),
                self._get("arr_n", ctypes.c_size_t, at),
                "arr_data",
            )
        if kind not in _NUMBERS or not n:
            return []
        found = (_NUMBERS[kind] * n).from_address(self._get(data, ctypes.c_void_p, at))
        return [int(value) for value in found]

    def number(self, key: str, otherwise: int = 0) -> int:
        """The first of `numbers`; `otherwise` where there are none."""
        return next(iter(self.numbers(key)), otherwise)

    def has_tensor(self, name: str) -> bool:
        return self._find("tensor", name) >= 0
