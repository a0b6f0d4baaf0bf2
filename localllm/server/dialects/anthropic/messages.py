"""The body of POST /v1/messages, and its translation to a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from localllm.conversation.messages import flatten, normalise
from localllm.conversation.tools.prompt import checked_tools
from localllm.errors import RequestError, UnsupportedError
from localllm.server.dialects.anthropic.client_tools import function_of, is_client_tool
from localllm.server.dialects.anthropic.context_management import ContextManagement, continued
from localllm.server.dialects.constraints import Constraint, of_response_format, only_one
from localllm.server.dialects.fields import Count, SentTools, StopText, stop_texts
from localllm.server.dialects.known import (
    CACHE_CONTROL,
    FORM,
    READS,
    REFUSED,
    BodyPart,
    Refused,
    Shape,
    Unused,
    indifferent,
    one_of,
    shape,
)
from localllm.server.dialects.thinking import ReasonedFields
from localllm.server.dialects.toolbox import Toolbox
from localllm.server.generation.chat import ChatRequest
from localllm.server.models.router import ServedModel

# Every prompt is cached, with or without `cache_control`.
_BLOCK: dict[str, Any] = shape(
    "type", "text", "id", "name", "input", "tool_use_id", "is_error", "thinking", "signature",
    "data", "tool_name", "title", "encrypted_content",
    cache_control=CACHE_CONTROL,
    source=shape(
        "data", "media_type", "url", "file_id",
        type=one_of("base64", "url", "file", "text", "content"),
    ),
    citations=Unused(off=(None, [], {"enabled": False})),
    context=Unused(off=(None, "")),
)  # fmt: skip
_TOOL = shape(
    "type", "name", "description", "input_schema", "strict", "display_width_px",
    "display_height_px", "display_number", "max_characters",
    cache_control=CACHE_CONTROL,
)  # fmt: skip
_FORM = {**FORM, "type": one_of("json_schema")}
# Put before the output of a failed tool, because chat templates have no field for failures.
FAILED = "[the tool failed]"


def _server_side(kind: Any) -> bool:
    """Return whether Anthropic's servers ran the tool in an earlier turn. The message also contains
    the answer that used the result."""
    return kind in ("server_tool_use", "mcp_tool_use") or str(kind).endswith("_tool_result")


def _block_is_read(kind: Any) -> bool:
    return not _server_side(kind)


def _tool_is_read(kind: Any) -> bool:
    return kind in (None, "custom") or is_client_tool(kind)


_BLOCK["source"]["content"] = _BLOCK
_BLOCK["content"] = _BLOCK
_BLOCK[READS] = _block_is_read
_TOOL[READS] = _tool_is_read


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
        "container": Refused("this server runs no containers"),
        "mcp_servers": Refused("this server does not connect to MCP servers", (None, [])),
        **dict.fromkeys(("betas", "cache_control")),
        "speed": indifferent("standard", "fast"),
    }
    context_management: ContextManagement | None = Field(
        None, description="`edits` that leave out old results and reasoning, or compact"
    )
    messages: list[dict[str, Any]]
    max_tokens: Count | None = None
    system: str | list[Any] | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=32)] | None = None
    tools: SentTools | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: OutputConfig | None = Field(
        None, description="`effort`; `format` with a JSON schema"
    )
    output_format: dict[str, Any] | None = Field(
        None, description="the former name of output_config.format"
    )

    def effort(self) -> str | None:
        """Return the reasoning effort. `output_config` may set another level unless reasoning is
        off."""
        found = super().effort()
        if found != "none" and self.output_config:
            return self.output_config.effort or found
        return found

    def effort_fields(self) -> list[str]:
        config = self.output_config
        own = ["output_config.effort"] if config is not None and config.effort else []
        return own + super().effort_fields()

    def constraint_field(self) -> str:
        if self.output_config is not None and self.output_config.format:
            return "output_config.format"
        return "output_format" if self.output_format else super().constraint_field()

    def constraint(self, response_format: Any = None) -> Constraint | None:
        """Return the constraint from `output_config.format`, or from the fields of other
        dialects."""
        wanted = (self.output_config and self.output_config.format) or self.output_format
        return only_one(
            output_config=of_response_format(wanted, "output_config.format"),
            grammar=super().constraint(response_format),
        )


def chat_request(fields: MessagesFields, model: ServedModel) -> tuple[ChatRequest, list[str]]:
    """Return the chat request, and the names of omitted parts: tools that only Anthropic's servers
    run, their results in earlier turns, and images."""
    messages: list[dict[str, Any]] = []
    omitted: list[str] = []
    if fields.system:
        # One block per paragraph. So the agent's own instructions stay separate from its later
        # additions.
        messages.append({"role": "system", "content": flatten(fields.system, "system")})
    conversation = continued(fields.messages)
    for i, message in enumerate(conversation.messages, conversation.left_out):
        messages += plain_messages(message, f"messages[{i}]", omitted)
    if not fields.messages:
        raise RequestError("messages is empty: send at least one", param="messages")
    toolbox = _toolbox(fields.tools or [])
    choice = fields.tool_choice or {}
    parallel = choice.get("disable_parallel_tool_use") is not True
    if choice.get("type") == "tool":
        choice = {**choice, "type": "function"}
    options = fields.response_options(
        toolbox, choice or fields.tool_choice, fields.constraint(), parallel=parallel
    )
    generation = fields.generation(
        model.sampling_for(options.effort),
        fields.max_tokens,
        thinking_tokens=fields.thinking_tokens(),
    )
    stop = stop_texts(fields.stop_sequences) + generation.stop
    generation = replace(generation, stop=stop)
    chat = ChatRequest(normalise(messages, omitted), generation, options)
    managed = fields.context_management
    if managed is not None:
        omitted += managed.unknown()
        edits = [edit.edit() for edit in managed.edits]
        chat = replace(
            chat,
            edits=tuple(edit for edit in edits if edit is not None),
            summary=managed.summary(conversation.earlier),
        )
    return chat, [*toolbox.skipped, *dict.fromkeys(omitted)]


def _toolbox(sent: list[dict[str, Any]]) -> Toolbox:
    """Return the tools as functions. Tools that only Anthropic's servers run are skipped."""
    tools_with_names = []
    skipped = []
    for tool in sent:
        function = function_of(tool)
        if function is None:
            skipped.append(f"tools.{tool.get('name', tool['type'])}")
        else:
            tools_with_names.append({"type": "function", "function": function})
    return Toolbox(checked_tools(tools_with_names), skipped=skipped)


