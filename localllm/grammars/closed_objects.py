"""Closes the objects of a JSON schema: by default they have no members that the schema does not name.

JSON Schema leaves objects open. Under a grammar, a small model then invents members until its limit.
llama.cpp closes objects too (grammars/README.md). `additionalProperties` with `true` or a schema
opens an object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
_ONE = ("items", "additionalItems", "additionalProperties", "contains", "then", "else")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Keywords whose schemas describe the same object as their neighbours.
_PARTS = ("allOf", "anyOf", "oneOf")
_NAMES_MEMBERS = ("properties", "patternProperties")
# llguidance does not count the members of a closed object.
_OPENS = ("additionalProperties", "unevaluatedProperties", "minProperties", "maxProperties")
# An object that is described through more references than this leaves the schema unchanged.
_MAX_REFERENCES = 64
# No path within a schema has more steps, because a body may nest less deeply.
_MAX_STEPS = 200
_MAX_DEPTH = 8


class _TooManyReferencesError(Exception):
    """An object is described through too many references, or through references to itself."""


def closed(schema: Any) -> Any:
    """`schema` with closed objects. It is copied, not changed."""
    try:
        return _Closing(schema).converted(schema)
    except (_TooManyReferencesError, RecursionError):
        return schema


def pointed_to(pointer: str, root: Any) -> Any:
    """The part of `root` that a JSON pointer without its first / leads to (RFC 6901), or None."""
    found = root
    for part in pointer.split("/", _MAX_STEPS):
        if not isinstance(found, Mapping):
            return None
        found = found.get(part.replace("~1", "/").replace("~0", "~"))
    return found


class _Closing:
    """The conversion of one document, whose references lead into `root`."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._n_references = 0

    def converted(self, node: Any) -> Any:
        """A schema that describes a value completely."""
        if isinstance(node, list):
            return [self.converted(inner) for inner in node]
        if not isinstance(node, Mapping):
            return node
        if not _describes_in_parts(node):
            return _close(self._inner(node, self.converted), node)
        merged = self._part(node, 0)
        out = self._inner(merged, self._inside_part)
        if _is_open(merged):
            return out
        for word in _NAMES_MEMBERS:
            names = dict.fromkeys(_names(merged, word), True)
            own = out.get(word)
            if names:
                out[word] = {**names, **(own if isinstance(own, Mapping) else {})}
        return _close(out, out)

    def _inside_part(self, node: Any) -> Any:
        """A part of an object: its members are closed, the part itself is not."""
        if isinstance(node, list):
            return [self._inside_part(inner) for inner in node]
        if isinstance(node, Mapping):
            return self._inner(node, self._inside_part)
        return node

    def _inner(self, node: Mapping[str, Any], convert_part: Any) -> dict[str, Any]:
        """`node` with converted schemas inside. `convert_part` converts those of the same object."""
        out = dict(node)
        for word, value in node.items():
            if word in _PARTS:
                out[word] = convert_part(value)
            elif word in _NAMED and isinstance(value, Mapping):
                out[word] = {name: self.converted(inner) for name, inner in value.items()}
            elif word in _ONE or word in _LISTS:
                out[word] = self.converted(value)
        return out

    def _part(self, node: Any, depth: int) -> Any:
        """`node` with the targets of its references in place of them, as far as they describe the
        same object."""
        if isinstance(node, list):
            return [self._part(inner, depth) for inner in node]
        if not isinstance(node, Mapping):
            return node
        out = dict(node)
        target = self._target(out.get("$ref"), depth)
        if target is not None:
            del out["$ref"]
            out["allOf"] = [*_list(out.get("allOf")), target]
        for word in _PARTS:
            if isinstance(out.get(word), list):
                out[word] = self._part(out[word], depth + 1)
        return out

    def _target(self, reference: Any, depth: int) -> Any:
        """The schema that a reference within the document leads to, or None."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        self._n_references += 1
        if self._n_references > _MAX_REFERENCES or depth > _MAX_DEPTH:
            raise _TooManyReferencesError
        if reference == "#":
            return self._root
        return pointed_to(reference[2:], self._root)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _describes_in_parts(node: Mapping[str, Any]) -> bool:
    """True if several schemas describe the same object together."""
    parts = [part for part in _list(node.get("allOf")) if isinstance(part, Mapping)]
    own = any(word in node for word in _NAMES_MEMBERS)
    others = any(word in node for word in ("anyOf", "oneOf", "$ref"))
    return len(parts) > 1 or (bool(parts) and (own or others)) or (own and others)


def _close(out: dict[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    """Close `out`, made from `node`, if it names members and does not state whether more may
    come."""
    if _opens(node) or not any(isinstance(node.get(word), Mapping) for word in _NAMES_MEMBERS):
        return out
    properties = dict(out["properties"]) if isinstance(out.get("properties"), Mapping) else {}
    required = node.get("required")
    if isinstance(required, list):
        # A required member may have any value if it is not described.
        properties |= {n: True for n in required if isinstance(n, str) and n not in properties}
    return {**out, "properties": properties, "additionalProperties": False}


def _opens(node: Mapping[str, Any]) -> bool:
    """True if the schema itself states whether further members may come."""
    return any(word in node for word in _OPENS)


def _is_open(node: Any) -> bool:
    """True if some part of an object states whether further members may come."""
    if isinstance(node, list):
        return any(_is_open(inner) for inner in node)
    if not isinstance(node, Mapping):
        return False
    return _opens(node) or any(_is_open(node.get(word)) for word in _PARTS)


def _names(node: Any, word: str) -> Iterator[str]:
    """The names of members in all parts of an object."""
    if isinstance(node, list):
        for inner in node:
            yield from _names(inner, word)
    elif isinstance(node, Mapping):
        named = node.get(word)
        if isinstance(named, Mapping):
            yield from named
        for part in _PARTS:
            yield from _names(node.get(part), word)
