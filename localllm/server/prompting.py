"""From a conversation and its wishes (tools, schema, effort) to the engine's prompt, constraint and reply format."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.conversation import tools as tool_formats
from localllm.conversation.reply import ReplyFormat, think_markers
from localllm.conversation.template import ChatTemplate
from localllm.conversation.tools.base import Tool
from localllm.conversation.tools.prompt import Choice, forced, with_instruction
from localllm.errors import RequestError, UnsupportedError
from localllm_backends.contract import ModelInfo

# Variables of a rendering that a client may not set: they are the conversation itself.
_RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
_THINKING_OFF = ("none",)
_NO_CALL = Choice("none")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation. `grammar` constrains the answer after the reasoning; `prefix` is the beginning of that
    answer (a forced call). `control`: the reply's markers are control tokens, which the engine must render."""

    text: str
    reply: ReplyFormat
    grammar: tuple[str, str] | None = None
    prefix: str = ""
    control: bool = False
    ignored: tuple[str, ...] = field(default=())


async def build(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Tool] = (),
    choice: Choice = _NO_CALL,
    parallel: bool = True,
    grammar: tuple[str, str] | None = None,
    reasoning_effort: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Prompt:
    """Render off the event loop: a long conversation takes milliseconds, a hostile template seconds."""
    kwargs = dict(template_kwargs or {})
    offered = list(tools) if choice.mode != "none" else []
    return await asyncio.to_thread(
        _build, template, messages, offered, choice, parallel, grammar, reasoning_effort, kwargs
    )


def _build(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: list[Tool],
    choice: Choice,
    parallel: bool,
    grammar: tuple[str, str] | None,
    effort: str | None,
    kwargs: dict[str, Any],
) -> Prompt:
    for name in _RESERVED:
        if name in kwargs:
            raise RequestError(f"chat_template_kwargs may not set {name}", param=f"chat_template_kwargs.{name}")
    ignored: list[str] = []
    if effort is not None:
        if "reasoning_effort" in template.source:
            kwargs.setdefault("reasoning_effort", effort)
        elif "enable_thinking" in template.source:
            kwargs.setdefault("enable_thinking", effort not in _THINKING_OFF)
        else:
            ignored.append("reasoning_effort")  # this model has no reasoning to steer
    style = tool_formats.format_for(template.source)
    if not template.knows_tools:
        # The template would drop the offer, and refuse or garble the `tool` role.
        style = tool_formats.DEFAULT
        messages = with_instruction(messages, tools)
    text = template.render(messages, tools=tools or None, **kwargs)
    think = style.think or think_markers(template.source)
    thinking = think is not None and text.rstrip().endswith(think[0])
    reply = ReplyFormat(think=think, thinking=thinking, drops=style.drops)
    prefix = ""
    if tools:
        if choice.mode == "required":
            if grammar is not None:
                raise RequestError("a required tool call and a response format exclude each other", param="tool_choice")
            style = style if style.opening is not None else tool_formats.DEFAULT
            prefix, grammar = forced(style, tools, choice)
            parallel = False
        elif grammar is not None:
            # The answer's form is enforced from its first token, so the model can't begin a call.
            raise UnsupportedError(
                "tools with tool_choice auto can't be combined with a response format: send tool_choice none or "
                "required",
                param="response_format",
            )
        reader = style.reader
        reply = replace(
            reply,
            call_markers=style.markers,
            new_reader=lambda first, marker: reader(first, marker, tools),
            parallel=parallel,
        )
    control = style.control and (bool(tools) or style.think is not None)
    return Prompt(text, reply, grammar, prefix, control, tuple(ignored))


def constraint(response_format: Any) -> tuple[str, str] | None:
    """The engine's constraint for OpenAI's `response_format`; raises RequestError or UnsupportedError."""
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        raise RequestError("the response format must be an object with a type", param="response_format")
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        # llama.cpp's spelling puts a schema beside json_object.
        schema = response_format.get("schema")
        return ("json_schema", json.dumps(schema if isinstance(schema, dict) else {"type": "object"}))
    if kind == "json_schema":
        wrapped = response_format.get("json_schema")
        schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else response_format.get("schema")
        if not isinstance(schema, Mapping):
            raise RequestError(
                "response_format.json_schema.schema must be an object", param="response_format.json_schema"
            )
        return ("json_schema", json.dumps(schema))
    raise UnsupportedError(
        f"response_format.type {str(kind)[:40]!r} is not supported; known: text, json_object, json_schema",
        param="response_format",
    )


def wants_bos(info: ModelInfo, text: str) -> bool:
    """True when the engine must put the BOS token first: the model wants one and the template did not write it."""
    return info.adds_bos and not (info.bos_text and text.startswith(info.bos_text))
