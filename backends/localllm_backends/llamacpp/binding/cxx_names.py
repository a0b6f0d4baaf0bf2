"""Names under which C++ compilers export a C function that was compiled without `extern "C"`.

Only for types that occur in llama.cpp's staging functions: numbers, and pointers to structures and
to numbers. The Itanium ABI is that of Linux and macOS, the other one is Microsoft's for 64 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pycparser import c_ast

# The codes of a type in the two schemes.
_CODES = {
    "void": ("v", "X"), "bool": ("b", "_N"), "_Bool": ("b", "_N"), "char": ("c", "D"),
    "float": ("f", "M"), "double": ("d", "N"), "int": ("i", "H"), "int32_t": ("i", "H"),
    "unsigned int": ("j", "I"), "uint32_t": ("j", "I"),
}  # fmt: skip


def cxx_spellings(
    name: str, function: c_ast.FuncDecl, typedefs: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the function's C++ names (Itanium, Microsoft); () if a type is not known here."""
    parameters = function.args.params if function.args else []
    try:
        result = _codes(function.type, typedefs)
        codes = [_codes(parameter.type, typedefs) for parameter in parameters]
    except KeyError:
        return ()
    itanium = [code for code, _ in codes]
    # A repeated pointer would be abbreviated.
    if len([code for code in itanium if len(code) > 1]) > 1:
        return ()
    microsoft = _abbreviated([code for _, code in codes])
    if not codes:
        itanium = ["v"]
        microsoft = "X"
    # An empty list of parameters has no end mark.
    end = "Z" if microsoft == "X" else "@Z"
    return (
        f"_Z{len(name)}{name}{''.join(itanium)}",
        f"?{name}@@YA{result[1]}{microsoft}{end}",
    )


def _abbreviated(codes: list[str]) -> str:
    """Return Microsoft's list of parameters: a repeated type is the number of its first place.

    Types of one letter are not numbered.
    """
    numbered: list[str] = []
    text = ""
    for code in codes:
        if code in numbered:
            text += str(numbered.index(code))
            continue
        if len(code) > 1:
            numbered.append(code)
        text += code
    return text


def _codes(node: Any, typedefs: Mapping[str, Any]) -> tuple[str, str]:
    """Return the type's codes in both schemes. Raises KeyError for a type that is not known here."""
    if isinstance(node, c_ast.PtrDecl):
        return _pointer_codes(node.type, typedefs)
    if isinstance(node, c_ast.TypeDecl):
        return _codes(node.type, typedefs)
    if isinstance(node, c_ast.IdentifierType):
        name = " ".join(node.names)
        if name in typedefs:
            return _codes(typedefs[name], typedefs)
        return _CODES[name]
    if isinstance(node, c_ast.Struct) and node.name:
        return f"{len(node.name)}{node.name}", f"U{node.name}@@"
    raise KeyError(type(node).__name__)


def _pointer_codes(target: Any, typedefs: Mapping[str, Any]) -> tuple[str, str]:
    itanium, microsoft = _codes(target, typedefs)
    if "const" in getattr(target, "quals", ()):
        return f"PK{itanium}", f"PEB{microsoft}"
    return f"P{itanium}", f"PEA{microsoft}"
