"""What every chat dialect is translated to: a ChatRequest, and from it the GenerationJob for a loaded engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.conversation.images import shown
from localllm.conversation.prefix_reuse import ReasoningCache, without_changing_lines
from localllm.engine.messages import Generation, Timings, TokenLogprob
from localllm.engine.worker.api import EngineClient
from localllm.server.generation import prompt as prompting
from localllm.server.generation.compaction import Messages, TokenCounts, fit_to_context
from localllm.server.generation.job import GenerationJob, Outcome, ReplyUsage, ReplyWriter
from localllm.server.generation.prompt import ResponseOptions
from localllm.server.models.router import ServedModel


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation and how to answer it; `messages` as `conversation.messages.normalise` gives them. `n` choices are
    wanted. `compaction`: the client lets us leave out the oldest turns when the conversation does not fit. `omitted` names
    what could not be read of its attachments."""

    messages: Sequence[Mapping[str, Any]]
    generation: Generation
    options: ResponseOptions = field(default_factory=ResponseOptions)
    n: int = 1
    compaction: bool = False
    omitted: tuple[str, ...] = ()


async def job_for(
    chat: ChatRequest, model: ServedModel, engine: EngineClient, recall: ReasoningCache, counts: TokenCounts
) -> GenerationJob:
    """Render the conversation with the model's template and describe the generation. Raises RequestError."""
    told = shown(chat.messages, sees=engine.info.vision)
    messages, normalised = without_changing_lines(recall.restore(told.messages))
    if told.files:
        engine = EngineWithImages(engine, told.files)
    template = model.template(engine.info)

    async def render(kept: Messages) -> prompting.Prompt:
        return await prompting.build(template, kept, chat.options, engine.tokenize)

    if chat.compaction:
        prompt, shortened = await fit_to_context(engine, template, messages, render, chat.generation.max_tokens, counts)
    else:
        prompt, shortened = await render(messages), None
    generation, ignored = chat.generation, (*prompt.ignored, *told.ignored, *chat.omitted)
    if generation.thinking_tokens is not None and prompt.answer.reply.think is None:
        # This model has no reasoning to limit.
        generation, ignored = replace(generation, thinking_tokens=None), (*ignored, "thinking_budget")
    return GenerationJob(
        prompt=prompt.text,
        generation=generation,
        answer=prompt.answer,
        add_bos=prompting.wants_bos(engine.info, prompt.text),
        n=chat.n,
        images={mark: file for mark, file in told.files.items() if mark in prompt.text},
        ignored=ignored,
        normalised=normalised,
        compacted="" if shortened is None else str(shortened),
        asked=chat.messages[-1]["content"] if prompt.answer.reply.think is not None else None,
    )


class ReasoningRecorder:
    """A ReplyWriter in front of another that keeps each choice's reasoning for `recall`."""

    def __init__(self, inner: ReplyWriter, recall: ReasoningCache, asked: str) -> None:
        self._inner, self._recall, self._asked = inner, recall, asked
        self._said: dict[int, tuple[list[str], list[str], list[list[str]]]] = {}

    def start(self) -> None:
        """Passed on."""
        self._inner.start()

    def end(self, usage: ReplyUsage, timings: Timings) -> None:
        """Passed on."""
        self._inner.end(usage, timings)

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Keep and pass on."""
        self._of(choice)[0].append(text)
        self._inner.text(choice, text, logprobs)

    def reasoning(self, choice: int, text: str) -> None:
        """Keep and pass on."""
        self._of(choice)[1].append(text)
        self._inner.reasoning(choice, text)

    def call_start(self, choice: int, index: int, name: str) -> None:
        """Keep and pass on."""
        self._of(choice)[2].append([name])
        self._inner.call_start(choice, index, name)

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        """Keep and pass on."""
        self._of(choice)[2][-1].append(text)
        self._inner.call_arguments(choice, index, text)

    def finish(self, choice: int, outcome: Outcome) -> None:
        """Remember and pass on."""
        texts, thoughts, calls = self._of(choice)
        parts = [(c[0], "".join(c[1:])) for c in calls]
        self._recall.remember(self._asked, "".join(texts), parts, "".join(thoughts))
        self._inner.finish(choice, outcome)

    def _of(self, choice: int) -> tuple[list[str], list[str], list[list[str]]]:
        return self._said.setdefault(choice, ([], [], []))


class EngineWithImages:
    """An engine whose `tokenize` knows the images of one conversation; `files` in base64, by their marks."""

    def __init__(self, engine: EngineClient, files: dict[str, str]) -> None:
        self._engine, self._files = engine, files
        self.info = engine.info

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def tokenize(
        self, text: str, *, special: bool = True, add_bos: bool = False, images: dict[str, str] | None = None
    ) -> list[int]:
        """Token ids of `text`, with those of the images that it has."""
        there = images or {mark: file for mark, file in self._files.items() if mark in text}
        if not there:
            return await self._engine.tokenize(text, special=special, add_bos=add_bos)
        return await self._engine.tokenize(text, special=special, add_bos=add_bos, images=there)
