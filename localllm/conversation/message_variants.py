"""One conversation in the variants that chat templates accept: as sent first, then what stricter
templates insist on.

Templates disagree about what a conversation may hold: nine-character call ids, one call a turn,
arguments as text, one system message or none. Each variant says the same in other words; a template
gets the first that it takes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
Messages: TypeAlias = Sequence[Message]
Variables: TypeAlias = dict[str, Any]

_SAID_ONCE = ("reasoning_content", "thinking")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def variants(
    messages: Messages, tools: Sequence[Mapping[str, Any]] | None
) -> Iterator[tuple[Messages, Variables]]:
    """The conversation as sent with its `tools` (None where there are none), then its other
    variants, each once."""
    tried: list[tuple[Messages, Variables]] = []
    # Later system texts stay in their place, in the user's name.
    one_system = _merge_equal_roles(_systems_to_user(_merge_equal_roles(messages), behind=1))
    no_system = _merge_equal_roles(_systems_to_user(one_system, behind=0))
    for turns in (messages, one_system, no_system):
        for form in _spellings(turns, tools):
            if form not in tried:
                tried.append(form)
                yield form


def _spellings(
    messages: Messages, tools: Sequence[Mapping[str, Any]] | None
) -> Iterator[tuple[Messages, Variables]]:
    """The same turns, spelt ever more narrowly."""
    yield messages, {"tools": tools}
    completed = _completed_variables(tools)
    spelt: Messages = with_short_ids(messages)
    yield spelt, completed
    steps: tuple[Callable[[Messages], Messages], ...] = (one_call_a_turn, _one_text_before_calls)
    for step in steps:
        spelt = step(spelt)
        yield spelt, completed
    # Last, as a template that writes arguments with `tojson` would take texts too, and quote them
    # twice.
    yield _with_text_arguments(with_short_ids(messages)), completed
    yield _with_text_arguments(spelt), completed


def _completed_variables(tools: Sequence[Mapping[str, Any]] | None) -> Variables:
    """The variables of a template that can't do without: `tools` left undefined instead of none, or
    with every parameter described to the end, and what older templates call `functions` and
    `datetime`."""
    variables: Variables = {
        "functions": json.dumps(
            [t.get("function", t) for t in tools or ()], ensure_ascii=False, indent=4
        ),
        # the day: an hour in the prompt would end every prefix
        "datetime": datetime.now().strftime("%B %d %Y"),
    }
    if tools is not None:
        variables["tools"] = [_described(t) for t in tools]
    return variables


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function", {})
    schema = function.get("parameters") or {}
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return dict(tool)
    described = {
        name: {"type": "string", "description": "", "items": {}, "additionalProperties": {}, **p}
        if isinstance(p, Mapping)
        else p
        for name, p in properties.items()
    }
    return {**tool, "function": {**function, "parameters": {**schema, "properties": described}}}


def with_short_ids(messages: Messages) -> Messages:
    """Call ids of nine letters and digits (Mistral's rule), the same for a call and its result; a
    result that names no call gets the id of the oldest call without one."""
    changed: list[Message] = []
    waiting: list[str] = []
    for m in messages:
        if m.get("tool_calls"):
            calls = [
                {**c, "id": _short_id(str(c.get("id") or i))} for i, c in enumerate(m["tool_calls"])
            ]
            waiting = [c["id"] for c in calls]
            m = {**m, "tool_calls": calls}
        elif m["role"] == "tool":
            sent = m.get("tool_call_id")
            if sent:
                identity = _short_id(sent)
            else:
                identity = next(iter(waiting), _short_id("0"))
            if identity in waiting:
                waiting.remove(identity)
            m = {**m, "tool_call_id": identity}
        changed.append(m)
    return changed


def _short_id(identity: str) -> str:
    if _SHORT_ID.fullmatch(identity):
        return identity
    return hashlib.sha256(identity.encode()).hexdigest()[:9]


def one_call_a_turn(messages: Messages) -> Messages:
    """Parallel calls as turns of one call each, every call followed by its own results."""
    split: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        calls = message.get("tool_calls") or ()
        results = list(itertools.takewhile(lambda m: m["role"] == "tool", messages[at + 1 :]))
        at += 1 + len(results)
        for call in calls[:-1]:
            own = _results_of(call, results)
            results = [r for r in results if not any(r is o for o in own)]
            split += [{**message, "tool_calls": [call]}, *own]
            later = {name: v for name, v in message.items() if name not in _SAID_ONCE}
            message = {**later, "content": ""}
        split += [{**message, "tool_calls": [calls[-1]]} if calls else message, *results]
    return split


def _results_of(call: Mapping[str, Any], results: Messages) -> Messages:
    own = [r for r in results if r.get("tool_call_id") == call.get("id")]
    if not own and not any(r.get("tool_call_id") for r in results):
        return results[:1]  # nothing names a call: results come in the order of the calls
    return own


def _one_text_before_calls(messages: Messages) -> Messages:
    """Thinking and words before a call as one text, for a template that takes either."""
    return [
        {**m, "thinking": f"{m['thinking']}\n\n{m['content']}", "content": ""}
        if m.get("tool_calls") and m.get("thinking") and m.get("content")
        else m
        for m in messages
    ]


def _with_text_arguments(messages: Messages) -> Messages:
    return [
        {**m, "tool_calls": [_text_call(c) for c in m["tool_calls"]]} if m.get("tool_calls") else m
        for m in messages
    ]


def _text_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        text = arguments
    else:
        text = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _systems_to_user(messages: Messages, *, behind: int) -> list[Message]:
    return [
        {**m, "role": "user"} if i >= behind and m["role"] == "system" else m
        for i, m in enumerate(messages)
    ]


def _merge_equal_roles(messages: Messages) -> list[Message]:
    merged: list[Message] = []
    for m in messages:
        last = merged[-1] if merged else None
        if last is not None and m["role"] == last["role"] and m["role"] != "tool":
            content = f"{last.get('content') or ''}\n\n{m.get('content') or ''}".strip()
            calls = [*(last.get("tool_calls") or ()), *(m.get("tool_calls") or ())]
            merged[-1] = {
                **last,
                **m,
                "content": content,
                **({"tool_calls": calls} if calls else {}),
            }
        else:
            merged.append(m)
    return merged
