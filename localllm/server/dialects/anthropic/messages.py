"""The body of POST /v1/messages, and its translation to a chat request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from localllm.conversation.messages import flatten, normalise
from localllm.conversation.tools.prompt import checked
from localllm.errors import RequestError, UnsupportedError
from localllm.server.dialects.anthropic.client_tools import function_of, is_client_tool
from localllm.server.dialects.constraints import Constraint, of_response_format, only_one
from localllm.server.dialects.fields import Count, StopText, stop_texts
from localllm.server.dialects.known import (
    FORM,
    READS,
    REFUSED,
    BodyPart,
    Refused,
    Shape,
    Unused,
    one_of,
    shape,
)
from localllm.server.dialects.thinking import ReasonedFields
from localllm.server.dialects.toolbox import Toolbox
from localllm.server.generation.chat import ChatRequest
from localllm.server.models.router import ServedModel

# Every prompt is cached, with or without `cache_control`.
_BLOCK: dict[str, Any] = shape(
    "type", "text", "cache_control", "id", "name", "input", "tool_use_id", "is_error", "thinking",
    "signature", "data", "tool_name", "title",
    source=shape(
        "data", "media_type", "url", "file_id",
        type=one_of("base64", "url", "file", "text", "content"),
    ),
    citations=Unused(off=(None, [], {"enabled": False})),
    context=Unused(off=(None, "")),
)  # fmt: skip
_BLOCK["source"]["content"] = _BLOCK
_BLOCK |= {"content": _BLOCK, READS: lambda kind: not _server_side(kind)}
_TOOL = shape(
    "type", "name", "description", "input_schema", "strict", "cache_control", "display_width_px",
    "display_height_px", "display_number", "max_characters",
    **{READS: lambda kind: kind in (None, "custom") or is_client_tool(kind)},
)  # fmt: skip
_FORM = {**FORM, "type": one_of("json_schema")}
# Precedes the output of a failed tool: templates have no field for it.
FAILED = "[the tool failed]"


def _server_side(kind: Any) -> bool:
    """Whether Anthropic's servers ran it in an earlier turn; the answer made of it is in the message
    as well."""
    return kind in ("server_tool_use", "mcp_tool_use") or str(kind).endswith("_tool_result")


class OutputConfig(BodyPart):
    """`output_config`."""

    shapes: ClassVar[Shape] = {"format": _FORM}
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class MessagesFields(ReasonedFields):
    """POST /v1/messages, with the sampling fields of the other dialects."""

    shapes: ClassVar[Shape] = {
        **ReasonedFields.shapes,
        "messages": {"role": None, "content": _BLOCK},
        "system": _BLOCK,
        "tools": _TOOL,
        "tool_choice": shape(
            "name", "disable_parallel_tool_use", type=one_of("auto", "any", "tool", "none")
        ),
        "output_format": _FORM,
        "n": REFUSED["n"],
        "container": Refused("no container runs here"),
        "mcp_servers": Refused("not connected to from here", (None, [])),
        **dict.fromkeys(("betas", "speed", "cache_control")),
    }
    messages: list[dict[str, Any]]
    max_tokens: Count | None = None
    system: str | list[Any] | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=32)] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=512)
    tool_choice: dict[str, Any] | None = None
    output_config: OutputConfig | None = Field(
        None, description="`effort`, and `format` with a JSON schema"
    )
    output_format: dict[str, Any] | None = Field(
        None, description="the older name of output_config.format"
    )

    def effort(self) -> str | None:
        """The same; `output_config` names a level of what is not switched off."""
        found = super().effort()
        named = self.output_config and self.output_config.effort
        if found == "none":
            return found
        return named or found

    def constraint(self, response_format: Any = None) -> Constraint | None:
        """`output_config.format`, or the form in another dialect's words."""
        wanted = (self.output_config and self.output_config.format) or self.output_format
        return only_one(
            output_config=of_response_format(wanted, "output_config.format"),
            grammar=super().constraint(response_format),
        )


