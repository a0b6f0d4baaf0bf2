"""Headers of GGUF files through ggml's own reader: keys and tensor names, before anything is
loaded."""

from __future__ import annotations

import ctypes
import glob
import re
from pathlib import Path
from typing import Any

from localllm_backends.contract import LoadError
from localllm_backends.llamacpp.native import bindings

_GGUF_UINT32, _GGUF_BOOL, _GGUF_ARRAY = 4, 7, 9  # gguf.h: enum gguf_type
_ARRAYS = {_GGUF_UINT32: ctypes.c_uint32, 5: ctypes.c_int32, _GGUF_BOOL: ctypes.c_bool}


def parts(path: Path) -> list[Path]:
    """All files of a split GGUF, or the one."""
    named = re.fullmatch(r"(.*-)00001(-of-\d{5}\.gguf)", path.name)
    if named is None:
        return [path]
    return sorted(
        path.parent.glob(f"{glob.escape(named[1])}[0-9][0-9][0-9][0-9][0-9]{glob.escape(named[2])}")
    )


class NativeHeader:
    """The header of one GGUF file, through ggml's own reader (gguf.h)."""

    class _Params(ctypes.Structure):
        _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))

    def __init__(self, path: Path) -> None:
        self._library = bindings("_ggml").libggml
        self._file = self._call(
            "gguf_init_from_file", ctypes.c_void_p, str(path).encode(), self._Params(True, None)
        )
        if not self._file:
            raise LoadError(f"the header of {path.name!r} can't be read")

    def _call(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._library, name)
        function.restype = result
        return function(*arguments)

    def _find(self, kind: str, name: str) -> int:
        return int(
            self._call(
                f"gguf_find_{kind}", ctypes.c_int64, ctypes.c_void_p(self._file), name.encode()
            )
        )

    def text(self, key: str) -> str:
        """A text; "" where there is none of that name."""
        at = self._find("key", key)
        if at < 0:
            return ""
        value = self._call(
            "gguf_get_val_str", ctypes.c_char_p, ctypes.c_void_p(self._file), ctypes.c_int64(at)
        )
        return str(value.decode())

    def number(self, key: str) -> int:
        """An unsigned number of 32 bits; 0 where there is none of that name."""
        at = self._find("key", key)
        if at < 0:
            return 0
        arguments = ctypes.c_void_p(self._file), ctypes.c_int64(at)
        if self._call("gguf_get_kv_type", ctypes.c_int, *arguments) != _GGUF_UINT32:
            return 0
        return int(self._call("gguf_get_val_u32", ctypes.c_uint32, *arguments))

    def numbers(self, key: str) -> list[int]:
        """An array of whole numbers of 32 bits or of truth values, or the one number there is; []
        where there is neither."""
        at = self._find("key", key)
        arguments = ctypes.c_void_p(self._file), ctypes.c_int64(at)
        if at < 0 or self._call("gguf_get_kv_type", ctypes.c_int, *arguments) != _GGUF_ARRAY:
            number = self.number(key)
            return [number] if number else []
        kind: Any = _ARRAYS.get(self._call("gguf_get_arr_type", ctypes.c_int, *arguments))
        n = (
            int(self._call("gguf_get_arr_n", ctypes.c_size_t, *arguments))
            if kind is not None
            else 0
        )
        data = self._call("gguf_get_arr_data", ctypes.c_void_p, *arguments) if n else None
        return [int(v) for v in (kind * n).from_address(data)] if kind is not None and data else []

    def flag(self, key: str, *, otherwise: bool) -> bool:
        """A truth value; `otherwise` where there is none of that name."""
        at = self._find("key", key)
        arguments = ctypes.c_void_p(self._file), ctypes.c_int64(at)
        if at < 0 or self._call("gguf_get_kv_type", ctypes.c_int, *arguments) != _GGUF_BOOL:
            return otherwise
        return bool(self._call("gguf_get_val_bool", ctypes.c_bool, *arguments))

    def has_tensor(self, name: str) -> bool:
        return self._find("tensor", name) >= 0

    def close(self) -> None:
        self._call("gguf_free", None, ctypes.c_void_p(self._file))
