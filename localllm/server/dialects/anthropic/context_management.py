"""Anthropic's `context_management`: edits that leave out old tool results and old reasoning, or
summarise the conversation (compaction).

The summary is a `compaction` block at the beginning of the answer. The client sends it back with the
answer, and everything before it is left out.

Sources: platform.claude.com/docs/en/build-with-claude/context-editing and …/compaction, and the types
of the `anthropic` package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from localllm.conversation.context_edits import (
    AppliedEdit,
    ClearThinking,
    ClearToolUses,
    ContextEdit,
)
from localllm.conversation.summary import Summary, task
from localllm.errors import RequestError
from localllm.server.dialects.fields import Count
from localllm.server.dialects.known import BodyPart
from localllm.server.generation.chat import SummaryEdit
from localllm.server.generation.job import WrittenSummary
from localllm.server.http.accounts import caller
from localllm.server.sealed_text import seal, unseal

TOOL_USES = "clear_tool_uses_20250919"
THINKING = "clear_thinking_20251015"
COMPACT = "compact_20260112"
# The documented defaults of `trigger` and `keep`.
_TRIGGER_TOKENS = 100_000
_COMPACT_TRIGGER_TOKENS = 150_000
_KEEP_TOOL_USES = 3
ToolNames = Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=512)]


class Threshold(BodyPart):
    """An amount of tokens, tool uses or turns."""

    type: Literal["input_tokens", "tool_uses", "thinking_turns", "all"]
    value: Count | None = None


class Edit(BodyPart):
    """One of `context_management.edits`. Each type reads some of the fields."""

    type: str = Field(max_length=64)
    trigger: Threshold | None = Field(
        None, description="default: 100,000 input_tokens, and 150,000 for a compaction"
    )
    keep: Threshold | Literal["all"] | None = Field(
        None, description="default: 3 tool_uses, or 1 of thinking_turns"
    )
    clear_at_least: Threshold | None = None
    exclude_tools: ToolNames | None = None
    clear_tool_inputs: bool | ToolNames | None = None
    pause_after_compaction: bool | None = None
    instructions: Annotated[str, Field(max_length=65_536)] | None = Field(
        None, description="what a compaction writes, instead of the default"
    )

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
        keep = _KEEP_TOOL_USES
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

    def summary(self, earlier: Summary | None) -> SummaryEdit:
        """Return the edit that compacts. Raises RequestError."""
        tokens = None
        if self.trigger is not None:
            if self.trigger.type != "input_tokens":
                where = "context_management.edits.trigger.type"
                raise RequestError(f"{where} of {COMPACT} must be input_tokens", param=where)
            tokens = self.trigger.value
        if tokens is None:
            tokens = _COMPACT_TRIGGER_TOKENS
        asks = task(content=self.instructions or "")
        return SummaryEdit(tokens, asks, self.pause_after_compaction is True, earlier)


class ContextManagement(BodyPart):
    """`context_management`."""

    edits: Annotated[list[Edit], Field(max_length=16)] = Field(default_factory=list)

    def summary(self, earlier: Summary | None) -> SummaryEdit | None:
        """Return the first edit that compacts, or None. Raises RequestError."""
        found = (edit.summary(earlier) for edit in self.edits if edit.type == COMPACT)
        return next(found, None)

    def unknown(self) -> list[str]:
        """Return the names of edits without effect."""
        known = (TOOL_USES, THINKING, COMPACT)
        types = [edit.type for edit in self.edits]
        return [f"context_management.{kind}" for kind in types if kind not in known]


@dataclass(frozen=True, slots=True)
class Continued:
    """A conversation from its last compaction block on: the messages, the number of those before
    the first one, and the summary in the block."""

    messages: Sequence[Mapping[str, Any]]
    left_out: int = 0
    earlier: Summary | None = None


def continued(messages: Sequence[Mapping[str, Any]]) -> Continued:
    """Return the conversation from its last compaction block on. A message of the user replaces the
    block. Blocks without content are ignored. Raises RequestError."""
    for i in range(len(messages) - 1, -1, -1):
        content = messages[i].get("content")
        blocks = content if isinstance(content, list) else []
        for j in range(len(blocks) - 1, -1, -1):
            block = blocks[j]
            if not isinstance(block, Mapping) or block.get("type") != "compaction":
                continue
            text = block.get("content")
            if text is None:
                continue
            if not isinstance(text, str) or not text.strip():
                where = f"messages[{i}].content[{j}].content"
                raise RequestError(f"{where} must be a text or null", param=where)
            later = messages[i + 1 :]
            if blocks[j + 1 :]:
                later = [{**messages[i], "content": blocks[j + 1 :]}, *later]
            summary = {"role": "user", "content": text}
            return Continued([summary, *later], len(messages) - len(later) - 1, _earlier(block))
    return Continued(messages)


def _earlier(block: Mapping[str, Any]) -> Summary:
    """Return the summary in a block. A block that this server did not make is a plain text."""
    sealed = unseal(block.get("encrypted_content"), caller().name)
    found = Summary.from_json(sealed) if sealed is not None else None
    return found or Summary(str(block["content"]))


def compaction_block(summary: WrittenSummary) -> dict[str, Any]:
    """Return the block with a summary. Its content is null without a summary."""
    content = sealed = None
    if summary.summary is not None:
        content = summary.summary.message(answer_follows=True)
        sealed = seal(summary.summary.as_json(), caller().name)
    return {"type": "compaction", "content": content, "encrypted_content": sealed}


def applied_body(applied: Sequence[AppliedEdit]) -> dict[str, Any]:
    """Return the `context_management` of an answer."""
    return {"applied_edits": [_applied(edit) for edit in applied]}


def _applied(edit: AppliedEdit) -> dict[str, Any]:
    if isinstance(edit.edit, ClearToolUses):
        kind = {"type": TOOL_USES, "cleared_tool_uses": edit.count}
    else:
        kind = {"type": THINKING, "cleared_thinking_turns": edit.count}
    return {**kind, "cleared_input_tokens": edit.tokens}
