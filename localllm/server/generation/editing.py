"""Applies the context edits of a request to its conversation, and counts the tokens that they save."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.conversation.context_edits import (
    AppliedEdit,
    ClearToolUses,
    ContextEdit,
    clear_reasoning,
    clear_tool_results,
    tool_uses,
)

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Edited:
    """The messages after all edits, the edits that changed something, and the number of the prompt's
    tokens before them."""

    messages: Messages
    applied: tuple[AppliedEdit, ...]
    original_tokens: int


async def edited(
    messages: Messages,
    edits: Sequence[ContextEdit],
    prompt_tokens: Callable[[Messages], Awaitable[int]],
) -> Edited:
    """Apply `edits` in their order. `prompt_tokens` counts the tokens of a conversation's prompt."""
    original = before = await prompt_tokens(messages)
    applied: list[AppliedEdit] = []
    for edit in edits:
        changed, count = _changed(edit, messages, before)
        if not count:
            continue
        after = await prompt_tokens(changed)
        if isinstance(edit, ClearToolUses) and before - after < edit.at_least_tokens:
            continue
        applied.append(AppliedEdit(edit, count, max(0, before - after)))
        messages = changed
        before = after
    return Edited(messages, tuple(applied), original)


def _changed(edit: ContextEdit, messages: Messages, size: int) -> tuple[Messages, int]:
    """The messages after one edit, and the number of cleared results or turns. `size`: the prompt's
    tokens now."""
    if not isinstance(edit, ClearToolUses):
        return clear_reasoning(messages, edit.keep)
    if edit.above_uses is not None:
        runs = tool_uses(messages) > edit.above_uses
    else:
        runs = edit.above_tokens is not None and size > edit.above_tokens
    if not runs:
        return messages, 0
    return clear_tool_results(messages, edit.keep, exclude=edit.exclude, inputs=edit.inputs)
