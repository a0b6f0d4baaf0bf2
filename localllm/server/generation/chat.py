"""Chat requests: every chat dialect is translated to one. A request is fitted into the context and
becomes a generation job."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any, TypeAlias

from localllm.conversation.compaction import MessageCost, compact
from localllm.conversation.context_edits import ContextEdit
from localllm.conversation.images import PreparedMessages, prepare_media
from localllm.conversation.prefix_reuse import ReasoningCache, without_changing_lines
from localllm.conversation.repeated_calls import RepeatedCall, repeated_call
from localllm.conversation.summary import Summary
from localllm.conversation.template import ChatTemplate, TemplateError, check_length
from localllm.conversation.tools.prompt import Choice
from localllm.engine.messages import Generation
from localllm.engine.worker.client import EngineClient
from localllm.errors import ContextLengthError
from localllm.server.generation.editing import Edited, edited
from localllm.server.generation.job import GenerationJob
from localllm.server.generation.prompt import (
    Prompt,
    ResponseOptions,
    build_prompt,
    wants_bos,
)
from localllm.server.generation.shared_beginning import shared_beginning
from localllm.server.http.json_body import process_body
from localllm.server.http.kv_servers import kv_servers
from localllm.server.http.recent import RecentlyUsed
from localllm.server.models.router import ServedModel
from localllm_backends.control_text import control_texts

# The answer gets at most 1/`_ANSWER_SHARE` of the context, or less if `max_tokens` is smaller.
# Agents request 32,000 tokens whatever the context is.
_ANSWER_SHARE = 4
# Token counts of single messages may not add up to that of the prompt, so the budget shrinks until
# the prompt fits.
_TIGHTER = 0.75
_TRIES = 8
MAX_COUNTS = 65_536
# Tokens around each message (role, markers), if they can't be measured from the template.
_FRAME_TOKENS = 8
_PROBE = "zqx"
# Variables of chat templates that switch the reasoning off. They work without the template too.
_SWITCHES = ("chat_template_kwargs.enable_thinking", "chat_template_kwargs.thinking")

Messages = Sequence[Mapping[str, Any]]
KeptCounts: TypeAlias = RecentlyUsed[bytes, int]
Render = Callable[[Messages], Awaitable[Prompt]]


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Counts the tokens of a conversation's texts in the engine's vocabulary. `files`: its images
    in base64, by mark. `kept_counts`: earlier counts, because a conversation comes back with every
    turn.
    """

    engine: EngineClient
    files: Mapping[str, str]
    kept_counts: KeptCounts

    async def of(self, text: str) -> int:
        """The number of tokens of a part of a message."""
        if not text:
            return 0
        key = hashlib.sha256(
            f"{self.engine.info.fingerprint}\0{text}".encode(errors="surrogatepass")
        ).digest()
        count = self.kept_counts.get(key)
        if count is None:
            count = self.kept_counts.put(key, await count_tokens(self.engine, text, self.files))
        return count

    async def of_prompt(self, text: str) -> int:
        """The number of tokens of a complete prompt."""
        bos = wants_bos(self.engine.info, text)
        return await count_tokens(self.engine, text, self.files, add_bos=bos)


async def count_tokens(
    engine: EngineClient, text: str, files: Mapping[str, str], *, add_bos: bool = False
) -> int:
    """The number of tokens of `text`, including those of the images `files` that occur in it. For a
    text that exceeds the engine's limit, the number is approximate."""
    images = {mark: file for mark, file in files.items() if mark in text}
    try:
        return await engine.count_tokens(text, add_bos=add_bos, media=images or None)
    except ContextLengthError as e:
        if e.counts is None:
            raise
        return e.counts[0]


