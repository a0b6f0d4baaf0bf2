"""POST /v1/responses: what a client may send, and the conversation that its items make."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from localllm.conversation.messages import normalise
from localllm.conversation.tools.prompt import checked, choice_of
from localllm.engine.messages import Generation, Sampling
from localllm.errors import RequestError, UnsupportedError
from localllm.server.dialects.constraint import of_response_format
from localllm.server.dialects.fields import TRUNCATION, Body, Count, ReasoningFields, limit_of, sampling_over
from localllm.server.dialects.responses.store import Store
from localllm.server.generation.conversing import Ask
from localllm.server.generation.prompting import Wishes

# Known to OpenAI's API and without effect on an answer here.
HINTS = frozenset(
    {
        "metadata", "user", "service_tier", "safety_identifier", "prompt_cache_retention", "include", "max_tool_calls",
        "stream_options", "client_metadata",
    }
)  # fmt: skip


class ResponsesFields(Body):
    """POST /v1/responses."""

    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    store: bool | None = Field(None, description="keep the response for previous_response_id (default true)")
    max_output_tokens: Count | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    tools: list[dict[str, Any]] | None = Field(None, max_length=512)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: ReasoningFields | None = None
    truncation: Literal["auto", "disabled"] | None = Field(None, description=TRUNCATION)
    context_management: Annotated[list[Any], Field(max_length=0)] | None = Field(
        None, description="nothing is summarised here; send truncation: auto"
    )
    background: Literal[False] | None = Field(None, description="responses run while the client waits")
    prompt: None = Field(None, description="stored prompts are not kept here")
    conversation: None = Field(None, description="conversation objects are not kept here")
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None


def ask_of(fields: ResponsesFields, default: Sampling, items: Sequence[Any]) -> tuple[Ask, list[str]]:
    """The Ask for the conversation `items`, and the names of tools and items that were skipped."""
    skipped: list[str] = []
    messages = _messages(items, skipped)
    if fields.instructions:
        messages.insert(0, {"role": "system", "content": fields.instructions})
    if not any(m["role"] != "system" for m in messages):
        messages.append({"role": "user", "content": ""})  # Codex probes with an empty input
    tools = _tools(fields.tools or [], skipped)
    sent = fields.tool_choice
    if isinstance(sent, dict) and sent.get("type") not in ("function", None):
        raise UnsupportedError(f"tool_choice.type {str(sent.get('type'))[:40]!r} is not supported", param="tool_choice")
    formatted = (fields.text or {}).get("format")
    if (fields.text or {}).get("verbosity") not in (None, "medium"):
        raise UnsupportedError("text.verbosity: no model here has this control; say it in the prompt", param="text")
    if "message.output_text.logprobs" in ((fields.model_extra or {}).get("include") or ()):
        raise UnsupportedError("include: log-probabilities come with /v1/chat/completions only", param="include")
    reasoning = fields.reasoning or ReasoningFields.model_validate({})
    wishes = Wishes(
        tools=tools,
        choice=choice_of(sent if tools or sent not in ("auto", "none") else None, tools),
        parallel=fields.parallel_tool_calls is not False,
        grammar=of_response_format(formatted),
        effort=reasoning.level,
    )
    sampling = sampling_over(default, temperature=fields.temperature, top_p=fields.top_p, seed=fields.seed)
    generation = Generation(sampling, fields.max_output_tokens, thinking_tokens=limit_of(reasoning.max_tokens))
    return Ask(normalise(messages), generation, wishes, compaction=fields.truncation == "auto"), skipped


def input_items(fields: ResponsesFields, store: Store) -> list[Any]:
    """The conversation: what `previous_response_id` names, then this request's input."""
    before: list[Any] = list(store.items(fields.previous_response_id)) if fields.previous_response_id else []
    if isinstance(fields.input, str):
        return [*before, {"type": "message", "role": "user", "content": fields.input}]
    return [*before, *(fields.input or [])]


def _messages(items: Sequence[Any], skipped: list[str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    thought = ""
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if not isinstance(item, Mapping):
            raise RequestError(f"{where} must be an object", param=where)
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            message = {"role": item.get("role"), "content": item.get("content")}
            if thought and item.get("role") == "assistant":
                message["reasoning_content"] = thought
            thought = ""
            messages.append(message)
        elif kind in ("function_call", "custom_tool_call"):
            arguments = item.get("arguments") if kind == "function_call" else {"input": item.get("input")}
            call = {"id": item.get("call_id"), "function": {"name": item.get("name"), "arguments": arguments}}
            last = messages[-1] if messages else None
            if last is not None and last["role"] == "assistant":
                last.setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            if thought:
                messages[-1]["reasoning_content"] = thought
                thought = ""
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": _output(item.get("output"))}
            )
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            thought = "\n".join(str(p.get("text", "")) for p in parts if isinstance(p, Mapping))
        elif kind == "item_reference":
            raise UnsupportedError(f"{where}: items are not stored by id; send previous_response_id", param=where)
        else:
            skipped.append(f"input.{kind}")
    return messages


def _output(output: Any) -> Any:
    return output if isinstance(output, (str, list)) or output is None else json.dumps(output)


def _tools(sent: list[dict[str, Any]], skipped: list[str]) -> list[dict[str, Any]]:
    kept = []
    for tool in sent:
        if tool.get("type", "function") != "function":
            skipped.append(f"tools.{tool.get('type')}")  # only OpenAI's servers can run it
            continue
        function = tool.get("function") if isinstance(tool.get("function"), Mapping) else tool
        kept.append({"type": "function", "function": function})
    return checked(kept)
