"""Lark pieces that the grammars of calls are put together from, one function per shape a call's arguments have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from localllm.conversation.tools.base import Grammar, Named, UnheldError
from localllm.conversation.tools.schemas import as_object, is_text, names_all, parameters, words_of

# As the engine has it for a schema alone (localllm/engine/constraint.py).
SPACE = r"( |\n{1,2}[ \t]{0,20})?"
# Tokens as llguidance's Lark writes them: by their names, without quotes.
_CONTROL = re.compile(r"(<[^<>\s]+>)")


def text(said: str) -> str:
    """A Lark string; its escapes are JSON's."""
    return json.dumps(said, ensure_ascii=False)


def spelled(said: str) -> str:
    """`said`, in which everything between < and > is a control token: text can't spell one."""
    return " ".join(p if _CONTROL.fullmatch(p) else text(p) for p in _CONTROL.split(said) if p)


def json_value(schema: Mapping[str, Any]) -> str:
    """JSON that matches `schema`."""
    return f"%json {json.dumps({'x-guidance': {'whitespace_pattern': SPACE}, **schema})}"


def json_calls(tools: Named, before: Callable[[str], str]) -> Grammar:
    """One call: the Lark that `before` has for its name, then its arguments as JSON."""
    rules = [f"f{f}: {before(name)} {json_value(as_object(schema))}" for f, (name, schema) in enumerate(tools)]
    return "lark", "\n".join([f"start: {_any(tools)}", *rules]) + "\n"


def tagged_calls(
    tools: Named,
    *,
    head: Callable[[str], str],
    before: Callable[[str], str],
    after: str,
    end: str,
    repeat: bool = False,
) -> Grammar:
    """Calls whose parameters stand between tags, in the schema's order: text parameters up to the closing tag, all
    others as JSON. Raises UnheldError for a schema that leaves names open."""
    _check_names(tools)
    rules: list[str] = []
    for f, (name, schema) in enumerate(tools):
        parts = [text(head(name))]
        for p, (key, described, wanted) in enumerate(parameters(schema)):
            parts.append(f"f{f}_p{p}" + ("" if wanted else "?"))
            rules.append(f"f{f}_p{p}: {text(before(key))} {_tagged_value(described, schema, after)}")
        rules.append(f"f{f}: {' '.join(parts)}{' ' + text(end) if end else ''}")
    many = "+" if repeat else ""
    free = f"free[suffix={text(after)}]: /(?s:.*)/"
    return "lark", "\n".join([f"start: ({_any(tools)}){many}", *rules, free]) + "\n"


def listed_calls(
    tools: Named,
    *,
    head: Callable[[str], str],
    between: str,
    end: str,
    pair: Callable[[str, Any, Mapping[str, Any]], str],
    start: str = "call",
) -> Grammar:
    """Calls whose parameters stand in the schema's order with `between` from one to the next; `pair` makes the Lark of
    one from its key, its schema and the schema of all. `start` makes the whole of `call`s. Raises UnheldError for a
    schema that leaves names open."""
    _check_names(tools)
    rules: list[str] = []
    for f, (name, schema) in enumerate(tools):
        rules.append(f"f{f}: {text(head(name))} f{f}_first0 {text(end)}")
        offered = parameters(schema)
        for p, (key, described, wanted) in enumerate(offered):
            # Two rules for each: whether a parameter stands before it decides about `between`.
            rest = f"f{f}_more{p + 1}"
            rules += [
                f"f{f}_p{p}: {pair(key, described, schema)}",
                f"f{f}_first{p}: f{f}_p{p} {rest}" + ("" if wanted else f" | f{f}_first{p + 1}"),
                f"f{f}_more{p}: {text(between)} f{f}_p{p} {rest}" + ("" if wanted else f" | {rest}"),
            ]
        rules += [f'f{f}_first{len(offered)}: ""', f'f{f}_more{len(offered)}: ""']
    return "lark", "\n".join([f"start: {start}", f"call: {_any(tools)}", *rules]) + "\n"


def any_value(described: Any, schema: Mapping[str, Any]) -> str:
    """A parameter as JSON; `schema` is where its references point to."""
    if not isinstance(described, Mapping):
        return json_value({})
    return json_value({**_definitions(schema), **described})


def _check_names(tools: Named) -> None:
    """Where parameters are written one by one, the schema must name them: else the grammar would keep from the model
    what it must say."""
    if not all(names_all(schema) for _, schema in tools):
        raise UnheldError


def _tagged_value(described: Any, schema: Mapping[str, Any], after: str) -> str:
    words = words_of(described)
    if words is not None:
        return f"({' | '.join(map(text, words))}) {text(after)}"
    return "free" if is_text(described) else f"{any_value(described, schema)} {text(after)}"


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {k: schema[k] for k in ("$defs", "definitions") if k in schema}


def _any(tools: Named) -> str:
    return " | ".join(f"f{f}" for f in range(len(tools)))
