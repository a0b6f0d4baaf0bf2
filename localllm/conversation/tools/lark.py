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
_MAX_FREE = 4
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)
# Unsupported by a derivative-based matcher: lookaround and backreferences.
_BEYOND_REGULAR = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]")


def spelled(literal: str) -> str:
    """The Lark of `literal`, with everything between < and > as a control token.

    A text can't spell a control token.
    """
    return " ".join(p if _CONTROL.fullmatch(p) else text(p) for p in _CONTROL.split(literal) if p)


def text(literal: str) -> str:
    """A Lark string; its escapes are JSON's."""
    return json.dumps(literal, ensure_ascii=False)


def json_value(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema)}"


def json_calls(tools: NamedSchemas, before: Callable[[str], str]) -> Grammar:
    """One call: the Lark that `before` returns for its name, then its arguments as JSON."""
    rules = [f"start: {any_of(tools)}"]
    for f, (name, schema) in enumerate(tools):
        rules.append(f"f{f}: {before(name)} {json_value(as_object(schema))}")
    return "lark", "\n".join(rules) + "\n"


def any_value(described: Any, schema: Mapping[str, Any]) -> str:
    """A parameter as JSON. References are resolved within `schema`."""
    if not isinstance(described, Mapping):
        return json_value({})
    shared = {k: schema[k] for k in ("$defs", "definitions", "x-guidance") if k in schema}
    return json_value({**shared, **described})


def full_pattern(described: Mapping[str, Any]) -> str | None:
    """The regular expression for a whole text with the schema's `pattern`, escaped for Lark
    slashes.

    None if the schema has no pattern, or one that grammars do not support.
    """
    pattern = described.get("pattern")
    if not isinstance(pattern, str) or _BEYOND_REGULAR.search(pattern):
        return None
    whole = re.fullmatch(r"\^(?P<body>.*)\$", pattern, re.DOTALL)
    if whole is None or "|" in re.sub(r"\(.*\)|\\.", "", whole["body"], flags=re.DOTALL):
        return None  # ^ and $ belong to one alternative each
    return f"(?:{slashed(whole['body'])})"


def slashed(expression: str) -> str:
    """`expression` as written between the slashes of a Lark expression."""
    escaped = _SLASH.sub(_with_escaped_slash, expression)
    return escaped.replace("\\\n", r"\n").replace("\n", r"\n")


def _with_escaped_slash(found: re.Match[str]) -> str:
    return found[1] or r"\/"


def any_of(tools: NamedSchemas) -> str:
    """An alternative of the rules f0, f1, …, one per tool."""
    return " | ".join(f"f{f}" for f in range(len(tools)))


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
    if len(named) > _MAX_FREE:
        free = [name for name, wanted in named if not wanted]
        late = ""
        if len(free) > 1:
            late = f"({comma} ({' | '.join(free)})){{0,{len(free)}}}"
        return in_order(prefix, named, rules, comma, late)
    whole = 2 ** len(named) - 1
    for left in range(1, whole + 1):
        ways = []
        may_end = True
        lead = comma if left < whole else ""
        for i, (name, wanted) in enumerate(named):
            if not left >> i & 1:
                continue
            others = left & ~(1 << i)
            way = f"{lead} {name} "
            if others:
                way += f"{prefix}_l{others}"
            ways.append(way)
            if wanted:
                may_end = False
        if may_end:
            ways.append("")
        rules.append(f"{prefix}_l{left}: {' | '.join(ways)}")
    return f"{prefix}_l{whole}"


def in_order(
    prefix: str,
    named: Sequence[tuple[str, bool]],
    rules: list[str],
    comma: str = "",
    late: str = "",
) -> str:
    """Like `in_any_order`, but in the given order, with `late` after the last parameter."""
    if not comma:
        return " ".join([*(name if wanted else f"{name}?" for name, wanted in named), late])
    # A parameter has a comma only if another one precedes it.
    for i, (name, wanted) in enumerate(named):
        first = f"{prefix}_first{i}: {name} {prefix}_more{i + 1}"
        more = f"{prefix}_more{i}: {comma} {name} {prefix}_more{i + 1}"
        if not wanted:
            first += f" | {prefix}_first{i + 1}"
            more += f" | {prefix}_more{i + 1}"
        rules += [first, more]
    end = len(named)
    rules += [f'{prefix}_first{end}: ""', f"{prefix}_more{end}: {late or text('')}"]
    return f"{prefix}_first0"