async def fit_to_context(
    counts: TokenCounts,
    template: ChatTemplate,
    messages: Messages,
    render: Render,
    max_tokens: int | None,
) -> tuple[Prompt, str]:
    """The prompt for `messages`, and a note of how much was left out. The oldest messages are left
    out if the prompt does not fit next to an answer of `max_tokens`. At most a quarter of the
    context is reserved for the answer.

    Raises ContextLengthError with the counts.
    """
    n_ctx = counts.engine.info.n_ctx
    max_answer_tokens = n_ctx // _ANSWER_SHARE
    budget = n_ctx - max(
        1, max_answer_tokens if max_tokens is None else min(max_tokens, max_answer_tokens)
    )
    prompt = await render(messages)
    if len(prompt.text.encode()) < budget:  # a token has at least one byte
        return prompt, ""
    total_tokens = await counts.of_prompt(prompt.text)
    if total_tokens <= budget:
        return prompt, ""
    head = list(takewhile(_is_system, messages))
    minimal = await render([*head, {"role": "user", "content": _PROBE}])
    fixed_tokens = await counts.of_prompt(minimal.text)
    costs = await _costs(counts, template, messages)
    room = max(0, budget - fixed_tokens)
    budgets = [fixed_tokens + int(room * _TIGHTER**attempt) for attempt in range(_TRIES - 1)]
    for budget_tokens in (*budgets, 0):
        compacted = compact(messages, costs, fixed_tokens=fixed_tokens, budget_tokens=budget_tokens)
        prompt = await render(compacted.messages)
        n_tokens = await counts.of_prompt(prompt.text)
        if n_tokens <= budget or compacted.exhausted:
            break
    if n_tokens >= n_ctx:
        raise ContextLengthError(
            f"the conversation has {total_tokens} tokens, and {n_tokens} without the "
            f"{len(compacted.dropped)} messages that may be omitted; the served context is {n_ctx}",
            hint="shorten the system prompt, the tools or the newest turn, "
            "or serve with a larger --context",
            param="messages",
            counts=(n_tokens, n_ctx),
        )
    if not compacted.dropped:
        return prompt, ""
    return prompt, f"{len(compacted.dropped)} messages, {total_tokens - n_tokens} tokens"


async def _costs(
    counts: TokenCounts, template: ChatTemplate, messages: Messages
) -> list[MessageCost]:
    frame = await _frame_tokens(counts, template)
    keeps_reasoning = await asyncio.to_thread(_keeps_reasoning, template)

    async def cost(message: Mapping[str, Any]) -> MessageCost:
        tokens = frame + await counts.of(message["content"])
        for call in message.get("tool_calls", ()):
            tokens += frame + await counts.of(json.dumps(call["function"], ensure_ascii=False))
        reasoning_tokens = await counts.of(message.get("reasoning_content") or "")
        if keeps_reasoning:
            return MessageCost(tokens + reasoning_tokens)
        return MessageCost(tokens, passing=reasoning_tokens)

    return list(await asyncio.gather(*map(cost, messages)))


