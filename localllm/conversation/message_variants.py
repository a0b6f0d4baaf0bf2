"""One conversation in the variants that chat templates accept: as sent first, then stricter forms.

Templates differ in what they accept: nine-character call ids, one call per turn, arguments as text,
one system message or no system message. All variants have the same content. A template gets the
first one that it accepts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
Messages: TypeAlias = Sequence[Message]
Variables: TypeAlias = dict[str, Any]

_FIRST_CALL_ONLY = ("reasoning_content", "thinking")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def variants(
    messages: Messages, tools: Sequence[Mapping[str, Any]] | None
) -> Iterator[tuple[Messages, Variables]]:
    """The conversation as sent with its `tools` (None without tools), then its other variants, each
    once."""
    tried: list[tuple[Messages, Variables]] = []
    # Later system messages stay in their place, as messages of the user.
    one_system = _merge_equal_roles(_systems_to_user(_merge_equal_roles(messages), first=1))
    no_system = _merge_equal_roles(_systems_to_user(one_system, first=0))
    for turns in (messages, one_system, no_system):
        for form in _spellings(turns, tools):
            if form not in tried:
                tried.append(form)
                yield form


def _spellings(
    messages: Messages, tools: Sequence[Mapping[str, Any]] | None
) -> Iterator[tuple[Messages, Variables]]:
    """The same turns in increasingly strict forms."""
    yield messages, {"tools": tools}
    completed = _completed_variables(tools)
    spelt: Messages = with_short_ids(messages)
    yield spelt, completed
    steps: tuple[Callable[[Messages], Messages], ...] = (one_call_a_turn, _one_text_before_calls)
    for step in steps:
        spelt = step(spelt)
        yield spelt, completed
    # These come last. A template that writes arguments with `tojson` would accept texts too, and
    # quote them twice.
    yield _with_text_arguments(with_short_ids(messages)), completed
    yield _with_text_arguments(spelt), completed


def _completed_variables(tools: Sequence[Mapping[str, Any]] | None) -> Variables:
    """The variables that stricter templates need.

    `tools` is left undefined instead of None, or has complete descriptions of every parameter.
    Older templates also use `functions` and `datetime`.
    """
    functions = [tool.get("function", tool) for tool in tools or ()]
    variables: Variables = {
        "functions": json.dumps(functions, ensure_ascii=False, indent=4),
        # only the day: an hour in the prompt would make every cached prefix useless
        "datetime": datetime.now().strftime("%B %d %Y"),
    }
    if tools is not None:
        variables["tools"] = [_described(tool) for tool in tools]
    return variables


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function", {})
    schema = function.get("parameters") or {}
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return dict(tool)
    defaults = {"type": "string", "description": "", "items": {}, "additionalProperties": {}}
    described = dict(properties)
    for name, sent in properties.items():
        if isinstance(sent, Mapping):
            described[name] = {**defaults, **sent}
    parameters = {**schema, "properties": described}
    return {**tool, "function": {**function, "parameters": parameters}}


def with_short_ids(messages: Messages) -> Messages:
    """Call ids of nine letters and digits (Mistral's rule), equal for a call and its result.

    A result without an id gets the id of the oldest call that has no result yet.
    """
    changed: list[Message] = []
    waiting: list[str] = []
    for m in messages:
        if m.get("tool_calls"):
            calls = []
            for i, call in enumerate(m["tool_calls"]):
                calls.append({**call, "id": _short_id(str(call.get("id") or i))})
            waiting = [call["id"] for call in calls]
            m = {**m, "tool_calls": calls}
        elif m["role"] == "tool":
            sent = m.get("tool_call_id")
            if sent or not waiting:
                identity = _short_id(sent or "0")
            else:
                identity = waiting[0]
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
    """Parallel calls as separate turns of one call, each followed by its own results."""
    split: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        calls = message.get("tool_calls") or ()
        results = []
        at += 1
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for call in calls[:-1]:
            own = _results_of(call, results)
            results = [r for r in results if not any(r is o for o in own)]
            split.append({**message, "tool_calls": [call]})
            split += own
            later = {name: v for name, v in message.items() if name not in _FIRST_CALL_ONLY}
            message = {**later, "content": ""}
        if calls:
            message = {**message, "tool_calls": [calls[-1]]}
        split.append(message)
        split += results
    return split


def _results_of(call: Mapping[str, Any], results: Messages) -> Messages:
    own = [r for r in results if r.get("tool_call_id") == call.get("id")]
    if not own and not any(r.get("tool_call_id") for r in results):
        return results[:1]  # no result has an id: results are in the order of the calls
    return own


def _one_text_before_calls(messages: Messages) -> Messages:
    """Reasoning and text before a call as one text, for a template that accepts only one of
    them."""
    changed: list[Message] = []
    for m in messages:
        if m.get("tool_calls") and m.get("thinking") and m.get("content"):
            m = {**m, "thinking": f"{m['thinking']}\n\n{m['content']}", "content": ""}
        changed.append(m)
    return changed


def _with_text_arguments(messages: Messages) -> Messages:
    changed: list[Message] = []
    for m in messages:
        if m.get("tool_calls"):
            m = {**m, "tool_calls": [_text_call(call) for call in m["tool_calls"]]}
        changed.append(m)
    return changed


def _text_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _systems_to_user(messages: Messages, *, first: int) -> list[Message]:
    changed: list[Message] = []
    for i, m in enumerate(messages):
        if i >= first and m["role"] == "system":
            m = {**m, "role": "user"}
        changed.append(m)
    return changed


def _merge_equal_roles(messages: Messages) -> list[Message]:
    merged: list[Message] = []
    for m in messages:
        last = merged[-1] if merged else None
        if last is None or m["role"] != last["role"] or m["role"] == "tool":
            merged.append(m)
            continue
        both = {**last, **m}
        both["content"] = f"{last.get('content') or ''}\n\n{m.get('content') or ''}".strip()
        calls = [*(last.get("tool_calls") or ()), *(m.get("tool_calls") or ())]
        if calls:
            both["tool_calls"] = calls
        merged[-1] = both
    return merged
