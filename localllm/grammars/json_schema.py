"""Converts JSON schemas to the form that llguidance enforces, from text to text.

This module handles the gaps of llguidance: integers without an upper length, missing formats,
keywords with another meaning there (schema_words.py), and readable errors for schemas that it
rejects (reasons.py). Callers that need the complete schema reject the request then. Others drop the
unsupported part and name it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from localllm.errors import UnsupportedError
from localllm.grammars.closed_objects import with_closed_objects
from localllm.grammars.reasons import GrammarCheck, check_schema, reason_of
from localllm.grammars.schema_words import (
    NAMED,
    NOT_COMPARED,
    convert_node,
    rejection_reason,
)

Schema: TypeAlias = bool | dict[str, Any]

# Whitespace between JSON's parts: empty, a space, or a newline with indentation. Without a limit, a
# small model fills its context with whitespace (llama.cpp has the same limit,
# common/json-schema-to-grammar.cpp).
SPACE = r"( |\n{1,2}[ \t]{0,20})?"
# Lark's strings, comments and expressions, which are skipped, and the mark before a schema.
_EMBEDDED_SCHEMA = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|(%json\s*)(?=[{tf])'
)
_GUIDANCE_OPTIONS = "x-guidance"
LENIENT = {_GUIDANCE_OPTIONS: {"lenient": True}}
"""A schema entry that makes llguidance ignore unknown keywords."""
# At most this many keywords are dropped one after another; then any object is allowed.
_MAX_DROPPED_KEYWORDS = 8
# Limit of the checks of one schema. Longer schemas than these characters are not cached.
_MAX_CHECKING_S = 1.0
_CACHED_CHARS = 2**13


def convert_schema(schema: Any) -> dict[str, Any]:
    """The complete `schema` in llguidance's form.

    `uniqueItems` is left out: `without_effect` names it. Raises UnsupportedError naming the other
    keywords that llguidance would not enforce.
    """
    refused: set[str] = set()
    try:
        converted = convert_node(schema, refused)
    except RecursionError as e:
        raise UnsupportedError("the json_schema can't be enforced: it is nested too deeply") from e
    refused -= NOT_COMPARED
    if refused:
        reasons = ", ".join(f"{word} is {rejection_reason(word)}" for word in sorted(refused))
        raise UnsupportedError(f"the json_schema can't be enforced: {reasons}")
    if isinstance(converted, bool):
        converted = {"allOf": [converted]}
    options: dict[str, Any] = {"whitespace_pattern": SPACE}
    if isinstance(converted.get(_GUIDANCE_OPTIONS), dict):
        options |= converted[_GUIDANCE_OPTIONS]
    return {**converted, _GUIDANCE_OPTIONS: options}


def without_effect(text: str) -> tuple[str, ...]:
    """The keywords of a schema, given as JSON, that are accepted although no grammar enforces
    them."""
    if not any(f'"{word}"' in text for word in NOT_COMPARED):
        return ()
    refused: set[str] = set()
    convert_node(json.loads(text), refused)
    return tuple(sorted(refused & NOT_COMPARED))


def schemas_in(lark: str) -> str:
    """A Lark grammar with every embedded schema in llguidance's form.

    Raises UnsupportedError, and ValueError for invalid JSON.
    """
    parts: list[str] = []
    position = 0
    while (match := _EMBEDDED_SCHEMA.search(lark, position)) is not None:
        parts.append(lark[position : match.end()])
        position = match.end()
        if match[1]:
            schema, position = json.JSONDecoder().raw_decode(lark, position)
            parts.append(json.dumps(convert_schema(schema)))
    return "".join([*parts, lark[position:]])


def loosened(schema: Any) -> tuple[Schema, tuple[str, ...]]:
    """`schema` without the parts that llguidance can't enforce, and the affected keywords.

    These keywords are left out or weakened. Raises UnsupportedError if it takes too long.
    """
    try:
        text = json.dumps(schema)
        if len(text) <= _CACHED_CHARS:
            return _loosened_cached(text)
        return _loosened(text)
    except (RecursionError, ValueError):
        return True, ("schema",)


def _loosened(text: str) -> tuple[Schema, tuple[str, ...]]:
    refused: set[str] = set()
    deadline_s = time.monotonic() + _MAX_CHECKING_S
    schema = convert_node(with_closed_objects(_embeddable(text)), refused)
    if isinstance(schema, bool):
        return schema, ()
    if not isinstance(schema, dict):
        return True, ("schema",)
    check = _lenient_check(schema)
    # A broken property must not affect the others.
    if check.error and '"$ref"' not in text and isinstance(schema.get("properties"), dict):
        properties = {
            name: _without_rejected_keywords(inner, refused, deadline_s)
            for name, inner in schema["properties"].items()
        }
        schema = {**schema, "properties": properties}
    if check.error:
        schema = _without_rejected_keywords(schema, refused, deadline_s)
        check = _lenient_check(schema)
    for warning in check.warnings:
        refused |= {word for word in reason_of(warning).words if f'"{word}"' in text}
    if check.warnings:
        schema = {**schema, **LENIENT}
    return schema, tuple(sorted(refused))


# An agent sends the same tools with every turn.
_loosened_cached = lru_cache(maxsize=512)(_loosened)


def documents(schemas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Schemas by name, as definitions of a surrounding schema. A `$ref` to NAME refers to one.

    Each is a document of its own, so its internal references (`#/$defs/…`) keep their targets.
    """
    # draft 4 uses `id`, later drafts `$id`
    return {
        "$defs": {name: {**schema, "$id": name, "id": name} for name, schema in schemas.items()}
    }


