"""Converts JSON schemas to the form that llguidance enforces, from text to text.

This module handles the gaps of llguidance: integers without an upper length, missing formats,
keywords with another meaning there (schema_words.py), and readable errors for schemas that it
rejects (reasons.py). Callers that need the complete schema reject the request then. Others drop the
unsupported part and name it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from localllm.errors import UnsupportedError
from localllm.grammars.deep_stack import check_parts
from localllm.grammars.reasons import GrammarCheck, check_schema, reason_of
from localllm.grammars.schema_words import NAMED, as_taken, why_not

Schema: TypeAlias = bool | dict[str, Any]

# Whitespace between JSON's parts: empty, a space, or a newline with indentation. Without a limit, a
# small model fills its context with whitespace (llama.cpp has the same limit,
# common/json-schema-to-grammar.cpp).
SPACE = r"( |\n{1,2}[ \t]{0,20})?"
# Lark's strings, comments and expressions, which are skipped, and the mark before a schema.
_JSON = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|(%json\s*)(?=[{tf])')
_OPTIONS = "x-guidance"
LENIENT = {_OPTIONS: {"lenient": True}}
"""In a schema: words that llguidance does not know are passed over."""
# At most this many keywords are dropped one after another; then any object is allowed.
_MOST_WORDS = 8


def held(schema: Any) -> dict[str, Any]:
    """The complete `schema` in llguidance's form.

    Raises UnsupportedError naming the keywords that llguidance would not enforce.
    """
    refused: set[str] = set()
    try:
        kept = as_taken(schema, refused)
    except RecursionError as e:
        raise UnsupportedError("the json_schema can't be enforced: it is nested too deeply") from e
    if refused:
        reasons = ", ".join(f"{word} is {why_not(word)}" for word in sorted(refused))
        raise UnsupportedError(f"the json_schema can't be enforced: {reasons}")
    if isinstance(kept, bool):
        kept = {"allOf": [kept]}
    options: dict[str, Any] = {"whitespace_pattern": SPACE}
    if isinstance(kept.get(_OPTIONS), dict):
        options |= kept[_OPTIONS]
    return {**kept, _OPTIONS: options}


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
            parts.append(json.dumps(held(schema)))
    return "".join([*parts, lark[at:]])


def loosened(schema: Any) -> tuple[Schema, tuple[str, ...]]:
    """`schema` without the parts that llguidance can't enforce, and the affected keywords.

    These keywords are left out or weakened.
    """
    try:
        return _loosened(json.dumps(schema))
    except (RecursionError, ValueError):
        return True, ("schema",)


def enforceable(grammar: tuple[str, str] | None) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
    """A constraint in the engine's form, and the keywords that can't be enforced.

    Only a `loose_schema` is changed: its unsupported keywords are dropped and named as
    response_format.WORD. Raises UnsupportedError if it has too many parts.
    """
    if grammar is None or grammar[0] != "loose_schema":
        return grammar, ()
    check_parts(grammar[1])
    schema, words = loosened(json.loads(grammar[1]))
    return ("json_schema", json.dumps(schema)), tuple(f"response_format.{word}" for word in words)


@lru_cache(maxsize=512)  # an agent sends the same tools with every turn
def _loosened(text: str) -> tuple[Schema, tuple[str, ...]]:
    refused: set[str] = set()
    schema = as_taken(_of_no_place(text), refused)
    if isinstance(schema, bool):
        return schema, ()
    if not isinstance(schema, dict):
        return True, ("schema",)
    check = _loosely_checked(schema)
    # A broken property must not affect the others.
    if check.error and '"$ref"' not in text and isinstance(schema.get("properties"), dict):
        kept = {
            n: _without_what_breaks(inner, refused) for n, inner in schema["properties"].items()
        }
        schema = {**schema, "properties": kept}
    if check.error:
        schema = _without_what_breaks(schema, refused)
        check = _loosely_checked(schema)
    for warning in check.warnings:
        refused |= {word for word in reason_of(warning).words if f'"{word}"' in text}
    if check.warnings:
        schema = {**schema, **LENIENT}
    return schema, tuple(sorted(refused))


def documents(schemas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Schemas by name, as definitions of a surrounding schema. A `$ref` to NAME refers to one.

    Each is a document of its own, so its internal references (`#/$defs/…`) keep their targets.
    """
    # draft 4 uses `id`, later drafts `$id`
    return {"$defs": {name: {**one, "$id": name, "id": name} for name, one in schemas.items()}}


def _of_no_place(text: str) -> Any:
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
        return GrammarCheck("this is no schema")
    return check_schema(json.dumps({"$ref": "x", **documents({"x": schema}), **LENIENT}))


def _without_what_breaks(schema: Schema, refused: set[str]) -> Schema:
    """`schema` without the keywords that llguidance rejects. They are added to `refused`."""
    for _ in range(_MOST_WORDS):
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
