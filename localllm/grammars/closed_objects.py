"""Closes the objects of a JSON schema: by default they have no members that the schema does not name.

JSON Schema leaves objects open. Under a grammar, a small model then invents members until its limit.
llama.cpp closes objects too (grammars/README.md). `additionalProperties` with `true` or a schema
opens an object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_SCHEMA_LIST_KEYWORDS = ("prefixItems", "allOf", "anyOf", "oneOf")
_SCHEMA_KEYWORDS = ("items", "additionalItems", "additionalProperties", "contains", "then", "else")
_NAMED_SCHEMA_KEYWORDS = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
)
# Keywords whose schemas describe the same object as their neighbours.
_SAME_OBJECT_KEYWORDS = ("allOf", "anyOf", "oneOf")
_MEMBER_KEYWORDS = ("properties", "patternProperties")
# llguidance does not count the members of a closed object.
_OPENNESS_KEYWORDS = (
    "additionalProperties",
    "unevaluatedProperties",
    "minProperties",
    "maxProperties",
)
# An object that is described through more references than this leaves the schema unchanged.
_MAX_REFERENCES = 64
# No path within a schema has more steps, because a body may nest less deeply.
_MAX_POINTER_STEPS = 200
_MAX_DEPTH = 8


class _TooManyReferencesError(Exception):
    """An object is described through too many references, or through references to itself."""


def with_closed_objects(schema: Any) -> Any:
    """`schema` with closed objects. It is copied, not changed."""
    try:
        return _ObjectCloser(schema).converted(schema)
    except (_TooManyReferencesError, RecursionError):
        return schema


def pointed_to(pointer: str, root: Any) -> Any:
    """The part of `root` that a JSON pointer without its first / leads to (RFC 6901), or None."""
    node = root
    for step in pointer.split("/", _MAX_POINTER_STEPS):
        if not isinstance(node, Mapping):
            return None
        node = node.get(step.replace("~1", "/").replace("~0", "~"))
    return node


class _ObjectCloser:
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
            return _with_closed_object(self._with_converted_schemas(node, self.converted), node)
        merged = self._resolved(node, 0)
        converted_node = self._with_converted_schemas(merged, self._converted_part)
        if _is_open(merged):
            return converted_node
        for word in _MEMBER_KEYWORDS:
            names = dict.fromkeys(_member_names(merged, word), True)
            members = converted_node.get(word)
            if not isinstance(members, Mapping):
                members = {}
            if names:
                converted_node[word] = {**names, **members}
        return _with_closed_object(converted_node, converted_node)

    def _converted_part(self, node: Any) -> Any:
        """A part of an object: its members are closed, the part itself is not."""
        if isinstance(node, list):
            return [self._converted_part(inner) for inner in node]
        if isinstance(node, Mapping):
            return self._with_converted_schemas(node, self._converted_part)
        return node

    def _with_converted_schemas(self, node: Mapping[str, Any], convert_part: Any) -> dict[str, Any]:
        """`node` with converted schemas inside. `convert_part` converts those of the same object."""
        converted_node = dict(node)
        for word, value in node.items():
            if word in _SAME_OBJECT_KEYWORDS:
                converted_node[word] = convert_part(value)
            elif word in _NAMED_SCHEMA_KEYWORDS and isinstance(value, Mapping):
                converted_node[word] = {
                    name: self.converted(inner) for name, inner in value.items()
                }
            elif word in _SCHEMA_KEYWORDS or word in _SCHEMA_LIST_KEYWORDS:
                converted_node[word] = self.converted(value)
        return converted_node

    def _resolved(self, node: Any, depth: int) -> Any:
        """`node` with the targets of its references in place of them, as far as they describe the
        same object."""
        if isinstance(node, list):
            return [self._resolved(inner, depth) for inner in node]
        if not isinstance(node, Mapping):
            return node
        resolved_node = dict(node)
        target = self._reference_target(resolved_node.get("$ref"), depth)
        if target is not None:
            del resolved_node["$ref"]
            resolved_node["allOf"] = [*_list_or_empty(resolved_node.get("allOf")), target]
        for word in _SAME_OBJECT_KEYWORDS:
            if isinstance(resolved_node.get(word), list):
                resolved_node[word] = self._resolved(resolved_node[word], depth + 1)
        return resolved_node

    def _reference_target(self, reference: Any, depth: int) -> Any:
        """The schema that a reference within the document leads to, or None."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        self._n_references += 1
        if self._n_references > _MAX_REFERENCES or depth > _MAX_DEPTH:
            raise _TooManyReferencesError
        if reference == "#":
            return self._root
        return pointed_to(reference[2:], self._root)


def _list_or_empty(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _describes_in_parts(node: Mapping[str, Any]) -> bool:
    """True if several schemas describe the same object together."""
    parts = [part for part in _list_or_empty(node.get("allOf")) if isinstance(part, Mapping)]
    has_members = any(word in node for word in _MEMBER_KEYWORDS)
    has_references = any(word in node for word in ("anyOf", "oneOf", "$ref"))
    n_sources = min(len(parts), 2) + has_members + has_references
    return n_sources > 1


def _with_closed_object(converted_node: dict[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    """Close `converted_node`, made from `node`, if it names members and does not state whether more
    may come."""
    names_members = any(isinstance(node.get(word), Mapping) for word in _MEMBER_KEYWORDS)
    if _states_further_members(node) or not names_members:
        return converted_node
    properties: dict[str, Any] = {}
    if isinstance(converted_node.get("properties"), Mapping):
        properties = dict(converted_node["properties"])
    required = node.get("required")
    if isinstance(required, list):
        # A required member may have any value if it is not described.
        properties |= {n: True for n in required if isinstance(n, str) and n not in properties}
    return {**converted_node, "properties": properties, "additionalProperties": False}


def _states_further_members(node: Mapping[str, Any]) -> bool:
    """True if the schema itself states whether further members may come."""
    return any(word in node for word in _OPENNESS_KEYWORDS)


def _is_open(node: Any) -> bool:
    """True if some part of an object states whether further members may come."""
    if isinstance(node, list):
        return any(_is_open(inner) for inner in node)
    if not isinstance(node, Mapping):
        return False
    if _states_further_members(node):
        return True
    return any(_is_open(node.get(word)) for word in _SAME_OBJECT_KEYWORDS)


def _member_names(node: Any, word: str) -> Iterator[str]:
    """The names of members in all parts of an object."""
    if isinstance(node, list):
        for inner in node:
            yield from _member_names(inner, word)
    elif isinstance(node, Mapping):
        members = node.get(word)
        if isinstance(members, Mapping):
            yield from members
        for part in _SAME_OBJECT_KEYWORDS:
            yield from _member_names(node.get(part), word)
