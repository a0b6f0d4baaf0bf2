"""Builds prompts. A chat is rendered with the model's template, together with the plan to constrain
and parse its answer. Fill-in-the-middle prompts have the order of llama.cpp's /infill: repository
name, other files, prefix, suffix, middle."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from localllm.conversation import tools as tool_formats
from localllm.conversation.messages import unfinished
from localllm.conversation.reply import ReplyFormat, turn_ends
from localllm.conversation.template import DEFAULT_MARKS, ChatTemplate
from localllm.conversation.tools.base import GrammarTrigger, Tool, ToolFormat
from localllm.conversation.tools.constraints import (
    answer_or_call,
    forced,
    framed_answer,
    triggers_of,
)
from localllm.conversation.tools.prompt import Choice, with_instruction
from localllm.conversation.tools.schemas import constrainable
from localllm.engine.messages import Generation
from localllm.engine.worker.client import EngineClient
from localllm.errors import RequestError, UnsupportedError
from localllm.server.generation.job import AnswerPlan, GenerationJob
from localllm.server.http.json_body import process_body
from localllm_backends.contract import ModelInfo
from localllm_backends.control_text import ControlTexts, without_marks

# Template variables that a client may not set.
_RESERVED = ("self", "messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
# Fields of a message that are not copied into the prompt.
_NO_TEXT = ("role", "images", "sounds", "pdfs")
_NEAREST_EFFORT = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high", "ultra": "high"}
Tokenize = Callable[[str], Awaitable[list[int]]]
# Shares of the context, after the answer's part is subtracted. The text before the cursor is more
# informative than the text after it.
_PREFIX_SHARE = 0.6
_SUFFIX_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """How a client wants the answer: the `tools` that may or must be called, a constraint
    (`grammar`), the reasoning `effort`, and variables of the chat template.

    - `shows_tools`: the prompt lists the tools even if no tool may be called, so it begins like the
      other prompts of the conversation.
    - `loop_guard`: after so many equal calls in a row, no call may be made; None: no limit.
    - `continues`: a final assistant message is the beginning of the answer, not an earlier answer.
    - `parse_special`: control tokens spelled in messages and tools are parsed. Otherwise they are
      text.
    - `hides_reasoning`: the reasoning is left out of the answer.
    - `reasoning_fields`: fields without effect on a model without reasoning.
    - `effort_fields`, `budget_fields` and `grammar_field`: the client's fields that set the effort,
      the limit on the reasoning, and the constraint. They are named if they have no effect.
    """

    tools: Sequence[Tool] = ()
    choice: Choice = field(default_factory=lambda: Choice("none"))
    parallel: bool = True
    shows_tools: bool = False
    loop_guard: int | None = None
    grammar: tuple[str, str] | None = None
    effort: str | None = None
    template_kwargs: Mapping[str, Any] | None = None
    continues: bool = True
    parse_special: bool = False
    hides_reasoning: bool = False
    reasoning_fields: tuple[str, ...] = ()
    effort_fields: tuple[str, ...] = ()
    budget_fields: tuple[str, ...] = ()
    grammar_field: str = "response_format"

    @property
    def offered(self) -> list[Tool]:
        """The tools that may be called."""
        if self.choice.mode != "none":
            return list(self.tools)
        return []


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation and the plan for its answer. `ignored`: options without effect on
    this model."""

    text: str  # with the marks of control_text.py
    answer: AnswerPlan
    ignored: tuple[str, ...] = ()


async def build_prompt(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    options: ResponseOptions,
    tokenize: Tokenize | None = None,
    controls: ControlTexts | None = None,
) -> Prompt:
    """Render a conversation and plan its answer. This runs in a thread, because a long conversation
    takes milliseconds and a hostile template takes seconds.

    `tokenize` is used to check whether the opening marker of a tool call is a single token. Only a
    grammar needs that. If the text of one of `controls` occurs in a message or a tool, it stays
    text.
    """
    marker: int | None = None
    if options.offered and options.grammar is not None and tokenize is not None:
        ids = await tokenize(_tool_format(template).markers[0])
        marker = ids[0] if len(ids) == 1 else None
    controls = None if options.parse_special else controls
    return await process_body(
        partial(_build, template, messages, options, marker, controls), takes_ms=True
    )


