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

_FIRST_CALL_FIELDS = ("reasoning_content", "thinking")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def variants(
    messages: Messages, tools: Sequence[Mapping[str, Any]] | None
) -> Iterator[tuple[Messages, Variables]]:
    """The conversation as sent with its `tools` (None without tools), then its other variants, each
    once."""
    yielded: list[tuple[Messages, Variables]] = []
    # Later system messages stay in their place, as messages of the user.
    one_system = _merge_equal_roles(_systems_to_user(_merge_equal_roles(messages), first=1))
    no_system = _merge_equal_roles(_systems_to_user(one_system, first=0))
    for turns in (messages, one_system, no_system):
        for form in _stricter_forms(turns, tools):
            if form not in yielded:
                yielded.append(form)
                yield form


def _stricter_forms(
    messages: Messages, tools: Sequence[Mapping[str, Any]] | None
) -> Iterator[tuple[Messages, Variables]]:
    """The same turns in increasingly strict forms."""
    yield messages, {"tools": tools}
    completed = _completed_variables(tools)
    strict_messages: Messages = with_short_ids(messages)
    yield strict_messages, completed
    steps: tuple[Callable[[Messages], Messages], ...] = (one_call_per_turn, _one_text_before_calls)
    for step in steps:
        strict_messages = step(strict_messages)
        yield strict_messages, completed
    # These come last. A template that writes arguments with `tojson` would accept texts too, and
    # quote them twice.
    yield _with_text_arguments(with_short_ids(messages)), completed
    yield _with_text_arguments(strict_messages), completed


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
    unanswered_ids: list[str] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for i, call in enumerate(message["tool_calls"]):
                calls.append({**call, "id": _short_id(str(call.get("id") or i))})
            unanswered_ids = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            sent_id = message.get("tool_call_id")
            if sent_id or not unanswered_ids:
                short_id = _short_id(sent_id or "0")
            else:
                short_id = unanswered_ids[0]
            if short_id in unanswered_ids:
                unanswered_ids.remove(short_id)
            message = {**message, "tool_call_id": short_id}
        changed.append(message)
    return changed


def _short_id(identity: str) -> str:
    if _SHORT_ID.fullmatch(identity):
        return identity
    return hashlib.sha256(identity.encode()).hexdigest()[:9]


def one_call_per_turn(messages: Messages) -> Messages:
    """Parallel calls as separate turns of one call, each followed by its own results."""
    split: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        calls = message.get("tool_calls") or ()
        results = []
        index += 1
        while index < len(messages) and messages[index]["role"] == "tool":
            results.append(messages[index])
            index += 1
        for call in calls[:-1]:
            own_results = _results_of(call, results)
            results = [
                result
                for result in results
                if not any(result is own_result for own_result in own_results)
            ]
            split.append({**message, "tool_calls": [call]})
            split += own_results
            later_fields = {
                name: value for name, value in message.items() if name not in _FIRST_CALL_FIELDS
            }
            message = {**later_fields, "content": ""}
        if calls:
            message = {**message, "tool_calls": [calls[-1]]}
        split.append(message)
        split += results
    return split


def _results_of(call: Mapping[str, Any], results: Messages) -> Messages:
    own_results = [result for result in results if result.get("tool_call_id") == call.get("id")]
    if not own_results and not any(result.get("tool_call_id") for result in results):
        return results[:1]  # no result has an id: results are in the order of the calls
    return own_results


def _one_text_before_calls(messages: Messages) -> Messages:
    """Reasoning and text before a call as one text, for a template that accepts only one of
    them."""
    changed: list[Message] = []
    for message in messages:
        if message.get("tool_calls") and message.get("thinking") and message.get("content"):
            message = {
                **message,
                "thinking": f"{message['thinking']}\n\n{message['content']}",
                "content": "",
            }
        changed.append(message)
    return changed


def _with_text_arguments(messages: Messages) -> Messages:
    changed: list[Message] = []
    for message in messages:
        if message.get("tool_calls"):
            message = {
                **message,
                "tool_calls": [_text_call(call) for call in message["tool_calls"]],
            }
        changed.append(message)
    return changed


def _text_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _systems_to_user(messages: Messages, *, first: int) -> list[Message]:
    changed: list[Message] = []
    for i, message in enumerate(messages):
        if i >= first and message["role"] == "system":
            message = {**message, "role": "user"}
        changed.append(message)
    return changed


def _merge_equal_roles(messages: Messages) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last is None or message["role"] != last["role"] or message["role"] == "tool":
            merged.append(message)
            continue
        merged_message = {**last, **message}
        merged_message["content"] = (
            f"{last.get('content') or ''}\n\n{message.get('content') or ''}".strip()
        )
        calls = [*(last.get("tool_calls") or ()), *(message.get("tool_calls") or ())]
        if calls:
            merged_message["tool_calls"] = calls
        merged[-1] = merged_message
    return merged