def plain_messages(
    message: Mapping[str, Any], where: str, omitted: list[str]
) -> list[dict[str, Any]]:
    """Return one message in OpenAI's format. Tool results become separate messages.

    The names of omitted blocks are added to `omitted`. Raises RequestError."""
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
        kind = _kind(block)
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
    parts = block.get("content")
    if not isinstance(parts, list):
        parts = _text(flatten(parts, where))
    read = _text(FAILED) if block.get("is_error") is True else []
    for i, part in enumerate(parts):
        read += _readable(part, f"{where}[{i}]")
    texts = [p for p in read if not (isinstance(p, Mapping) and p.get("text") == "")]
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": texts}


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def _readable(block: Any, where: str) -> list[Any]:
    """Return the content parts for `block`. Parts that `normalise` knows are passed on. Raises
    UnsupportedError."""
    kind = _kind(block)
    match kind:
        case "text" | "image" | "thinking" | "redacted_thinking":
            return [block]
        case "document":
            return _document(block)
        case "search_result":
            return _titled(block, block.get("content"))
        case "compaction":
            return []  # without content
        case "tool_reference":
            return _text(f"The tool {block.get('tool_name')} can be called now.")
    known = (
        "text, image, thinking, redacted_thinking, document, search_result, compaction, "
        "tool_reference, tool_use, tool_result"
    )
    raise UnsupportedError(
        f"{where}.type {str(kind)[:40]!r} is not supported; known: {known}", param=where
    )


def _document(block: Mapping[str, Any]) -> list[Any]:
    """Return the text of a text document. PDFs and URLs are passed on to `normalise`."""
    match block.get("source"):
        case {"type": "text", **source}:
            return _titled(block, source.get("data"))
        case {"type": "content", **source}:
            return _titled(block, source.get("content"))
    return [block]


def _titled(block: Mapping[str, Any], content: Any) -> list[Any]:
    """Return the content of a block after its title."""
    title = block.get("title")
    parts = content if isinstance(content, list) else _text(content)
    if isinstance(title, str) and title:
        return [*_text(title), *parts]
    return parts


def _text(text: Any) -> list[Any]:
    return [{"type": "text", "text": text}]
