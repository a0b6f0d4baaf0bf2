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
from localllm.grammars.closed_objects import closed
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
_JSON = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|(%json\s*)(?=[{tf])')
_OPTIONS = "x-guidance"
LENIENT = {_OPTIONS: {"lenient": True}}
"""A schema entry that makes llguidance ignore unknown keywords."""
# At most this many keywords are dropped one after another; then any object is allowed.
_MAX_WORDS = 8
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
    if isinstance(converted.get(_OPTIONS), dict):
        options |= converted[_OPTIONS]
    return {**converted, _OPTIONS: options}


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
    at = 0
    while (found := _JSON.search(lark, at)) is not None:
        parts.append(lark[at : found.end()])
        at = found.end()
        if found[1]:
            schema, at = json.JSONDecoder().raw_decode(lark, at)
            parts.append(json.dumps(convert_schema(schema)))
    return "".join([*parts, lark[at:]])


def loosened(schema: Any) -> tuple[Schema, tuple[str, ...]]:
    """`schema` without the parts that llguidance can't enforce, and the affected keywords.

    These keywords are left out or weakened. Raises UnsupportedError if it takes too long.
    """
    try:
        text = json.dumps(schema)
        if len(text) <= _CACHED_CHARS:
            return _cached(text)
        return _loosened(text)
    except (RecursionError, ValueError):
        return True, ("schema",)


def _loosened(text: str) -> tuple[Schema, tuple[str, ...]]:
    refused: set[str] = set()
    until_s = time.monotonic() + _MAX_CHECKING_S
    schema = convert_node(closed(_embeddable(text)), refused)
    if isinstance(schema, bool):
        return schema, ()
    if not isinstance(schema, dict):
        return True, ("schema",)
    check = _loosely_checked(schema)
    # A broken property must not affect the others.
    if check.error and '"$ref"' not in text and isinstance(schema.get("properties"), dict):
        kept = {
            n: _without_rejected_keywords(inner, refused, until_s)
            for n, inner in schema["properties"].items()
        }
        schema = {**schema, "properties": kept}
    if check.error:
        schema = _without_rejected_keywords(schema, refused, until_s)
        check = _loosely_checked(schema)
    for warning in check.warnings:
        refused |= {word for word in reason_of(warning).words if f'"{word}"' in text}
    if check.warnings:
        schema = {**schema, **LENIENT}
    return schema, tuple(sorted(refused))


_cached = lru_cache(maxsize=512)(_loosened)  # an agent sends the same tools with every turn


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
    for word in ("$id", "id"):
        address = schema.get(word) if isinstance(schema, dict) else None
        if isinstance(address, str) and address.rstrip("#"):
            whole = json.dumps(address.rstrip("#"))
            text = text.replace(f'"$ref": {whole[:-1]}#', '"$ref": "#').replace(
                f'"$ref": {whole}', '"$ref": "#"'
            )
    schema = json.loads(text)
    if isinstance(schema, dict) and "$ref" in schema and isinstance(schema.get("allOf", []), list):
        schema["allOf"] = [*schema.get("allOf", []), {"$ref": schema.pop("$ref")}]
    return schema


def _loosely_checked(schema: Any) -> GrammarCheck:
    """llguidance's check of a schema embedded in another one, as tools' schemas are."""
    if isinstance(schema, bool):
        return GrammarCheck("")
    if not isinstance(schema, dict):
        return GrammarCheck("this is not a JSON schema")
    return check_schema(json.dumps({"$ref": "x", **documents({"x": schema}), **LENIENT}))


def _without_rejected_keywords(schema: Schema, refused: set[str], until_s: float) -> Schema:
    """`schema` without the keywords that llguidance rejects. They are added to `refused`.

    Raises UnsupportedError if the time.monotonic value `until_s` is over."""
    for _ in range(_MAX_WORDS):
        if time.monotonic() > until_s:
            raise UnsupportedError(
                f"the schema takes more than {_MAX_CHECKING_S:g} s to check: simplify it"
            )
        check = _loosely_checked(schema)
        if not check.error:
            return schema
        found: set[str] = set()
        schema = _without(schema, reason_of(check.error).words, found)
        if not found:
            break
        refused |= found
    refused.add("schema")
    return True


def _without(schema: Any, words: tuple[str, ...], found: set[str]) -> Any:
    if isinstance(schema, list):
        return [_without(inner, words, found) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    found |= schema.keys() & set(words)
    rest = {word: said for word, said in schema.items() if word not in words}
    for word, said in rest.items():
        if word in NAMED and isinstance(said, dict):
            rest[word] = {name: _without(inner, words, found) for name, inner in said.items()}
        elif word not in ("const", "enum"):
            rest[word] = _without(said, words, found)
    return rest