def _embeddable(text: str) -> Any:
    """A schema that keeps its meaning when embedded in another one.

    References to its own address become relative. A top-level `$ref` moves into allOf, because
    drafts ignore the address next to a `$ref`.
    """
    schema = json.loads(text)
    for keyword in ("$id", "id"):
        address = schema.get(keyword) if isinstance(schema, dict) else None
        if isinstance(address, str) and address.rstrip("#"):
            quoted_address = json.dumps(address.rstrip("#"))
            text = text.replace(f'"$ref": {quoted_address[:-1]}#', '"$ref": "#').replace(
                f'"$ref": {quoted_address}', '"$ref": "#"'
            )
    schema = json.loads(text)
    if isinstance(schema, dict) and "$ref" in schema and isinstance(schema.get("allOf", []), list):
        schema["allOf"] = [*schema.get("allOf", []), {"$ref": schema.pop("$ref")}]
    return schema


def _lenient_check(schema: Any) -> GrammarCheck:
    """llguidance's check of a schema embedded in another one, as tools' schemas are."""
    if isinstance(schema, bool):
        return GrammarCheck("")
    if not isinstance(schema, dict):
        return GrammarCheck("this is not a JSON schema")
    return check_schema(json.dumps({"$ref": "x", **documents({"x": schema}), **LENIENT}))


def _without_rejected_keywords(schema: Schema, refused: set[str], deadline_s: float) -> Schema:
    """`schema` without the keywords that llguidance rejects. They are added to `refused`.

    Raises UnsupportedError if the time.monotonic value `deadline_s` is over."""
    for _ in range(_MAX_DROPPED_KEYWORDS):
        if time.monotonic() > deadline_s:
            raise UnsupportedError(
                f"the schema takes more than {_MAX_CHECKING_S:g} s to check: simplify it"
            )
        check = _lenient_check(schema)
        if not check.error:
            return schema
        removed: set[str] = set()
        schema = _without_keywords(schema, reason_of(check.error).words, removed)
        if not removed:
            break
        refused |= removed
    refused.add("schema")
    return True


def _without_keywords(schema: Any, keywords: tuple[str, ...], removed: set[str]) -> Any:
    if isinstance(schema, list):
        return [_without_keywords(inner, keywords, removed) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    removed |= schema.keys() & set(keywords)
    kept_entries = {keyword: value for keyword, value in schema.items() if keyword not in keywords}
    for keyword, value in kept_entries.items():
        if keyword in NAMED and isinstance(value, dict):
            kept_entries[keyword] = {
                name: _without_keywords(inner, keywords, removed) for name, inner in value.items()
            }
        elif keyword not in ("const", "enum"):
            kept_entries[keyword] = _without_keywords(value, keywords, removed)
    return kept_entries