async def _frame_tokens(counts: TokenCounts, template: ChatTemplate) -> int:
    """Tokens that the template adds to each message, measured with one more question and answer."""
    question = {"role": "user", "content": _PROBE}
    answer = {"role": "assistant", "content": _PROBE}
    try:
        short, long = [
            await asyncio.to_thread(template.render, m)
            for m in ([question], [question, answer, question])
        ]
    except TemplateError:
        return _FRAME_TOKENS
    added_tokens = await counts.of(long) - await counts.of(short)
    # Rounded up: if the count is too high, compaction only starts a little early.
    return max(1, (added_tokens - 2 * await counts.of(_PROBE) + 1) // 2)


def _is_system(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "system")


def _keeps_reasoning(template: ChatTemplate) -> bool:
    """True if the template writes the reasoning of earlier turns into the prompt."""
    question = {"role": "user", "content": "."}
    answer = {"role": "assistant", "content": ".", "reasoning_content": _PROBE}
    try:
        return _PROBE in template.render([question, answer, question])
    except TemplateError:
        return True


@dataclass(frozen=True, slots=True)
class SummaryEdit:
    """The model summarises the conversation before its answer, if the prompt has more than
    `above_tokens`.

    `asks`: the text that asks for the summary. `pauses`: there is no answer then. `earlier`: the
    summary in the first message, None without one."""

    above_tokens: int
    asks: str
    pauses: bool = False
    earlier: Summary | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation and how to answer it. `messages` come from `conversation.messages.normalise`.
    `compaction`: the oldest turns may be left out if the conversation does not fit. `edits` leave out
    old results and reasoning, and `summary` the rest. `omitted` names attachments that could not be
    read."""

    messages: Sequence[Mapping[str, Any]]
    generation: Generation
    options: ResponseOptions = field(default_factory=ResponseOptions)
    n: int = 1
    compaction: bool = False
    edits: tuple[ContextEdit, ...] | None = None
    summary: SummaryEdit | None = None
    omitted: tuple[str, ...] = ()


async def chat_job(
    chat: ChatRequest,
    model: ServedModel,
    engine: EngineClient,
    cache: ReasoningCache,
    kept_counts: KeptCounts,
) -> GenerationJob:
    """Render the conversation with the model's chat template. Raises RequestError."""
    check_length(chat.messages)
    prepare = partial(_prepared, chat.messages, cache, vision=engine.info.vision)
    attached, messages, normalised, repeated = await process_body(prepare)
    chat = replace(chat, options=_guarded(chat.options, repeated))
    template = model.template(engine.info)
    controls = control_texts(engine.info.control_texts)

    async def render(remaining: Messages) -> Prompt:
        return await build_prompt(template, remaining, chat.options, engine.tokenize, controls)

    counts = TokenCounts(engine, attached.files, kept_counts)
    changes: Edited | None = None
    if chat.edits is not None:

        async def prompt_tokens(remaining: Messages) -> int:
            return await counts.of_prompt((await render(remaining)).text)

        changes = await edited(messages, chat.edits, prompt_tokens)
        messages = [dict(message) for message in changes.messages]
    if chat.compaction:
        prompt, compacted = await fit_to_context(
            counts, template, messages, render, chat.generation.max_tokens
        )
    else:
        prompt = await render(messages)
        compacted = ""
    generation, ignored = _reasoning(chat, prompt, template)

    async def render_text(remaining: Messages) -> str:
        return (await render(remaining)).text

    shared = await shared_beginning(prompt.text, messages, render_text, kv_servers())
    question = None
    if prompt.answer.reply.think is not None:
        question = chat.messages[-1]["content"]
    images = {mark: file for mark, file in attached.files.items() if mark in prompt.text}
    job = GenerationJob(
        prompt=prompt.text,
        generation=generation,
        answer=prompt.answer,
        add_bos=wants_bos(engine.info, prompt.text),
        n=chat.n,
        media=images,
        ignored=(*ignored, *attached.ignored, *chat.omitted),
        normalised=normalised,
        compacted=compacted,
        repeated=repeated,
        question=question,
        hides_reasoning=chat.options.hides_reasoning,
        shared=shared,
    )
    if changes is None:
        return job
    return replace(job, applied=changes.applied, original_tokens=changes.original_tokens)


def _prepared(
    sent: Messages, cache: ReasoningCache, *, vision: bool
) -> tuple[PreparedMessages, list[dict[str, Any]], tuple[str, ...], RepeatedCall | None]:
    """The conversation for the template: its media, its messages, the names of lines that were
    removed, and the call that it repeats. Long texts take milliseconds."""
    attached = prepare_media(sent, vision=vision)
    messages, normalised = without_changing_lines(cache.restore(attached.messages))
    return attached, messages, normalised, repeated_call(messages)


async def instructions_of(chat: ChatRequest, model: ServedModel, engine: EngineClient) -> str:
    """The beginning that all prompts of this client share: system messages and tools, up to the text
    of the first question. Raises RequestError."""
    head, _ = without_changing_lines([*takewhile(_is_system, chat.messages)])
    probe = [*head, {"role": "user", "content": _PROBE}]
    controls = control_texts(engine.info.control_texts)
    template = model.template(engine.info)
    prompt = await build_prompt(template, probe, chat.options, engine.tokenize, controls)
    return prompt.text.partition(_PROBE)[0]


def _guarded(options: ResponseOptions, repeated: RepeatedCall | None) -> ResponseOptions:
    """The options without permission to call tools, if the guard ends the loop of calls. The prompt
    still lists the tools, so its beginning stays in the cache."""
    guard = options.loop_guard
    if guard is None or repeated is None or repeated.times < guard or options.choice.mode != "auto":
        return options
    return replace(options, choice=Choice("none"), shows_tools=True)


def _reasoning(
    chat: ChatRequest, prompt: Prompt, template: ChatTemplate
) -> tuple[Generation, tuple[str, ...]]:
    """The generation with its limit on reasoning, and the names of options without effect. If
    reasoning is turned off but the template opens it or has no switch for it, the reasoning ends at
    once."""
    generation = chat.generation
    ignored = prompt.ignored
    reply = prompt.answer.reply
    if reply.think is None:
        return replace(generation, thinking_tokens=None), (
            *ignored,
            *chat.options.budget_fields,
            *chat.options.reasoning_fields,
        )
    if chat.options.effort != "none":
        return generation, ignored
    honoured = (*chat.options.effort_fields, *_SWITCHES)
    ignored = tuple(name for name in ignored if name not in honoured)
    if reply.thinking or "enable_thinking" not in template.source:
        generation = replace(generation, thinking_tokens=0)
    return generation, ignored
