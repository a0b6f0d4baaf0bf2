"""Calls a model begins by itself: once the opening marker is there, a grammar holds the call to its tool's schema.

Nothing is constrained before: the model is stopped at the marker, the marker and what always follows it are put behind
its words, and the rest of the call is generated under the grammar. So an answer without a call costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from localllm.conversation.tools.base import Start, Tool, ToolFormat, UnheldError, parameters_of
from localllm.conversation.tools.lark import json_value, spelled, text

__all__ = ["Start", "answer_alone", "either", "starts_of"]


def starts_of(style: ToolFormat, template: str, tools: Sequence[Tool]) -> dict[str, Start]:
    """Openings of calls in `style` and what may follow them, the first of a reply before those of further calls; {} for
    calls that no grammar here describes (they are read as the model writes them)."""
    if not tools:
        return {}
    try:
        return style.starts(template, [parameters_of(t) for t in tools])
    except UnheldError:
        return {}


def either(style: ToolFormat, template: str, tools: Sequence[Tool], schema: str, marker_id: int | None) -> str | None:
    """A Lark grammar of an answer that matches the JSON schema `schema`, or one tool call; None where the format's
    calls can't be described. `marker_id`: the opening marker's token, where it is one."""
    unmarked = style.unmarked_call([parameters_of(t) for t in tools])
    call = f"call_: {unmarked}\n" if unmarked is not None else _marked_call(style, template, tools, marker_id)
    if call is None:
        return None
    choices, answer = "answer | call_", json_value(json.loads(schema))
    return (style.framed(choices, answer) or f"start: {choices}\nanswer: {answer}\n") + call


def answer_alone(style: ToolFormat, schema: str) -> str | None:
    """A Lark grammar of an answer that matches the JSON schema `schema`; None where the bare schema says it all."""
    return style.framed("answer", json_value(json.loads(schema)))


def _marked_call(style: ToolFormat, template: str, tools: Sequence[Tool], marker_id: int | None) -> str | None:
    """The rules of `call_`: the first marker, then what its grammar allows."""
    starts = starts_of(style, template, tools)
    if not starts:
        return None
    opening, start = next(iter(starts.items()))
    if opening not in style.markers:
        return None  # each function has its own opening, and may have a control token in it that no grammar can spell
    if style.named_tokens:
        head = f"{spelled(opening)} {spelled(start.lead)}"
    else:
        marker = f"<[{marker_id}]>" if marker_id is not None else text(opening)
        head = f"{marker} {text(start.lead) if start.lead else ''}"
    kind, source = start.grammar
    body, rules = (
        (json_value(json.loads(source)), "")
        if kind == "json_schema"
        else ("body", source.replace("start:", "body:", 1))
    )
    # A closing marker may be a control token, which text can't spell: the reader does without it at the reply's end.
    return f"call_: {head} {body}\n{rules}"
