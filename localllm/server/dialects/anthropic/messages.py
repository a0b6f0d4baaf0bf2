"""POST /v1/messages: what a client may send, and the conversation it asks about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from localllm.conversation.messages import flatten, normalise
from localllm.conversation.tools.prompt import checked, choice_of
from localllm.engine.messages import Generation, Sampling
from localllm.errors import RequestError, UnsupportedError
from localllm.server.dialects.constraint import Constraint, of_schema
from localllm.server.dialects.fields import MAX_TOKENS, Body, Count, StopText, sampling_over, stop_texts
from localllm.server.generation.conversing import Ask
from localllm.server.generation.prompting import Wishes

# Known to Anthropic's API and without effect on an answer here.
HINTS = frozenset({"metadata", "service_tier", "betas", "speed"})
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}


class MessagesFields(Body):
    """POST /v1/messages."""

    messages: list[dict[str, Any]]
    max_tokens: Count | None = None
    system: str | list[Any] | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=32)] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1)
    tools: list[dict[str, Any]] | None = Field(None, max_length=512)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = Field(None, description="`effort`, and `format` with a JSON schema")
    output_format: dict[str, Any] | None = Field(None, description="the older name of output_config.format")
    container: None = Field(None, description="no container runs here")
    mcp_servers: list[Any] | None = Field(None, max_length=0, description="not connected to from here")


def ask_of(fields: MessagesFields, default: Sampling) -> tuple[Ask, list[str]]:
    """The Ask, and the names of tools that were skipped because only Anthropic's servers can run them."""
    messages: list[dict[str, Any]] = []
    if fields.system:
        # One block per line group: the agent's own instructions stay apart from what it adds.
        messages.append({"role": "system", "content": flatten(fields.system, "system")})
    for i, message in enumerate(fields.messages):
        messages += _turns(message, f"messages[{i}]")
    if not fields.messages:
        raise RequestError("messages is empty: send at least one", param="messages")
    tools, skipped = _tools(fields.tools or [])
    choice, parallel = _choice(fields.tool_choice)
    thinking = (fields.thinking or {}).get("type")
    if thinking not in (None, "enabled", "disabled", "adaptive"):
        raise RequestError("thinking.type must be enabled, adaptive or disabled", param="thinking")
    effort = (fields.output_config or {}).get("effort")
    if effort is not None and effort not in _EFFORTS:
        raise RequestError(f"output_config.effort must be one of {', '.join(_EFFORTS)}", param="output_config")
    wishes = Wishes(
        tools=tools,
        choice=choice_of(choice, tools),
        parallel=parallel,
        grammar=_form(fields),
        effort="none" if thinking == "disabled" else _EFFORTS[effort] if effort else "high" if thinking else None,
    )
    sampling = sampling_over(default, temperature=fields.temperature, top_p=fields.top_p, top_k=fields.top_k)
    generation = Generation(
        sampling, fields.max_tokens, stop_texts(fields.stop_sequences), thinking_tokens=_budget(fields.thinking)
    )
    return Ask(normalise(messages), generation, wishes), skipped


def _budget(thinking: Mapping[str, Any] | None) -> int | None:
    """`thinking.budget_tokens`; None = no limit. Raises RequestError."""
    budget = (thinking or {}).get("budget_tokens")
    if budget is None:
        return None
    if not isinstance(budget, int) or isinstance(budget, bool) or not 0 <= budget <= MAX_TOKENS:
        raise RequestError("thinking.budget_tokens must be a number of tokens", param="thinking")
    return budget


def _form(fields: MessagesFields) -> Constraint | None:
    """The JSON schema the answer must match, if one is asked for."""
    wanted = (fields.output_config or {}).get("format") or fields.output_format
    if wanted is None:
        return None
    if (
        not isinstance(wanted, Mapping)
        or wanted.get("type") != "json_schema"
        or not isinstance(wanted.get("schema"), Mapping)
    ):
        raise RequestError("output_config.format must be {type: json_schema, schema: {…}}", param="output_config")
    return of_schema(wanted["schema"])


def _turns(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """One Anthropic message as OpenAI ones: tool results become messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where}.role must be user or assistant", param=f"{where}.role")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for i, block in enumerate(content):
        spot = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(block)
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            said = flatten(block.get("content"), f"{spot}.content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said})
        elif kind == "thinking":
            reasoning.append(str(block.get("thinking") or ""))
        elif kind in ("redacted_thinking", "server_tool_use", "web_search_tool_result"):
            continue
        elif kind in ("image", "document"):
            raise UnsupportedError(f"{spot}: this model reads text only, not {kind}s", param=spot)
        else:
            raise UnsupportedError(f"{spot}.type {str(kind)[:40]!r} is not supported", param=spot)
    if not texts and results:
        return results
    plain: dict[str, Any] = {"role": role, "content": texts}
    if calls:
        plain["tool_calls"] = calls
    if reasoning:
        plain["reasoning_content"] = "\n".join(reasoning)
    return [*results, plain]


def _tools(sent: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    kept, skipped = [], []
    for tool in sent:
        if tool.get("type", "custom") != "custom":
            skipped.append(f"tools.{tool.get('name', tool['type'])}")
            continue
        function = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool.get("input_schema"),
        }
        kept.append({"type": "function", "function": function})
    return checked(kept), skipped


def _choice(sent: dict[str, Any] | None) -> tuple[Any, bool]:
    if sent is None:
        return None, True
    parallel = sent.get("disable_parallel_tool_use") is not True
    kind = sent.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": sent.get("name")}}, parallel
    if kind in ("auto", "any", "none"):
        return kind, parallel
    raise RequestError("tool_choice.type must be auto, any, tool or none", param="tool_choice")
