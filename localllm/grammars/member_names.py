"""Names of an object's members: which of them a pattern is for, and what a schema of names alone
says."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, TypeAlias

Schema: TypeAlias = bool | dict[str, Any]

_LITERAL = r"(?:[\w :/@-]|\\[.$/-])+"
_LISTED_NAMES = re.compile(rf"\^(?:({_LITERAL})|\(({_LITERAL}(?:\|{_LITERAL})*)\))\$")


def is_like(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def described_by(name: str, patterns: Mapping[str, Schema], extra: Schema) -> Schema:
    """What the member `name` may be where nothing but `patterns` describes it."""
    matching = [value for pattern, value in patterns.items() if is_like(pattern, name)]
    return {"allOf": matching} if matching else extra


def forbid_all_but(allowed: Collection[str], named: dict[str, Schema]) -> None:
    named.update({name: False for name in named if name not in allowed})


def pattern_of_names(held: Mapping[str, Any], words: Set[str]) -> str | None:
    """The expression of names that match `held`, whose words (but its type) are `words`; None where
    there is none."""
    if words == {"pattern"}:
        return str(held["pattern"])
    if words <= {"minLength", "maxLength"}:
        return f"^(?s:.{{{held.get('minLength', 0)},{held.get('maxLength', '')}}})$"
    return None


def name_listed(named: dict[str, Schema], patterns: dict[str, Schema]) -> None:
    """Patterns like ^(a|b)$ become the members that they list."""
    for pattern in list(patterns):
        found = _LISTED_NAMES.fullmatch(pattern)
        if found is None:
            continue
        value = patterns.pop(pattern)
        for escaped in (found[1] or found[2]).split("|"):
            name = re.sub(r"\\(.)", r"\1", escaped)
            named[name] = {"allOf": [named[name], value]} if name in named else value


def one_more_of(names: Sequence[str], out: Mapping[str, Any], others: int | None) -> Schema:
    """One of these members, or without them so many `others` (None: there are none)."""
    kind = {"type": out["type"]} if "type" in out else {}
    ways: list[Schema] = [{**kind, "required": [name]} for name in names]
    if others is not None:
        ways.append({**kind, "properties": dict.fromkeys(names, False), "minProperties": others})
    return {"anyOf": ways}
