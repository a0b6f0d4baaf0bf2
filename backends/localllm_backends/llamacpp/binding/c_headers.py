"""Read C headers with pcpp and pycparser into a description of the wanted names."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pcpp
from pycparser import c_ast, c_parser

from localllm_backends.llamacpp.binding.c_values import constant
from localllm_backends.llamacpp.binding.cxx_names import cxx_spellings
from localllm_backends.llamacpp.binding.descriptions import (
    Description,
    HeaderError,
    Type,
    WantedNames,
)

# Basic types. Those of the standard headers are declared for the parser, since only llama.cpp's own
# headers are read. Only their names matter.
_STANDARD = (
    "int8_t", "int16_t", "int32_t", "int64_t", "uint8_t", "uint16_t", "uint32_t", "uint64_t",
    "size_t", "ptrdiff_t", "intptr_t", "uintptr_t", "bool", "FILE", "va_list",
)  # fmt: skip
_PRELUDE = "".join(f"typedef int {name};\n" for name in _STANDARD)
# Spellings of built-in types by ctypes' names.
_BUILT_IN = {
    "char": "char", "signed char": "int8_t", "unsigned char": "uint8_t", "_Bool": "bool",
    "short": "short", "unsigned short": "ushort", "int": "int", "unsigned": "uint",
    "unsigned int": "uint", "long": "long", "unsigned long": "ulong", "long long": "int64_t",
    "unsigned long long": "uint64_t", "float": "float", "double": "double", "void": "void",
}  # fmt: skip


class UnknownTypeError(Exception):
    """A type that can't be described, such as a union that is not defined within a structure."""


class _Preprocessor(pcpp.Preprocessor):  # type: ignore[misc]
    """pcpp, restricted to headers whose names start with `prefixes`: others are left out."""

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        super().__init__()
        self.line_directive = "#"
        self._prefixes = prefixes

    def on_file_open(self, is_system_include: bool, includepath: str) -> Any:
        if not Path(includepath).name.startswith(self._prefixes):
            raise OSError(f"{includepath} is not wanted")
        return open(includepath, encoding="utf-8", errors="replace")

    def on_include_not_found(
        self, is_malformed: bool, is_system_include: bool, curdir: str, includepath: str
    ) -> Any:
        raise pcpp.OutputDirective(pcpp.Action.IgnoreAndRemove)

    def on_error(self, file: str, line: int, msg: str) -> None:
        raise HeaderError(f"{file}:{line}: {msg}")


def read_headers(
    headers: Sequence[Path], prefixes: tuple[str, ...], wanted: WantedNames
) -> Description:
    """Describe the `wanted` names as the `headers` declare them. Names that are not declared are
    left out.

    Headers that these include are read if their names start with `prefixes`. The first declaration
    of a name counts. Raises HeaderError.
    """
    preprocessor = _Preprocessor(prefixes)
    for folder in dict.fromkeys(str(path.parent) for path in headers):
        preprocessor.add_path(folder)
    try:
        preprocessor.parse("".join(f'#include "{path.name}"\n' for path in headers))
        text = io.StringIO()
        preprocessor.write(text)
        tree = c_parser.CParser().parse(_PRELUDE + text.getvalue(), "llama.cpp's headers")
    except c_parser.ParseError as e:
        raise HeaderError(str(e)) from e
    reader = _DeclarationReader(tree, wanted)
    reader.describe_all()
    reader.add_macros(preprocessor)
    return reader.found


