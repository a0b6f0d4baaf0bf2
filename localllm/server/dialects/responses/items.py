"""The body of POST /v1/responses, and its translation to a chat request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from localllm.conversation.messages import normalise
from localllm.engine.messages import Sampling
from localllm.errors import RequestError, UnsupportedError
from localllm.server.dialects.fields import NAMED, TRUNCATION, Limit, ReasonedFields, ReasoningFields, first_limit
from localllm.server.dialects.responses.store import ResponseStore
from localllm.server.dialects.responses.toolbox import INPUT, Toolbox, flat_name
from localllm.server.generation.chat import ChatRequest
from localllm.server.generation.prompt import ResponseOptions

# Known to OpenAI's API and without effect here.
HINTS = frozenset(
    {
        "metadata", "user", "service_tier", "safety_identifier", "prompt_cache_retention", "max_tool_calls",
        "stream_options", "client_metadata",
    }
)  # fmt: skip


_CHOICES = (None, "function", "custom", "allowed_tools", "auto", "none", "required")


class ResponsesFields(ReasonedFields):
    """POST /v1/responses."""

    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    store: bool | None = Field(None, description="keep the response for previous_response_id (default true)")
    max_output_tokens: Limit | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=512)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = Field(None, description=TRUNCATION)
    context_management: Annotated[list[Any], Field(max_length=0)] | None = Field(
        None, description="nothing is summarised here; send truncation: auto"
    )
    background: Literal[False] | None = Field(None, description="responses run while the client waits")
    prompt: None = Field(None, description="stored prompts are not kept here")
    conversation: None = Field(None, description="conversations are not kept here; send previous_response_id")
    include: list[str] | None = Field(None, description="message.output_text.logprobs; others change nothing here")
    top_logprobs: int | None = Field(None, ge=0, le=20)
    n: Literal[1] | None = Field(None, description="a response has one answer")

    def answer_tokens(self) -> int | None:
        return first_limit(self.max_output_tokens)

    def alternatives(self) -> int | None:
        wanted = "message.output_text.logprobs" in (self.include or ())
        return 0 if wanted and self.top_logprobs is None else self.top_logprobs


def chat_request(
    fields: ResponsesFields, default: Sampling, items: Sequence[Any], toolbox: Toolbox
) -> tuple[ChatRequest, list[str]]:
    """The chat request of `items`, and the names of tools and items that were skipped."""
    skipped = list(toolbox.skipped)
    messages = _messages(items, skipped)
    if fields.instructions:
        messages.insert(0, {"role": "system", "content": fields.instructions})
    if not any(m["role"] != "system" for m in messages):
        messages.append({"role": "user", "content": ""})  # Codex probes with an empty input
    sent = fields.tool_choice
    if isinstance(sent, dict) and sent.get("type") not in _CHOICES:
        raise UnsupportedError(f"tool_choice.type {str(sent.get('type'))[:40]!r} is not supported", param="tool_choice")
    tools, choice = toolbox.chosen(sent)
    shape = fields.text or {}
    if shape.get("verbosity") not in NAMED["verbosity"]:
        skipped.append("text.verbosity")
    reasoning = fields.reasoning or ReasoningFields.model_validate({})
    options = ResponseOptions(
        tools=tools,
        choice=choice,
        parallel=fields.parallel_tool_calls is not False,
        grammar=fields.constraint(shape.get("format")),
        effort=reasoning.level,
        parse_special=bool(fields.parse_special),
    )
    generation = fields.generation(default)
    return ChatRequest(
        normalise(messages, skipped), generation, options, compaction=fields.truncation == "auto"
    ), skipped


def input_items(fields: ResponsesFields, store: ResponseStore) -> tuple[list[Any], list[Any]]:
    """The items before this request (of `previous_response_id`), and its own input, with references to stored items
    resolved."""
    before: list[Any] = []
    if fields.previous_response_id:
        before = store.items(fields.previous_response_id)
    if isinstance(fields.input, str):
        return before, [{"type": "message", "role": "user", "content": fields.input}]
    return before, [_stored(item, f"input[{i}]", store) for i, item in enumerate(fields.input or [])]


def _stored(item: Any, where: str, store: ResponseStore) -> Any:
    if not isinstance(item, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    reference = item.get("type") == "item_reference" or set(item) == {"id"}
    return store.item(str(item.get("id")), where) if reference else item


def _messages(items: Sequence[Any], skipped: list[str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    reasoning_text = ""
    for item in items:
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            message = {"role": item.get("role"), "content": item.get("content")}
            if reasoning_text and item.get("role") == "assistant":
                message["reasoning_content"] = reasoning_text
            reasoning_text = ""
            messages.append(message)
        elif kind in ("function_call", "custom_tool_call"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(_call(item, kind))
            if reasoning_text:
                messages[-1]["reasoning_content"] = reasoning_text
                reasoning_text = ""
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": _output(item.get("output"))}
            )
        elif kind == "reasoning":
            reasoning_text = _reasoning(item)
        else:
            skipped.append(f"input.{kind}")
    return messages


def _call(item: Mapping[str, Any], kind: str) -> dict[str, Any]:
    arguments = item.get("arguments") if kind == "function_call" else {INPUT: item.get("input")}
    name = item.get("name")
    name = flat_name(name, item.get("namespace")) if isinstance(name, str) else name
    return {"id": item.get("call_id"), "function": {"name": name, "arguments": arguments}}


def _reasoning(item: Mapping[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    return "\n".join(str(p.get("text", "")) for p in parts if isinstance(p, Mapping))


def _output(output: Any) -> Any:
    return output if isinstance(output, (str, list)) or output is None else json.dumps(output)
