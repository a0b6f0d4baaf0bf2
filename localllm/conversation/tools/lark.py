"""Building blocks of Lark grammars (llguidance's dialect), one function per shape of arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from localllm.conversation.tools.base import Grammar, NamedSchemas
from localllm.conversation.tools.schemas import as_object

# Tokens in llguidance's Lark: written by name, without quotes.
_CONTROL = re.compile(r"(<[^<>\s]+>)")

# Up to this number of parameters, the grammar spells out every order.
_MAX_IN_ANY_ORDER = 4
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)
# Unsupported by a derivative-based matcher: lookaround and backreferences.
_NOT_REGULAR = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]")


def spelled(literal: str) -> str:
    """The Lark of `literal`, with everything between < and > as a control token.

    A text can't spell a control token.
    """
    return " ".join(
        part if _CONTROL.fullmatch(part) else text(part) for part in _CONTROL.split(literal) if part
    )


def text(literal: str) -> str:
    """A Lark string; its escapes are JSON's."""
    return json.dumps(literal, ensure_ascii=False)


def json_value(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema)}"


def json_calls(tools: NamedSchemas, before: Callable[[str], str]) -> Grammar:
    """One call: the Lark that `before` returns for its name, then its arguments as JSON."""
    rules = [f"start: {any_of(tools)}"]
    for number, (name, schema) in enumerate(tools):
        rules.append(f"f{number}: {before(name)} {json_value(as_object(schema))}")
    return "lark", "\n".join(rules) + "\n"


def any_value(described: Any, schema: Mapping[str, Any]) -> str:
    """A parameter as JSON. References are resolved within `schema`."""
    if not isinstance(described, Mapping):
        return json_value({})
    definitions = {
        key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema
    }
    return json_value({**definitions, **described})


def full_pattern(described: Mapping[str, Any]) -> str | None:
    """The regular expression for a whole text with the schema's `pattern`, escaped for Lark
    slashes.

    None if the schema has no pattern, or one that grammars do not support.
    """
    pattern = described.get("pattern")
    if not isinstance(pattern, str) or _NOT_REGULAR.search(pattern):
        return None
    anchored = re.fullmatch(r"\^(?P<body>.*)\$", pattern, re.DOTALL)
    if anchored is None or "|" in re.sub(r"\(.*\)|\\.", "", anchored["body"], flags=re.DOTALL):
        return None  # ^ and $ belong to one alternative each
    return f"(?:{slashed(anchored['body'])})"


def slashed(expression: str) -> str:
    """`expression` as written between the slashes of a Lark expression."""
    escaped = _SLASH.sub(_with_escaped_slash, expression)
    return escaped.replace("\\\n", r"\n").replace("\n", r"\n")


def _with_escaped_slash(match: re.Match[str]) -> str:
    return match[1] or r"\/"


def any_of(tools: NamedSchemas) -> str:
    """An alternative of the rules f0, f1, …, one per tool."""
    return " | ".join(f"f{number}" for number in range(len(tools)))


def in_any_order(
    prefix: str, named: Sequence[tuple[str, bool]], rules: list[str], comma: str = ""
) -> str:
    """The Lark of parameters in any order, separated by the Lark `comma`.

    Each parameter is the name of a rule and whether it is required. Further rules are added to
    `rules` under names that begin with `prefix`.

    If the schema's order were enforced, a model could no longer write an optional parameter after a
    later one. So a few parameters may come in any order, each once. For many, this would take too
    many rules: they come in order, and optional ones may follow at the end.
    """
    if not named:
        return ""
    if len(named) > _MAX_IN_ANY_ORDER:
        optional_names = [name for name, is_required in named if not is_required]
        optional_at_end = ""
        if len(optional_names) > 1:
            optional_at_end = f"({comma} ({' | '.join(optional_names)})){{0,{len(optional_names)}}}"
        return in_order(prefix, named, rules, comma, optional_at_end)
    all_remaining = 2 ** len(named) - 1
    for remaining in range(1, all_remaining + 1):
        alternatives = []
        may_end = True
        separator = comma if remaining < all_remaining else ""
        for i, (name, is_required) in enumerate(named):
            if not remaining >> i & 1:
                continue
            after_this = remaining & ~(1 << i)
            alternative = f"{separator} {name} "
            if after_this:
                alternative += f"{prefix}_l{after_this}"
            alternatives.append(alternative)
            if is_required:
                may_end = False
        if may_end:
            alternatives.append("")
        rules.append(f"{prefix}_l{remaining}: {' | '.join(alternatives)}")
    return f"{prefix}_l{all_remaining}"


def in_order(
    prefix: str,
    named: Sequence[tuple[str, bool]],
    rules: list[str],
    comma: str = "",
    optional_at_end: str = "",
) -> str:
    """Like `in_any_order`, but in the given order, with `optional_at_end` after the last
    parameter."""
    if not comma:
        return " ".join(
            [*(name if is_required else f"{name}?" for name, is_required in named), optional_at_end]
        )
    # A parameter has a comma only if another one precedes it.
    for i, (name, is_required) in enumerate(named):
        first_rule = f"{prefix}_first{i}: {name} {prefix}_more{i + 1}"
        further_rule = f"{prefix}_more{i}: {comma} {name} {prefix}_more{i + 1}"
        if not is_required:
            first_rule += f" | {prefix}_first{i + 1}"
            further_rule += f" | {prefix}_more{i + 1}"
        rules += [first_rule, further_rule]
    end = len(named)
    rules += [f'{prefix}_first{end}: ""', f"{prefix}_more{end}: {optional_at_end or text('')}"]
    return f"{prefix}_first0"