def _tool_format(template: ChatTemplate) -> ToolFormat:
    """The template's tool-call format; the default format if the template ignores tools."""
    if template.knows_tools:
        return tool_formats.format_for(template.source)
    return tool_formats.DEFAULT


def _build(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    options: ResponseOptions,
    marker_id: int | None,
    controls: ControlTexts | None,
) -> Prompt:
    tools = options.offered
    style = _tool_format(template)
    if tools and template.knows_tools and tool_formats.has_unknown_format(template.source):
        raise UnsupportedError(
            "this model's chat template uses a tool-call format that this server does not "
            "support: calls would arrive as plain text",
            hint="send tool_choice none, or use another model for tools",
            param="tools",
        )
    kwargs, ignored = _variables(template, options)
    continues = options.continues and unfinished(messages)
    shown = options.tools if options.shows_tools else tools
    text, answer_start = _rendered(template, messages, shown, kwargs, controls, continues=continues)
    think = tool_formats.reasoning_markers(template.source, style)
    if continues:
        text, thinking = _continued(text, answer_start, think)
    else:
        thinking = think is not None and text.rstrip().endswith(think[0])
    reply = ReplyFormat(
        think=think,
        thinking=thinking,
        drops=style.drops,
        ends=turn_ends(template.source),
        lead=style.header if text.endswith(style.header) else "",
    )
    if tools:
        enforced, not_enforced = constrainable(tools)
        ignored += not_enforced
        if options.choice.mode == "required" and options.grammar is not None:
            ignored += (options.grammar_field,)  # the call is the answer
        answer = _with_tools(
            replace(options, tools=enforced), tools, style, template.source, reply, marker_id
        )
    else:
        answer = _without_tools(options, style, reply, without_marks(answer_start))
    if template.is_default:
        answer = replace(answer, marks=DEFAULT_MARKS)
    return Prompt(text, answer, ignored)


def _rendered(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    kwargs: Mapping[str, Any],
    controls: ControlTexts | None,
    *,
    continues: bool,
) -> tuple[str, str]:
    """The conversation as text, and the beginning of the answer if the prompt `continues` one."""
    shown: list[Any] = [{"type": t["type"], "function": t["function"]} for t in tools]
    if controls is not None:
        messages = [_marked_message(message, controls) for message in messages]
        shown = _marked(shown, controls)
        kwargs = _marked(kwargs, controls)
    if not template.knows_tools:
        # The template would ignore the tools, and reject or garble the `tool` role.
        messages = with_instruction(messages, shown)
    tools_shown = shown or None
    if continues:
        text = template.render_continued(messages, tools=tools_shown, **kwargs)
        return text, messages[-1]["content"]
    return template.render(messages, tools=tools_shown, **kwargs), ""


def _marked_message(message: Mapping[str, Any], controls: ControlTexts) -> dict[str, Any]:
    return {
        key: value if key in _NO_TEXT else _marked(value, controls)
        for key, value in message.items()
    }


def _marked(value: Any, controls: ControlTexts) -> Any:
    if isinstance(value, str):
        return controls.marked(value)
    if isinstance(value, Mapping):
        return {_marked(k, controls): _marked(v, controls) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(v, controls) for v in value]
    return value


def _continued(text: str, answer_start: str, think: tuple[str, str] | None) -> tuple[str, bool]:
    """The prompt that ends in `beginning`, and whether it ends inside a reasoning block. If the
    template opened a block before `beginning`, the block is closed, because the text belongs to the
    answer."""
    if think is None:
        return text, False
    if think[0] in answer_start:
        return text, answer_start.rfind(think[0]) > answer_start.rfind(think[1])
    before = text.removesuffix(answer_start)
    if before.rstrip().endswith(think[0]):
        return f"{before.rstrip()}\n\n{think[1]}\n\n{answer_start}", False
    return text, False


