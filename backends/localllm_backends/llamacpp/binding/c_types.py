"""Make ctypes classes and function types from a description (c_headers.py)."""

from __future__ import annotations

import ctypes
from typing import Any, cast

# Basic types whose names in ctypes differ. C leaves the size of an enum to the compiler, and all
# compilers of llama.cpp take an int.
_BASIC: dict[str, Any] = {
    "void": None,
    "text": ctypes.c_char_p,
    "address": ctypes.c_void_p,
    "enum": ctypes.c_int,
    "size_t": ctypes.c_size_t,
    "ptrdiff_t": ctypes.c_ssize_t,
    "intptr_t": ctypes.c_ssize_t,
    "uintptr_t": ctypes.c_size_t,
}


class CTypes:
    """ctypes classes for the `structures` of a description. Each class is made once."""

    def __init__(self, structures: dict[str, list[list[Any]]]) -> None:
        self._fields = structures
        self._classes: dict[str, Any] = {}

    def of(self, kind: Any) -> Any:
        """Return the ctypes type for a described type; None for void."""
        if isinstance(kind, str):
            if kind in _BASIC:
                return _BASIC[kind]
            return getattr(ctypes, f"c_{kind.removesuffix('_t')}")
        name, *rest = kind
        if name == "pointer":
            return ctypes.POINTER(self.of(rest[0]))
        if name == "array":
            return self.of(rest[0]) * rest[1]
        if name == "structure":
            return self.structure(rest[0])
        if name == "union":
            members = [(member, self.of(its_kind)) for member, its_kind in rest[0]]
            return type("union", (ctypes.Union,), {"_fields_": members})
        result, arguments = rest
        return ctypes.CFUNCTYPE(self.of(result), *map(self.of, arguments))

    def structure(self, name: str) -> Any:
        """Return the class of a structure. Raises KeyError if the headers have no such
        structure."""
        structure_class = self._classes.get(name)
        if structure_class is None:
            fields = self._fields[name]
            structure_class = cast(Any, type(name, (ctypes.Structure,), {}))
            # Entered before its fields, because a structure may point to itself.
            self._classes[name] = structure_class
            # The members of an anonymous union are fields of its structure.
            if any(field is None for field, _ in fields):
                structure_class._anonymous_ = ("union",)
            structure_class._fields_ = [(field or "union", self.of(kind)) for field, kind in fields]
        return structure_class

    def padded(self, name: str, padding_bytes: int) -> Any:
        """Return a class of the structure `name` with `padding_bytes` more bytes at its end."""
        padding = [("padding", ctypes.c_uint8 * padding_bytes)]
        return type(f"padded {name}", (self.structure(name),), {"_fields_": padding})
