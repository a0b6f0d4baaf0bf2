"""Anthropic's `context_management`: edits that leave out old tool results and old reasoning.

Source: platform.claude.com/docs/en/build-with-claude/context-editing, and the types of the `anthropic`
package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from localllm.conversation.context_edits import (
    AppliedEdit,
    ClearThinking,
    ClearToolUses,
    ContextEdit,
)
from localllm.server.dialects.fields import Count
from localllm.server.dialects.known import BodyPart

TOOL_USES = "clear_tool_uses_20250919"
THINKING = "clear_thinking_20251015"
# The documented defaults of `trigger` and `keep`.
_TRIGGER_TOKENS = 100_000
_KEPT_USES = 3
ToolNames = Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=512)]


class Threshold(BodyPart):
    """An amount of tokens, tool uses or turns."""

    type: Literal["input_tokens", "tool_uses", "thinking_turns", "all"]
    value: Count | None = None


class Edit(BodyPart):
    """One of `context_management.edits`. Each type reads some of the fields."""

    type: str = Field(max_length=64)
    trigger: Threshold | None = Field(None, description="default: 100,000 input_tokens")
    keep: Threshold | Literal["all"] | None = Field(
        None, description="default: 3 tool_uses, or 1 of thinking_turns"
    )
    clear_at_least: Threshold | None = None
    exclude_tools: ToolNames | None = None
    clear_tool_inputs: bool | ToolNames | None = None

    def edit(self) -> ContextEdit | None:
        """Return the edit, or None for an edit without effect."""
        if self.type == TOOL_USES:
            return self._tool_uses()
        keep = self.keep
        if self.type != THINKING or keep == "all":
            return None
        if not isinstance(keep, Threshold):
            return ClearThinking()
        if keep.type == "all":
            return None
        return ClearThinking(keep.value or 0)

    def _tool_uses(self) -> ClearToolUses:
        tokens: int | None = _TRIGGER_TOKENS
        uses = None
        if self.trigger is not None and self.trigger.type == "tool_uses":
            tokens = None
            uses = self.trigger.value
        elif self.trigger is not None:
            tokens = self.trigger.value
        at_least = self.clear_at_least.value if self.clear_at_least else None
        keep = _KEPT_USES
        if isinstance(self.keep, Threshold) and self.keep.value is not None:
            keep = self.keep.value
        inputs = self.clear_tool_inputs or False
        return ClearToolUses(
            above_tokens=tokens,
            above_uses=uses,
            keep=keep,
            at_least_tokens=at_least or 0,
            exclude=tuple(self.exclude_tools or ()),
            inputs=tuple(inputs) if isinstance(inputs, list) else inputs,
        )


class ContextManagement(BodyPart):
    """`context_management`."""

    edits: Annotated[list[Edit], Field(max_length=16)] = Field(default_factory=list)

    def unknown(self) -> list[str]:
        """Return the names of edits without effect."""
        types = [edit.type for edit in self.edits]
        return [f"context_management.{kind}" for kind in types if kind not in (TOOL_USES, THINKING)]


def applied_body(applied: Sequence[AppliedEdit]) -> dict[str, Any]:
    """Return the `context_management` of an answer."""
    return {"applied_edits": [_applied(one) for one in applied]}


def _applied(one: AppliedEdit) -> dict[str, Any]:
    if isinstance(one.edit, ClearToolUses):
        kind = {"type": TOOL_USES, "cleared_tool_uses": one.count}
    else:
        kind = {"type": THINKING, "cleared_thinking_turns": one.count}
    return {**kind, "cleared_input_tokens": one.tokens}
