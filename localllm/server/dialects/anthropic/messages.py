"""The body of POST /v1/messages, and its translation to a chat request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from localllm.conversation.messages import flatten, normalise
from localllm.conversation.tools.prompt import checked, choice_of
from localllm.engine.messages import MAX_TOKENS, Generation, Sampling
from localllm.errors import RequestError, UnsupportedError
from localllm.server.dialects.anthropic.client_tools import client_tool
from localllm.server.dialects.constraints import Constraint, of_schema, only_one
from localllm.server.dialects.fields import (
    Count,
    ParseSpecial,
    SamplingFields,
    StopText,
    stop_texts,
)
from localllm.server.generation.chat import ChatRequest
from localllm.server.generation.prompt import ResponseOptions

# Known to Anthropic's API and without effect here; every prompt is cached, with or without
# `cache_control`.
HINTS = frozenset({"metadata", "service_tier", "betas", "speed", "cache_control"})
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
# Precedes the output of a failed tool: templates have no field for it.
FAILED = "[the tool failed]"
# What Anthropic's servers ran in an earlier turn; the answer made of it is in the message as well.
_SERVER_SIDE = ("server_tool_use", "mcp_tool_use")


class MessagesFields(SamplingFields):
    """POST /v1/messages, with the sampling fields of the other dialects."""

    messages: list[dict[str, Any]]
    max_tokens: Count | None = None
    system: str | list[Any] | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=32)] | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = Field(None, description="a message is one answer")
    tools: list[dict[str, Any]] | None = Field(None, max_length=512)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = Field(
        None, description="`effort`, and `format` with a JSON schema"
    )
    output_format: dict[str, Any] | None = Field(
        None, description="the older name of output_config.format"
    )
    parse_special: ParseSpecial = None
    container: None = Field(None, description="no container runs here")
    mcp_servers: list[Any] | None = Field(
        None, max_length=0, description="not connected to from here"
    )

    def generation(self, default: Sampling) -> Generation:
        made = super().generation(default)
        return replace(made, stop=stop_texts(self.stop_sequences) + made.stop)

    def answer_tokens(self) -> int | None:
        return self.max_tokens

    def thinking_tokens(self) -> int | None:
        """`thinking.budget_tokens`; None = no limit. Raises RequestError."""
        budget = (self.thinking or {}).get("budget_tokens")
        if budget is None:
            return None
        if not isinstance(budget, int) or isinstance(budget, bool) or not 0 <= budget <= MAX_TOKENS:
            raise RequestError(
                "thinking.budget_tokens must be a number of tokens", param="thinking"
            )
        return budget

    def constraint(self, response_format: Any = None) -> Constraint | None:
        """`output_config.format`, or the form in another dialect's words."""
        wanted = (self.output_config or {}).get("format") or self.output_format
        return only_one(output_config=_form(wanted), grammar=super().constraint(response_format))


def chat_request(fields: MessagesFields, default: Sampling) -> tuple[ChatRequest, list[str]]:
    """The chat request, and the names of what is omitted: tools that only Anthropic's servers run,
    their results in earlier turns, and images."""
    messages: list[dict[str, Any]] = []
    omitted: list[str] = []
    if fields.system:
        # One block per paragraph, so that the agent's own instructions stay apart from what it
        # adds.
        messages.append({"role": "system", "content": flatten(fields.system, "system")})
    for i, message in enumerate(fields.messages):
        messages += plain_messages(message, f"messages[{i}]", omitted)
    if not fields.messages:
        raise RequestError("messages is empty: send at least one", param="messages")
    tools, skipped = _tools(fields.tools or [])
    choice, parallel = _choice(fields.tool_choice)
    thinking = (fields.thinking or {}).get("type")
    if thinking not in (None, "enabled", "disabled", "adaptive"):
        raise RequestError("thinking.type must be enabled, adaptive or disabled", param="thinking")
    effort = (fields.output_config or {}).get("effort")
    if effort is not None and effort not in _EFFORTS:
        raise RequestError(
            f"output_config.effort must be one of {', '.join(_EFFORTS)}", param="output_config"
        )
    options = ResponseOptions(
        tools=tools,
        choice=choice_of(choice, tools),
        parallel=parallel,
        grammar=fields.constraint(),
        parse_special=bool(fields.parse_special),
        effort=_effort(thinking, effort),
    )
    chat = ChatRequest(normalise(messages, omitted), fields.generation(default), options)
    return chat, [*skipped, *dict.fromkeys(omitted)]


