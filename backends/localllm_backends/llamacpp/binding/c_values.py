"""Values of constant expressions in C headers: enumerators and array sizes."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from pycparser import c_ast

# C's operators by the names of Python's functions.
_BINARY = {
    "+": "add", "-": "sub", "*": "mul", "/": "floordiv", "<<": "lshift", ">>": "rshift",
    "|": "or_", "&": "and_", "^": "xor",
}  # fmt: skip
_UNARY = {"-": "neg", "+": "pos", "~": "invert"}


def constant(node: Any, known: Mapping[str, int]) -> int:
    """Return the value of an integer constant expression; `known` are enumerators by name.

    Raises ValueError for other expressions.
    """
    if isinstance(node, c_ast.Constant):
        return _literal(node.value)
    if isinstance(node, c_ast.ID) and node.name in known:
        return known[node.name]
    if isinstance(node, c_ast.UnaryOp) and node.op in _UNARY:
        return _value(_UNARY[node.op], constant(node.expr, known))
    if isinstance(node, c_ast.BinaryOp) and node.op in _BINARY:
        left = constant(node.left, known)
        return _value(_BINARY[node.op], left, constant(node.right, known))
    if isinstance(node, c_ast.Cast):
        return constant(node.expr, known)
    raise ValueError(f"{getattr(node, 'coord', node)}: no integer constant")


def _value(function: str, *numbers: int) -> int:
    return int(getattr(operator, function)(*numbers))


def _literal(text: str) -> int:
    if text.startswith("'"):
        return ord(text[1:-1])
    digits = text.rstrip("uUlL")
    # A leading zero means octal in C. Python rejects it.
    if len(digits) > 1 and digits.isdigit() and digits.startswith("0"):
        return int(digits, 8)
    return int(digits, 0)