class _DeclarationReader:
    """Describes the declarations of a syntax tree."""

    def __init__(self, tree: c_ast.FileAST, wanted: WantedNames) -> None:
        self.found = Description()
        self._wanted = wanted
        self._functions: dict[str, c_ast.FuncDecl] = {}
        self._structures: dict[str, c_ast.Struct] = {}
        self._typedefs: dict[str, Any] = {}
        self._enumerators: dict[str, int] = {}
        for node in tree.ext:
            self._enter(node)

    def _enter(self, node: Any) -> None:
        self._enter_definitions(node.type)
        if isinstance(node, c_ast.Typedef):
            if node.name not in _STANDARD:
                self._typedefs[node.name] = node.type
        elif isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.FuncDecl):
            self._functions.setdefault(node.name, node.type)

    def _enter_definitions(self, node: Any) -> None:
        """Enter structures and enums that are defined within a declaration."""
        inner = node
        while isinstance(inner, c_ast.TypeDecl | c_ast.PtrDecl | c_ast.ArrayDecl):
            inner = inner.type
        if isinstance(inner, c_ast.Struct) and inner.decls:
            self._structures.setdefault(_structure_name(inner), inner)
            for member in inner.decls:
                self._enter_definitions(member.type)
        elif isinstance(inner, c_ast.Enum) and inner.values:
            value = -1
            for enumerator in inner.values.enumerators:
                value += 1
                if enumerator.value is not None:
                    value = constant(enumerator.value, self._enumerators)
                self._enumerators[enumerator.name] = value

    # --- the wanted names -------------------------------------------------------------------------

    def describe_all(self) -> None:
        """Describe all wanted names. A declaration with a type that can't be described is left
        out."""
        for name in _chosen(self._wanted.functions, self._functions):
            with suppress(UnknownTypeError):
                self.found.functions[name] = self._function(name)
        for name in self._wanted.structures:
            with suppress(UnknownTypeError):
                self._describe_structure(name)
        for name in _chosen(self._wanted.types, self._typedefs):
            with suppress(UnknownTypeError):
                self.found.types[name] = self._type(self._typedefs[name])
        for name in _chosen(self._wanted.constants, self._enumerators):
            self.found.constants[name] = self._enumerators[name]

    def _function(self, name: str) -> list[Any]:
        function = self._functions[name]
        result = self._type(function.type)
        arguments = self._arguments(function)
        spellings = [name]
        if name in self._wanted.staging:
            spellings.extend(cxx_spellings(name, function, self._typedefs))
        return [result, arguments, spellings]

    def add_macros(self, preprocessor: pcpp.Preprocessor) -> None:
        """Add wanted constants that are macros with an integer value."""
        for name in _chosen(self._wanted.constants, preprocessor.macros):
            value = "".join(token.value for token in preprocessor.macros[name].value)
            try:
                self.found.constants.setdefault(name, int(value.rstrip("uUlL"), 0))
            except ValueError:
                continue

    def _describe_structure(self, name: str) -> None:
        structure = self._structures.get(name)
        if structure is None or name in self.found.structures:
            return
        fields: list[list[Any]] = []
        # Entered first, because a structure may point to itself.
        self.found.structures[name] = fields
        try:
            for member in structure.decls:
                fields.append([member.name, self._type(member.type)])
        except UnknownTypeError:
            del self.found.structures[name]
            raise

    # --- types ------------------------------------------------------------------------------------

    def _arguments(self, function: c_ast.FuncDecl) -> list[Type]:
        parameters = function.args.params if function.args else []
        types = []
        for parameter in parameters:
            if isinstance(parameter, c_ast.EllipsisParam):
                continue
            kind = parameter.type
            # An array or a function as a parameter is a pointer.
            if isinstance(kind, c_ast.ArrayDecl):
                kind = c_ast.PtrDecl([], kind.type)
            elif isinstance(kind, c_ast.FuncDecl):
                kind = c_ast.PtrDecl([], kind)
            types.append(self._type(kind))
        return [] if types == ["void"] else types

    def _type(self, node: Any) -> Type:
        if isinstance(node, c_ast.TypeDecl):
            return self._type(node.type)
        if isinstance(node, c_ast.PtrDecl):
            return self._pointer(node.type)
        if isinstance(node, c_ast.ArrayDecl):
            return ["array", self._type(node.type), constant(node.dim, self._enumerators)]
        if isinstance(node, c_ast.IdentifierType):
            return self._named(" ".join(node.names))
        if isinstance(node, c_ast.Enum):
            return "enum"
        if isinstance(node, c_ast.Struct):
            name = _structure_name(node)
            if name not in self._structures:
                return "opaque"
            self._describe_structure(name)
            return ["structure", name]
        if isinstance(node, c_ast.Union) and node.decls:
            return ["union", [[member.name, self._type(member.type)] for member in node.decls]]
        raise UnknownTypeError(f"{node.coord}: {type(node).__name__}")

    def _named(self, name: str) -> Type:
        if name in self._typedefs:
            return self._type(self._typedefs[name])
        return _BUILT_IN.get(name, name)

    def _pointer(self, target: Any) -> Type:
        if isinstance(target, c_ast.FuncDecl):
            return ["callback", self._type(target.type), self._arguments(target)]
        structure = self._pointed_structure(target)
        if structure is not None:
            if structure not in self._wanted.structures or structure not in self._structures:
                return "address"
            self._describe_structure(structure)
            return ["pointer", ["structure", structure]]
        kind = self._type(target)
        if kind == "char":
            return "text"
        if kind in ("void", "opaque", "FILE"):
            return "address"
        return ["pointer", kind]

    def _pointed_structure(self, node: Any) -> str | None:
        """Return the name of the structure that `node` names directly or by a typedef, else
        None."""
        while isinstance(node, c_ast.TypeDecl):
            node = node.type
        if isinstance(node, c_ast.Struct):
            return _structure_name(node)
        if isinstance(node, c_ast.IdentifierType):
            alias = self._typedefs.get(" ".join(node.names))
            if isinstance(alias, c_ast.TypeDecl):
                return self._pointed_structure(alias)
        return None


def _structure_name(node: c_ast.Struct) -> str:
    """Return the structure's tag; for one without a tag, its place in the headers."""
    return node.name or f"structure at {node.coord}"


def _chosen(names: Iterable[str], declared: Mapping[str, Any]) -> list[str]:
    """Return the declared ones of `names`, where `*` at the end matches any text."""
    found: dict[str, None] = {}
    for name in names:
        if name.endswith("*"):
            prefix = name[:-1]
            found |= dict.fromkeys(one for one in declared if one.startswith(prefix))
        elif name in declared:
            found[name] = None
    return list(found)
