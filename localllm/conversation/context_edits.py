"""Edits that shorten a conversation and keep its messages: stale tool results and old reasoning are
left out.

A line replaces each result, so the model knows which call it can make again. Everything before the
oldest edited message stays the same, and so does its cached KV.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from localllm.conversation.summary import call_line

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ClearToolUses:
    """Leaves out tool results, except the newest `keep` and those of the tools in `exclude`.

    It runs if the prompt has more than `above_tokens`, or if the conversation has more than
    `above_uses` calls with a result, whichever is set. If it would leave out fewer than
    `at_least_tokens`, it does not run. `inputs`: see `clear_tool_results`."""

    above_tokens: int | None = None
    above_uses: int | None = None
    keep: int = 3
    at_least_tokens: int = 0
    exclude: tuple[str, ...] = ()
    inputs: tuple[str, ...] | bool = False


@dataclass(frozen=True, slots=True)
class ClearThinking:
    """Leaves out the reasoning of all turns except the newest `keep`."""

    keep: int = 1


ContextEdit: TypeAlias = ClearToolUses | ClearThinking


@dataclass(frozen=True, slots=True)
class AppliedEdit:
    """What an edit left out: the number of tool results or turns, and of the prompt's tokens."""

    edit: ContextEdit
    count: int
    tokens: int


# Fields of a tool message that belong to the result.
_RESULT_FIELDS = ("images", "sounds", "pdfs")


def _answered_calls(messages: Messages) -> dict[int, Mapping[str, Any]]:
    """The calls by the index of the message with their result."""
    calls: dict[str, Mapping[str, Any]] = {}
    answered = {}
    for i, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            calls[call["id"]] = call
        call_id = message.get("tool_call_id")
        if message["role"] == "tool" and call_id in calls:
            answered[i] = calls[call_id]
    return answered


def tool_uses(messages: Messages) -> int:
    """The number of calls that have a result."""
    return len(_answered_calls(messages))


def clear_tool_results(
    messages: Messages,
    keep: int,
    *,
    exclude: Collection[str] = (),
    inputs: Collection[str] | bool = False,
) -> tuple[list[dict[str, Any]], int]:
    """`messages` with a line instead of each tool result, and the number of replaced results.

    The newest `keep` results stay, and those of the tools in `exclude`. `inputs`: the calls' arguments
    are left out too, all or those of the named tools.
    """
    calls = _answered_calls(messages)
    stale = [*calls][: max(0, len(calls) - keep)]
    edited = [dict(message) for message in messages]
    cleared: list[Mapping[str, Any]] = []
    for i in stale:
        function = calls[i]["function"]
        note = f"[The result of {call_line(function)} was left out]"
        if function["name"] in exclude or len(edited[i]["content"]) <= len(note):
            continue
        edited[i] = {k: v for k, v in edited[i].items() if k not in _RESULT_FIELDS}
        edited[i]["content"] = note
        cleared.append(calls[i])
    _clear_inputs(edited, cleared, inputs)
    return edited, len(cleared)


def _clear_inputs(
    messages: list[dict[str, Any]],
    cleared: Sequence[Mapping[str, Any]],
    inputs: Collection[str] | bool,
) -> None:
    if inputs is False:
        return
    ids = {id(call) for call in cleared if inputs is True or call["function"]["name"] in inputs}
    for message in messages:
        if "tool_calls" in message:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": {}}}
                if id(call) in ids
                else call
                for call in message["tool_calls"]
            ]


def clear_reasoning(messages: Messages, keep: int) -> tuple[list[dict[str, Any]], int]:
    """`messages` without the reasoning of earlier turns, and the number of turns that had some. The
    newest `keep` turns with reasoning stay. A turn is what the assistant wrote after one
    question."""
    n_questions = 0
    turn_by_index: dict[int, int] = {}  # the turn, by the index of each message with reasoning
    for i, message in enumerate(messages):
        if message["role"] == "user":
            n_questions += 1
        elif message.get("reasoning_content"):
            turn_by_index[i] = n_questions
    turns_with_reasoning = [*dict.fromkeys(turn_by_index.values())]
    stale = set(turns_with_reasoning[: max(0, len(turns_with_reasoning) - keep)])
    edited = [dict(message) for message in messages]
    for i, turn_of_message in turn_by_index.items():
        if turn_of_message in stale:
            del edited[i]["reasoning_content"]
    return edited, len(stale)
