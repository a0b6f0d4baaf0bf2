"""The chat request that every chat dialect is translated to, and the generation job that a loaded model makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.conversation.images import prepare_images
from localllm.conversation.prefix_reuse import ReasoningCache, without_changing_lines
from localllm.engine.messages import Generation
from localllm.engine.worker.client import EngineClient
from localllm.server.generation.compaction import Messages, TokenCounts, fit_to_context
from localllm.server.generation.job import GenerationJob
from localllm.server.generation.prompt import Prompt, ResponseOptions, build_prompt, wants_bos
from localllm.server.models.router import ServedModel
from localllm_backends.control_text import control_texts


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation and how to answer it; `messages` as `conversation.messages.normalise` returns them. `compaction`:
    the oldest turns may be left out if the conversation does not fit. `omitted` names attachments that could not be
    read."""

    messages: Sequence[Mapping[str, Any]]
    generation: Generation
    options: ResponseOptions = field(default_factory=ResponseOptions)
    n: int = 1
    compaction: bool = False
    omitted: tuple[str, ...] = ()


async def chat_job(
    chat: ChatRequest, model: ServedModel, engine: EngineClient, cache: ReasoningCache, counts: TokenCounts
) -> GenerationJob:
    """Render the conversation with the model's chat template. Raises RequestError."""
    attached = prepare_images(chat.messages, vision=engine.info.vision)
    messages, normalised = without_changing_lines(cache.restore(attached.messages))
    if attached.files:
        engine = EngineWithImages(engine, attached.files)
    template, controls = model.template(engine.info), control_texts(engine.info.control_texts)

    async def render(remaining: Messages) -> Prompt:
        return await build_prompt(template, remaining, chat.options, engine.tokenize, controls)

    if chat.compaction:
        prompt, compacted = await fit_to_context(engine, template, messages, render, chat.generation.max_tokens, counts)
    else:
        prompt, compacted = await render(messages), ""
    generation, ignored = chat.generation, (*prompt.ignored, *attached.ignored, *chat.omitted)
    if generation.thinking_tokens is not None and prompt.answer.reply.think is None:
        # This model has no reasoning to limit.
        generation, ignored = replace(generation, thinking_tokens=None), (*ignored, "thinking_budget")
    return GenerationJob(
        prompt=prompt.text,
        generation=generation,
        answer=prompt.answer,
        add_bos=wants_bos(engine.info, prompt.text),
        n=chat.n,
        images={mark: file for mark, file in attached.files.items() if mark in prompt.text},
        ignored=ignored,
        normalised=normalised,
        compacted=compacted,
        asked=chat.messages[-1]["content"] if prompt.answer.reply.think is not None else None,
    )


class EngineWithImages:
    """An engine whose `tokenize` counts the images of one conversation; `files` in base64, by their marks."""

    def __init__(self, engine: EngineClient, files: dict[str, str]) -> None:
        self._engine, self._files = engine, files
        self.info = engine.info

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def tokenize(
        self, text: str, *, special: bool = True, add_bos: bool = False, images: dict[str, str] | None = None
    ) -> list[int]:
        there = images or {mark: file for mark, file in self._files.items() if mark in text}
        if not there:
            return await self._engine.tokenize(text, special=special, add_bos=add_bos)
        return await self._engine.tokenize(text, special=special, add_bos=add_bos, images=there)
