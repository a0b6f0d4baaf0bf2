"""Lark pieces that the grammars of calls are put together from, one function per shape a call's arguments have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from localllm.conversation.tools.prompt import as_object

Grammar: TypeAlias = tuple[str, str]
"""A kind of grammar the engine knows and its source."""
Named: TypeAlias = Sequence[tuple[str, Mapping[str, Any]]]
"""Functions: name and the JSON schema of the parameters."""

# As the engine has it for a schema alone (localllm/engine/constraint.py).
SPACE = r"( |\n{1,2}[ \t]{0,20})?"
# Tokens as llguidance's Lark writes them: by their names, without quotes.
_CONTROL = re.compile(r"(<[^<>\s]+>)")
# Words of a schema that say something about the arguments as a whole.
_BEYOND = frozenset(
    {
        "$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
    }
)  # fmt: skip


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
    others as JSON."""
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
    one from its key, its schema and the schema of all. `start` makes the whole of `call`s."""
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


def parameters(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Name and schema of every parameter, and whether it must be there."""
    properties, required = schema.get("properties"), schema.get("required")
    wanted = set(required) if isinstance(required, list) else set()
    return [(k, v, k in wanted) for k, v in (properties.items() if isinstance(properties, Mapping) else ())]


def names_all(schema: Mapping[str, Any]) -> bool:
    """True when the arguments are no more than `parameters`: none must be there that it does not describe, nor do they
    depend on one another, and a schema that describes none wants none."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if _BEYOND & set(schema) or not isinstance(required, list):
        return False
    if not isinstance(properties, Mapping):
        return not required and (not schema or schema.get("additionalProperties") is False)
    return set(required) <= set(properties)


def words_of(described: Any) -> list[str] | None:
    """The texts an enumeration of texts (or a constant one) allows; None for any other schema."""
    if not isinstance(described, Mapping):
        return None
    options = [described["const"]] if "const" in described else described.get("enum")
    return options if isinstance(options, list) and options and all(isinstance(o, str) for o in options) else None


def is_text(described: Any) -> bool:
    """True for a schema that wants text, or says nothing."""
    if not isinstance(described, Mapping):
        return True
    kind = described.get("type")
    if kind is None:
        return not {"anyOf", "oneOf", "allOf", "$ref", "const", "enum"} & set(described)
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def _tagged_value(described: Any, schema: Mapping[str, Any], after: str) -> str:
    words = words_of(described)
    if words is not None:
        return f"({' | '.join(map(text, words))}) {text(after)}"
    return "free" if is_text(described) else f"{any_value(described, schema)} {text(after)}"


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {k: schema[k] for k in ("$defs", "definitions") if k in schema}


def _any(tools: Named) -> str:
    return " | ".join(f"f{f}" for f in range(len(tools)))