def _variables(
    template: ChatTemplate, options: ResponseOptions
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The template's variables, and the names of options that it does not use. Raises RequestError
    for reserved variables."""
    kwargs = dict(options.template_kwargs or {})
    for name in _RESERVED:
        if name in kwargs:
            raise RequestError(
                f"chat_template_kwargs may not set {name}", param=f"chat_template_kwargs.{name}"
            )
    unknown = tuple(f"chat_template_kwargs.{n}" for n in kwargs if n not in template.source)
    if options.effort is None:
        return kwargs, unknown
    if "reasoning_effort" in template.source:
        kwargs.setdefault("reasoning_effort", _effort_of_template(template.source, options.effort))
        if options.effort == "none" and "enable_thinking" in template.source:
            kwargs.setdefault("enable_thinking", False)
    elif "enable_thinking" in template.source:
        kwargs.setdefault("enable_thinking", options.effort != "none")
    else:
        # The template has no control for reasoning.
        return kwargs, (*unknown, *options.effort_fields)
    return kwargs, unknown


def _without_tools(
    options: ResponseOptions, style: ToolFormat, reply: ReplyFormat, answer_start: str
) -> AnswerPlan:
    """The plan of an answer without tools, with the requested constraint, continuing
    `beginning`."""
    grammar = options.grammar
    if reply.thinking:
        answer_start = ""
    elif reply.think is not None and reply.think[1] in answer_start:
        answer_start = answer_start.rpartition(reply.think[1])[2].lstrip()
    if grammar is not None and grammar[0] == "json_schema" and not answer_start:
        shaped = framed_answer(style, grammar[1])
        grammar = ("lark", shaped) if shaped is not None else grammar
    return AnswerPlan(
        reply, grammar, control=style.control and style.think is not None, beginning=answer_start
    )


def _effort_of_template(source: str, effort: str) -> str:
    """`effort` as a level of the template: low, medium, high, or another one that it names."""
    named = f"'{effort}'" in source or f'"{effort}"' in source
    if named:
        return effort
    return _NEAREST_EFFORT.get(effort, effort)


def _with_tools(
    options: ResponseOptions,
    offered: Sequence[Tool],
    style: ToolFormat,
    source: str,
    reply: ReplyFormat,
    marker_id: int | None,
) -> AnswerPlan:
    """The plan of an answer with tools: a forced call, a schema or a call, or free text up to a
    call.

    `options` has the tools as the grammar constrains them. `offered` has them as the client sent
    them, for parsing calls.
    """
    tools = options.offered
    grammar = options.grammar
    parallel = options.parallel
    prefix = ""
    calls: Mapping[str, GrammarTrigger] = {}
    if options.choice.mode == "required":
        if style.opening is None:
            style = tool_formats.DEFAULT
        prefix, grammar = forced(style, tools, options.choice)
        parallel = False
    elif grammar is not None:
        kind, schema = grammar
        combined = None
        if kind == "json_schema":
            combined = answer_or_call(style, source, tools, schema, marker_id)
        if combined is None:
            raise UnsupportedError(
                "tools with tool_choice auto can't be combined with this form of answer in the "
                f"{style.name} "
                "format: send tool_choice none or required",
                param="response_format",
            )
        grammar = ("lark", combined)
    else:
        calls = triggers_of(style, source, tools)
    # Even if the prompt shows the default format, a model may use the format it was trained on.
    trained_format = tool_formats.format_for(source)
    readers = {
        **dict.fromkeys(trained_format.markers, trained_format.reader),
        **dict.fromkeys(style.markers, style.reader),
    }
    reply = replace(
        reply,
        call_markers=list(readers),
        new_reader=lambda first, marker: readers[marker](first, marker, offered),
        parallel=parallel,
        # Before a grammar the reasoning must end first, so a call within it does not count.
        calls_in_reasoning=style.calls_in_reasoning and grammar is None,
        quotable=not style.control,
    )
    return AnswerPlan(reply, grammar, prefix, calls, style.control or trained_format.control)


def wants_bos(info: ModelInfo, text: str) -> bool:
    """True if the engine must prepend BOS: the model needs one and the template did not write it."""
    return info.adds_bos and not (info.bos_text and text.startswith(info.bos_text))


async def text_job(
    engine: EngineClient,
    prompts: Sequence[str | list[int]],
    generation: Generation,
    grammar: tuple[str, str] | None,
    *,
    suffix: str | None = None,
    n: int = 1,
) -> GenerationJob:
    """A job for raw `prompts` (texts or token ids). With a `suffix`, the first prompt is the text
    before the gap to fill."""
    first, *also = prompts
    if suffix:
        assert isinstance(first, str)
        first = await fim_prompt(engine, first, suffix, answer_tokens=generation.max_tokens)
    return GenerationJob(
        prompt=first,
        generation=generation,
        answer=AnswerPlan(grammar=grammar),
        also=tuple(also),
        add_bos=isinstance(first, str) and wants_bos(engine.info, first),
        n=n,
    )


async def fim_prompt(
    engine: EngineClient,
    prefix: str,
    suffix: str,
    *,
    extra: Sequence[tuple[str, str]] = (),
    answer_tokens: int | None = None,
    middle: str = "",
) -> list[int]:
    """Token ids that make the model write the text between `prefix` and `suffix`.

    `extra` are other files as (name, text), the most relevant last. `middle` is the beginning of
    the answer. Text too far from the cursor is left out, so that the prompt and `answer_tokens` fit
    the context. Raises UnsupportedError for a model without FIM tokens.
    """
    fim = engine.info.fim_tokens
    if not {"pre", "suf", "mid"} <= set(fim):
        raise UnsupportedError(
            "this model has no fill-in-the-middle tokens, so it does not support a suffix",
            hint=(
                "use a model with such tokens: `localllm recommend --for autocomplete` lists some"
            ),
            param="suffix",
        )
    window = engine.info.n_ctx - min(answer_tokens or 256, engine.info.n_ctx // 2)
    before = await engine.tokenize(prefix, special=False)
    after = await engine.tokenize(suffix, special=False)
    answer_start = []
    if middle:
        answer_start = await engine.tokenize(middle, special=False)
    budget_tokens = max(0, window - 8 - len(answer_start))
    keep_after = min(
        len(after), max(int(budget_tokens * _SUFFIX_SHARE), budget_tokens - len(before))
    )
    keep_before = min(
        len(before), max(int(budget_tokens * _PREFIX_SHARE), budget_tokens - keep_after)
    )
    keep_after = min(keep_after, budget_tokens - keep_before)
    parts = [
        fim["pre"],
        *before[len(before) - keep_before :],
        fim["suf"],
        *after[:keep_after],
        fim["mid"],
        *answer_start,
    ]
    context = await _files(engine, extra, budget_tokens - keep_before - keep_after)
    bos = engine.info.bos_token
    return [*([bos] if engine.info.adds_bos and bos is not None else []), *context, *parts]


async def _files(
    engine: EngineClient, extra: Sequence[tuple[str, str]], budget_tokens: int
) -> list[int]:
    """The tokens of other files. If there is not enough room, the first files are left out."""
    fim = engine.info.fim_tokens
    parts: list[list[int]] = []
    for name, text in reversed(extra):
        body = await engine.tokenize(f"{name}\n{text}\n", special=False)
        if "sep" in fim:
            part = [fim["sep"], *body]
        else:
            part = [*await engine.tokenize("\n\n--- "), *body]
        if len(part) > budget_tokens:
            break
        budget_tokens -= len(part)
        parts.append(part)
    context = [*chain.from_iterable(reversed(parts))]
    if context and "sep" in fim:
        current = await engine.tokenize("filename\n", special=False)
        if budget_tokens > len(current) + 1:
            context = [*context, fim["sep"], *current]
    return context
