"""Check that a library's structures have the layout that its headers declare, before it is used.

llama.cpp fills structures with its defaults. With another layout, values appear in the wrong
fields: flags that are neither 0 nor 1, pointers that are not null, sizes of 0.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from typing import Any

from localllm_backends.contract import UnusableEngineError
from localllm_backends.llamacpp.binding.library import Library

# Functions that return a structure with defaults, and the structure.
_DEFAULTS = {
    "llama_model_default_params": "llama_model_params",
    "llama_context_default_params": "llama_context_params",
}
_MTMD_DEFAULTS = {"mtmd_context_params_default": "mtmd_context_params"}
# A library writes its whole structure, even if it is larger than the headers' one.
_PADDING_BYTES = 1024
_X86 = ("x86_64", "AMD64")
# The defaults of sizes are in this range, in every release so far with a wide margin.
_SIZES = ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch", "main_gpu")
_NEVER_0 = ("n_batch", "n_ubatch", "n_seq_max")
_LARGEST_SIZE = 2**20
_LARGEST_ENUM = 2**10
_SMALLEST_FLOAT = 1e-9
_LARGEST_FLOAT = 1e9


def check_layout(library: Library, *, images: bool = False) -> None:
    """Raise UnusableEngineError if the defaults show another layout than the headers declare.

    `images`: check the structure of the library for images.
    """
    for function, structure in (_MTMD_DEFAULTS if images else _DEFAULTS).items():
        wrong = _wrong_default(library, function, structure)
        if wrong:
            raise UnusableEngineError(
                f"{library.file} ({library.version()}) does not match its headers: "
                f"{function} returns {wrong}, as {library.headers[0]} declares it",
                f"put the headers of the same release into {library.folder / 'include'}, "
                "or unset LLAMA_CPP_LIB_PATH",
            )


def _wrong_default(library: Library, function: str, structure: str) -> str:
    """Return the first default that no release has, with its field; "" if all are right."""
    found = _defaults(library, function, structure)
    image = bytes(found)
    for name, kind, at in _fields(library, structure):
        wrong = _wrong_value(
            name, kind, getattr(found, name), image[at.offset : at.offset + at.size]
        )
        if wrong:
            return f"{name} = {wrong}"
    if platform.machine() in _X86 and any(image[-_PADDING_BYTES:]):
        return "more fields"
    return ""


def _defaults(library: Library, function: str, structure: str) -> Any:
    """Return the structure with padding at its end, as the library fills it.

    A structure of this size is returned through memory of the caller. On x86-64 its address is the
    first argument, so that memory of zeros can be given. Elsewhere the padding has no meaning.
    """
    padded = library.padded(structure, _PADDING_BYTES)
    if platform.machine() not in _X86:
        return library.retyped(function, padded)()
    found = padded()
    library.retyped(function, None, ctypes.c_void_p)(ctypes.addressof(found))
    return found


def _fields(library: Library, structure: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, described type and place of each field."""
    structure_class = getattr(library, structure)
    for name, kind in library.kinds_of(structure):
        yield name, kind, getattr(structure_class, name)


def _wrong_value(name: str, kind: Any, value: Any, raw: bytes) -> str:
    """Return the value if no release has it as a default, else ""."""
    shown = str(value)
    right = True
    if kind == "bool":
        shown = str(raw[0])
        right = raw[0] in (0, 1)
    elif kind == "enum":
        right = -1 <= value <= _LARGEST_ENUM
    elif kind in ("float", "double"):
        right = value == 0 or _SMALLEST_FLOAT < abs(value) < _LARGEST_FLOAT
    elif name in _SIZES:
        right = -1 <= value <= _LARGEST_SIZE and (value != 0 or name not in _NEVER_0)
    elif _is_pointer(kind):
        shown = "a pointer"
        right = not any(raw)
    return "" if right else shown


def _is_pointer(kind: Any) -> bool:
    return kind == "address" or (isinstance(kind, list) and kind[0] in ("pointer", "callback"))