def chat_request(fields: MessagesFields, model: ServedModel) -> tuple[ChatRequest, list[str]]:
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
    toolbox = _toolbox(fields.tools or [])
    chosen = fields.tool_choice or {}
    options = fields.response_options(
        toolbox,
        {**chosen, "type": "function"} if chosen.get("type") == "tool" else fields.tool_choice,
        fields.constraint(),
        parallel=chosen.get("disable_parallel_tool_use") is not True,
    )
    generation = fields.generation(
        model.sampling_for(options.effort),
        fields.max_tokens,
        thinking_tokens=fields.thinking_tokens(),
    )
    stop = stop_texts(fields.stop_sequences) + generation.stop
    chat = ChatRequest(normalise(messages, omitted), replace(generation, stop=stop), options)
    return chat, [*toolbox.skipped, *dict.fromkeys(omitted)]


def _toolbox(sent: list[dict[str, Any]]) -> Toolbox:
    """The tools as functions; skipped are those that only Anthropic's servers run."""
    kept = []
    skipped = []
    for tool in sent:
        function = function_of(tool)
        if function is None:
            skipped.append(f"tools.{tool.get('name', tool['type'])}")
        else:
            kept.append({"type": "function", "function": function})
    return Toolbox(checked(kept), skipped=skipped)


def plain_messages(
    message: Mapping[str, Any], where: str, omitted: list[str]
) -> list[dict[str, Any]]:
    """One message in OpenAI's form: tool results become messages of their own. `omitted` collects
    the names of blocks that are left out. Raises RequestError."""
    role = message.get("role")
    content = message.get("content")
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
        elif _server_side(kind):
            omitted.append(f"messages.{kind}")
        else:
            parts += _readable(block, spot)
    plain: dict[str, Any] = {"role": role, "content": parts}
    if calls:
        plain["tool_calls"] = calls
    if parts or calls or not results:
        return [*results, plain]
    return results


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    said = block.get("content")
    if isinstance(said, list):
        parts = said
    else:
        parts = [{"type": "text", "text": flatten(said, where)}]
    read: list[Any]
    if block.get("is_error") is True:
        read = [{"type": "text", "text": FAILED}]
    else:
        read = []
    for i, part in enumerate(parts):
        read += _readable(part, f"{where}[{i}]")
    texts = [p for p in read if not (isinstance(p, Mapping) and p.get("text") == "")]
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": texts}


def _readable(block: Any, where: str) -> list[Any]:
    """The content parts for `block`. Raises UnsupportedError."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    read = _READERS.get(str(kind))
    if read is None:
        known = ", ".join((*_READERS, "tool_use", "tool_result"))
        raise UnsupportedError(
            f"{where}.type {str(kind)[:40]!r} is not supported; known: {known}", param=where
        )
    return read(block)


def _document(block: Mapping[str, Any]) -> list[Any]:
    """The text of a text document; PDFs and URLs are passed on to `normalise`."""
    sent = block.get("source")
    source = sent if isinstance(sent, Mapping) else {}
    kind = source.get("type")
    if kind not in ("text", "content"):
        return [block]
    return _titled(block, source.get("data" if kind == "text" else "content"))


def _titled(block: Mapping[str, Any], content: Any) -> list[Any]:
    """What is in a block, behind its title."""
    title = block.get("title")
    parts = content if isinstance(content, list) else _text(content)
    if isinstance(title, str) and title:
        return [*_text(title), *parts]
    return parts


def _text(text: Any) -> list[Any]:
    return [{"type": "text", "text": text}]


# What becomes of a block, by its type; those that `normalise` knows are passed on.
_READERS: Mapping[str, Callable[[Mapping[str, Any]], list[Any]]] = {
    **dict.fromkeys(("text", "image", "thinking", "redacted_thinking"), lambda block: [block]),
    "document": _document,
    "search_result": lambda block: _titled(block, block.get("content")),
    "compaction": lambda block: _text(block.get("content") or ""),
    "tool_reference": lambda block: _text(f"The tool {block.get('tool_name')} can be called now."),
}