def _effort(thinking: str | None, effort: str | None) -> str | None:
    """The reasoning effort: what is switched off has none, and what is switched on a high one
    unless it is named."""
    if thinking == "disabled":
        return "none"
    return effort or ("high" if thinking else None)


def _form(wanted: Any) -> Constraint | None:
    """The JSON schema that the answer must match."""
    if wanted is None:
        return None
    if (
        not isinstance(wanted, Mapping)
        or wanted.get("type") != "json_schema"
        or not isinstance(wanted.get("schema"), Mapping)
    ):
        raise RequestError(
            "output_config.format must be {type: json_schema, schema: {…}}", param="output_config"
        )
    return of_schema(wanted["schema"])


def _tools(sent: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The tools as functions, and the names of those that only Anthropic's servers run."""
    kept, skipped = [], []
    for tool in sent:
        function: dict[str, Any] | None
        if tool.get("type") in (None, "custom"):
            function = {
                "name": tool.get("name"),
                "description": tool.get("description"),
                "parameters": tool.get("input_schema"),
            }
        else:
            function = client_tool(tool)
        if function is None:
            skipped.append(f"tools.{tool.get('name', tool['type'])}")
        else:
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


def plain_messages(
    message: Mapping[str, Any], where: str, omitted: list[str]
) -> list[dict[str, Any]]:
    """One message in OpenAI's form: tool results become messages of their own. `omitted` collects
    the names of blocks that are left out. Raises RequestError."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where}.role must be user or assistant", param=f"{where}.role")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    parts: list[Any] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        spot = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            results.append(_result(block, f"{spot}.content"))
        elif kind in _SERVER_SIDE or str(kind).endswith("_tool_result"):
            omitted.append(f"messages.{kind}")
        else:
            parts += _readable(block, kind, spot)
    if not parts and results:
        return results
    plain: dict[str, Any] = {"role": role, "content": parts}
    if calls:
        plain["tool_calls"] = calls
    return [*results, plain]


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    said = block.get("content")
    parts = said if isinstance(said, list) else [{"type": "text", "text": flatten(said, where)}]
    read: list[Any] = [{"type": "text", "text": FAILED}] if block.get("is_error") is True else []
    for i, part in enumerate(parts):
        read += _readable(
            part, part.get("type") if isinstance(part, Mapping) else None, f"{where}[{i}]"
        )
    texts = [p for p in read if not (isinstance(p, Mapping) and p.get("text") == "")]
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": texts}


def _readable(block: Any, kind: Any, where: str) -> list[Any]:
    """The content parts for `block`; those that `normalise` knows are passed on."""
    if kind in ("text", "image", "thinking", "redacted_thinking"):
        return [block]
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise UnsupportedError(f"{where}.type {str(kind)[:40]!r} is not supported", param=where)
    return read(block)


def _document(block: Mapping[str, Any]) -> list[Any]:
    """The text of a text document; PDFs and URLs are passed on to `normalise`."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind == "text" and isinstance(source, Mapping):
        return [*_title(block), *_text(source.get("data"))]
    if kind == "content" and isinstance(source, Mapping):
        return [*_title(block), *_parts(source.get("content"))]
    return [block]


def _title(block: Mapping[str, Any]) -> list[Any]:
    title = block.get("title")
    return _text(title) if isinstance(title, str) and title else []


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else _text(content)


def _text(text: Any) -> list[Any]:
    return [{"type": "text", "text": text}]


# Blocks that `normalise` does not know, by their types.
_READERS: Mapping[str, Callable[[Mapping[str, Any]], list[Any]]] = {
    "document": _document,
    "search_result": lambda block: [*_title(block), *_parts(block.get("content"))],
    "compaction": lambda block: _text(block.get("content") or ""),
    "tool_reference": lambda block: _text(f"The tool {block.get('tool_name')} can be called now."),
}
