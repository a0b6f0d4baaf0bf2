"""Members of objects: what several schemas say of them together, and which names a pattern is
for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from localllm.grammars.schema_words import empty, other_texts
from localllm.grammars.translator import IN_ORDER
from localllm.grammars.values import TYPES

OBJECT = frozenset(
    {"type", "properties", "required", "additionalProperties", "patternProperties", IN_ORDER}
)
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)
# A repetition at the end of an expression, and how often at least: where anything may follow, more
# than that says nothing.
_REPEATED = re.compile(r"(?<![\\*+?}])(?:(\{\d+),\d*\}|\+)$")


def kinds_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The types that a schema's own `type` allows."""
    kinds = schema.get("type", TYPES)
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """What both say: None where they share no type, an allOf where that is said in no words of an
    object alone."""
    kinds = _common_kinds(kinds_of(one), kinds_of(other))
    if not kinds:
        return None
    typed = (
        {"type": kinds if len(kinds) > 1 else kinds[0]} if "type" in one or "type" in other else {}
    )
    if "object" not in kinds:
        more = [
            schema
            for schema in (one, other)
            if "object" not in kinds_of(schema) and set(schema) != {"type"}
        ]
        return {**typed, **({"allOf": more} if more else {})}
    named = _named_members(one, other)
    for name, described in _named_members(other, one).items():
        named.setdefault(name, described)
    patterns = [_patterns_of_members(one, other), _patterns_of_members(other, one)]
    if None in patterns:
        return {"allOf": [one, other]}
    extra = both_of(one.get("additionalProperties", True), other.get("additionalProperties", True))
    required = list(dict.fromkeys([*one.get("required", ()), *other.get("required", ())]))
    words = {
        "properties": named,
        "required": required,
        "patternProperties": {**(patterns[0] or {}), **(patterns[1] or {})},
        IN_ORDER: bool(one.get(IN_ORDER) or other.get(IN_ORDER)),
    }
    out = {**typed, **{word: value for word, value in words.items() if value}}
    return out if extra is True else {**out, "additionalProperties": extra}


def _common_kinds(mine: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """The types that both allow: an integer is a number."""
    kinds = [k for k in mine if k in theirs or (k == "integer" and "number" in theirs)]
    return kinds + [k for k in theirs if k == "integer" and "number" in mine and k not in kinds]


def _named_members(here: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    """What both say of the members that `here` names."""
    extra = there.get("additionalProperties", True)
    patterns, known = there.get("patternProperties", {}), there.get("properties", {})
    named: dict[str, Any] = {}
    for name, described in here.get("properties", {}).items():
        by_pattern_alone = name not in known and any(
            name_matches(pattern, name) for pattern in patterns
        )
        named[name] = described if by_pattern_alone else both_of(described, known.get(name, extra))
    return named


def _patterns_of_members(
    here: Mapping[str, Any], there: Mapping[str, Any]
) -> dict[str, Any] | None:
    """What both say of the members whose names are like a pattern of `here`; None where that takes
    an allOf."""
    extra = there.get("additionalProperties", True)
    patterns, known = there.get("patternProperties", {}), there.get("properties", {})
    found: dict[str, Any] = {}
    for pattern, described in here.get("patternProperties", {}).items():
        may_meet = bool(patterns) or any(name_matches(pattern, name) for name in known)
        if pattern not in patterns and extra is not True and may_meet:
            return None
        found[pattern] = both_of(described, patterns.get(pattern, extra))
    return found


def both_of(one: Any, other: Any) -> Any:
    """The schema of what matches both."""
    if one is False or other is False:
        return False
    if one is True or other is True:
        return other if one is True else one
    parts: list[Any] = []  # each once, or one that leads to itself grows for ever
    for schema in (one, other):
        inner = (
            schema["allOf"] if isinstance(schema, dict) and set(schema) == {"allOf"} else [schema]
        )
        parts += [part for part in inner if part not in parts]
    return {"allOf": parts} if len(parts) > 1 else parts[0]


def as_name(pattern: str) -> str | None:
    """The expression of a name between its quotes that `pattern` is found in; None for one with
    ends of its own within."""
    body = pattern.removeprefix("^")
    body, end = (
        (body[:-1], "") if body.endswith("$") and not body.endswith("\\$") else (body, "(?s:.*)")
    )
    if re.search(r"(?<!\\)(?<!\[)[\^$]|\\[bBAzZ]|\(\?", body) or "|" in re.sub(
        r"\(.*\)|\\.|\[[^]]*\]", "", body
    ):
        return None
    body = _SLASH.sub(lambda found: found[1] or r"\/", body)
    body = _REPEATED.sub(lambda found: f"{found[1]}}}" if found[1] else "", body) if end else body
    return f'"{"" if pattern.startswith("^") else "(?s:.*)"}(?:{body}){end}"'


def name_matches(pattern: str, name: str) -> bool:
    """Whether a name is like `pattern`; of what can't be read all are."""
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True


@lru_cache(1024)
def overlap(one: str, other: str) -> bool:
    """True unless no name is like both."""
    return not empty({"type": "string", "allOf": [{"pattern": one}, {"pattern": other}]})


def all_taken(pattern: str, names: Sequence[str]) -> bool:
    """True where no other name than `names` is like `pattern`."""
    return empty(
        {"type": "string", "allOf": [{"pattern": pattern}, {"pattern": f"^{other_texts(names)}$"}]}
    )
