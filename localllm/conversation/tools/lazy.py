"""Calls a model begins by itself: once the opening marker is there, a grammar holds the call to its tool's schema.

Nothing is constrained before: the model is stopped at the marker, the marker and what always follows it are put behind
its words, and the rest of the call is generated under the grammar. So an answer without a call costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.conversation.tools.base import Tool, ToolFormat, parameters_of
from localllm.conversation.tools.prompt import any_call, as_object

Grammar = tuple[str, str]
# As the engine has it for a schema alone (localllm/engine/constraint.py).
_SPACE = r"( |\n{1,2}[ \t]{0,20})?"


@dataclass(frozen=True, slots=True)
class Start:
    """What follows an opening: `lead` always, then what `grammar` allows, then `closing` always. `again`: another call
    may come behind it."""

    lead: str
    grammar: Grammar
    closing: str = ""
    again: bool = False


def starts_of(style: ToolFormat, template: str, tools: Sequence[Tool]) -> dict[str, Start]:
    """Openings of calls in `style` and what may follow them; {} for formats whose calls no grammar here describes
    (they are read as the model writes them)."""
    make = _STYLES.get(style.name)
    return make(template, [parameters_of(t) for t in tools]) if make is not None and tools else {}


def either(style: ToolFormat, template: str, tools: Sequence[Tool], schema: str, marker_id: int | None) -> str | None:
    """A Lark grammar of an answer that matches the JSON schema `schema`, or one tool call; None where the format's
    calls can't be described. `marker_id`: the opening marker's token, where it is one."""
    if style.name == "llama3":
        call = _json(any_call([parameters_of(t) for t in tools], style.arguments_key))
        return f"start: answer | call\nanswer: {_json(json.loads(schema))}\ncall: {call}\n"
    starts = starts_of(style, template, tools)
    if not starts:
        return None
    marker, start = next(iter(starts.items()))
    opening = f"<[{marker_id}]>" if marker_id is not None else _text(marker)
    kind, source = start.grammar
    body, rules = (
        (_json(json.loads(source)), "") if kind == "json_schema" else ("body", source.replace("start:", "body:", 1))
    )
    lead = f"{_text(start.lead)} " if start.lead else ""
    # A closing marker may be a control token, which text can't spell: the reader does without it at the reply's end.
    return f"start: answer | call\nanswer: {_json(json.loads(schema))}\ncall: {opening} {lead}{body}\n{rules}"


Named = Sequence[tuple[str, Mapping[str, Any]]]


def _hermes(template: str, tools: Named) -> dict[str, Start]:
    return {
        "<tool_call>": Start(
            "\n", ("json_schema", json.dumps(any_call(tools, "arguments"))), "\n</tool_call>", again=True
        )
    }


def _list_after(marker: str) -> Callable[[str, Named], dict[str, Start]]:
    def starts(template: str, tools: Named) -> dict[str, Start]:
        if "[ARGS]" in template:
            return {}  # a newer spelling, whose inner marker is a control token
        call = any_call(tools, "arguments")
        schema = {"type": "array", "items": {"anyOf": call["anyOf"]}, "minItems": 1, "$defs": call["$defs"]}
        return {marker: Start("", ("json_schema", json.dumps(schema)))}

    return starts


def _llama3(template: str, tools: Named) -> dict[str, Start]:
    # An answer in JSON may begin like a call: only a known name with its parameters is one.
    return {
        f'{{"name": {json.dumps(n)}, "parameters": ': Start("", ("json_schema", json.dumps(as_object(s))), "}")
        for n, s in tools
    }


def _qwen_coder(template: str, tools: Named) -> dict[str, Start]:
    lark = _functions(
        tools,
        head=lambda name: f"<function={name}>\n",
        before=lambda key: f"<parameter={key}>\n",
        after="\n</parameter>\n",
        end="</function>",
    )
    return {"<tool_call>": Start("\n", lark, "\n</tool_call>", again=True)}


def _glm(template: str, tools: Named) -> dict[str, Start]:
    lark = _functions(
        tools,
        head=lambda name: f"{name}\n",
        before=lambda key: f"<arg_key>{key}</arg_key>\n<arg_value>",
        after="</arg_value>\n",
        end="",
    )
    return {"<tool_call>": Start("", lark, "</tool_call>", again=True)}


def _minimax(template: str, tools: Named) -> dict[str, Start]:
    lark = _functions(
        tools,
        head=lambda name: f'<invoke name="{name}">\n',
        before=lambda key: f'<parameter name="{key}">',
        after="</parameter>\n",
        end="</invoke>\n",
        repeat=True,
    )
    return {"<minimax:tool_call>": Start("\n", lark, "</minimax:tool_call>")}


def _functions(
    tools: Named,
    *,
    head: Callable[[str], str],
    before: Callable[[str], str],
    after: str,
    end: str,
    repeat: bool = False,
) -> Grammar:
    """A Lark grammar of calls whose parameters stand between tags, in the schema's order: text parameters up to the
    closing tag, all others as JSON."""
    rules: list[str] = []
    for f, (name, schema) in enumerate(tools):
        properties = schema.get("properties")
        required = schema.get("required")
        wanted = set(required) if isinstance(required, list) else set()
        parts = [_text(head(name))]
        for p, (key, described) in enumerate(properties.items() if isinstance(properties, Mapping) else ()):
            parts.append(f"f{f}_p{p}" + ("" if key in wanted else "?"))
            rules.append(f"f{f}_p{p}: {_text(before(key))} {_value(described, schema, after)}")
        rules.append(f"f{f}: {' '.join(parts)}{' ' + _text(end) if end else ''}")
    names = " | ".join(f"f{f}" for f in range(len(tools)))
    many = "+" if repeat else ""
    free = f"free[suffix={_text(after)}]: /(?s:.*)/"
    return "lark", "\n".join([f"start: ({names}){many}", *rules, free]) + "\n"


def _value(described: Any, schema: Mapping[str, Any], after: str) -> str:
    if not isinstance(described, Mapping):
        return "free"
    options = described.get("enum")
    if isinstance(options, list) and options and all(isinstance(o, str) for o in options):
        return f"({' | '.join(_text(o) for o in options)}) {_text(after)}"
    kind = described.get("type")
    if kind is None and not {"anyOf", "oneOf", "$ref", "const"} & set(described):
        return "free"
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return "free"
    definitions = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
    return f"{_json({**definitions, **described})} {_text(after)}"


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({'x-guidance': {'whitespace_pattern': _SPACE}, **schema})}"


def _text(text: str) -> str:
    """A Lark string; its escapes are JSON's."""
    return json.dumps(text, ensure_ascii=False)


_STYLES: Mapping[str, Callable[[str, Named], dict[str, Start]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _list_after("[TOOL_CALLS]"),
    "phi": _list_after("<|tool_call|>"),
    "qwen_coder": _qwen_coder,
    "glm": _glm,
    "minimax": _minimax,
}
