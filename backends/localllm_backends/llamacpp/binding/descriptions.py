"""A description of C declarations as plain data, and the names to describe.

A type is described by the name of a basic type ("int32_t", "bool", "enum", "void", "text",
"address") or by a list:

    ["pointer", type]  ["array", type, n]  ["structure", name]  ["callback", result, [types]]
    ["union", [[name, type]]]

"text" is `char *`. "address" is `void *`, or a pointer to a structure that is not wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Type: TypeAlias = Any


class HeaderError(Exception):
    """The headers can't be read; the text names the header and the line."""


@dataclass(frozen=True, slots=True)
class WantedNames:
    """The names to describe.

    Structures are described if they are named here, or if a wanted function takes or returns them
    by value. `constants` are enumerators or macros. A name that ends with `*` is a prefix.
    Functions in `staging` may have C++ names in a library.
    """

    functions: Sequence[str]
    staging: Sequence[str]
    structures: Sequence[str]
    types: Sequence[str]
    constants: Sequence[str]


@dataclass(slots=True)
class Description:
    """The names that the headers declare.

    - `functions`: result, types of the arguments, and the spellings of its name in a library.
    - `structures`: name and type of each field. The name of an anonymous union is None.
    - `types`: typedefs.
    - `constants`: values of enumerators and macros.
    """

    functions: dict[str, list[Any]] = field(default_factory=dict)
    structures: dict[str, list[list[Any]]] = field(default_factory=dict)
    types: dict[str, Type] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)
