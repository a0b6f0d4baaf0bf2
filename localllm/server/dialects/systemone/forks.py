"""Many questions about one state at the price of one prefill: the prompts' common beginning is
computed once, then each prompt is a fork of it that reads what the model thinks of the labels as
its next token."""

from __future__ import annotations

import asyncio
import secrets
import string
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product, takewhile
from typing import Any

from localllm.engine.messages import Event, Failure, Generation, Request, Text, Usage
from localllm.engine.worker.client import EngineClient
from localllm.errors import UnsupportedError, by_code
from localllm.server.generation.job import GenerationJob
from localllm.server.http.accounts import caller

# How the answer begins, in the prompt already: the next token is a label.
BEGUN = "Answer:"
_AT_ONCE = 16


class CannotDecideError(UnsupportedError, code="not_implemented", http_status=501):
    """A model that can't answer by the probabilities of labels."""


@dataclass(slots=True)
class Spent:
    """Tokens of the prompts, their common beginning counted once; how many of them were in the
    cache before; forks."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, other: Spent) -> None:
        self.input_tokens += other.input_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens

    def body(self) -> dict[str, Any]:
        """The usage of an answer."""
        details = {
            "cached_tokens": self.cached_tokens,
            "prefilled_tokens": self.input_tokens - self.cached_tokens,
        }
        return {
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "input_tokens_details": details,
        }


def _codes() -> Iterator[str]:
    """A, B … Z, AA, AB … ZZ."""
    yield from string.ascii_uppercase
    yield from map("".join, product(string.ascii_uppercase, repeat=2))


@dataclass
class Forks:
    """The prompts of a request on one engine. `render` makes a job of a question's text;
    `generation` says whose it is."""

    engine: EngineClient
    render: Callable[[str], Awaitable[GenerationJob]]
    generation: Generation

    async def log_probabilities(
        self, texts: Callable[[Sequence[str]], list[str]], counts: Sequence[int]
    ) -> tuple[list[list[float]], Spent]:
        """For each of `texts(labels)` the log-probabilities of its `counts` first labels as its
        next token. Raises LocalLLMError; CannotDecideError where the model has too few labels that
        are one token at the end of a prompt."""
        jobs, prompts, ids = await self._labelled(texts, max(counts))
        # What the first and the last of them in order have in common, all have.
        alike = takewhile(
            lambda pair: pair[0] == pair[1], zip(min(prompts), max(prompts), strict=False)
        )
        shared = sum(1 for _ in alike) if len(prompts) > 1 else 0
        computed = 0
        if shared:
            # A prompt of images stays text: its first fork computes what the others share.
            begin = replace(jobs[0], prompt=prompts[0][:shared])
            computed += _computed((await self._ask(jobs[0] if jobs[0].images else begin, ()))[1])
        gate = asyncio.Semaphore(_AT_ONCE)

        async def ask(job: GenerationJob, prompt: list[int], n: int) -> tuple[list[float], Usage]:
            async with gate:
                return await self._ask(job if job.images else replace(job, prompt=prompt), ids[:n])

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(ask(*asked))
                    for asked in zip(jobs, prompts, counts, strict=True)
                ]
        except* Exception as failures:
            raise failures.exceptions[0] from None
        answers = [task.result() for task in tasks]
        computed += sum(_computed(usage) for _, usage in answers)
        total = shared + sum(len(p) - shared for p in prompts)
        return [found for found, _ in answers], Spent(total, max(0, total - computed), len(prompts))

    async def _labelled(
        self, texts: Callable[[Sequence[str]], list[str]], n: int
    ) -> tuple[list[GenerationJob], list[list[int]], list[int]]:
        """The prompts with `n` labels, as text and as tokens, and the labels' tokens behind each of
        them."""
        labels = list(islice(_codes(), n))
        for _ in range(2):
            jobs = [await self.render(text) for text in texts(labels)]
            prompts = [await self._tokens(job) for job in jobs]
            # One check for each way in which a prompt ends.
            ends = {
                str(job.prompt)[-64:]: (job, prompt)
                for job, prompt in zip(jobs, prompts, strict=True)
            }
            found = [await self._single(job, prompt, labels) for job, prompt in ends.values()]
            if all(ids == found[0] and None not in ids for ids in found):
                return jobs, prompts, [i for i in found[0] if i is not None]
            every = list(_codes())
            ids = await self._single(jobs[0], prompts[0], every)
            labels = [code for code, token in zip(every, ids, strict=True) if token is not None][:n]
            if len(labels) < n:
                break
        raise CannotDecideError(
            f"this model can't answer by labels: its tokenizer has {len(labels)} of the {n} that "
            "are needed as one token",
            hint="ask with fewer options, or use another model",
            param="questions",
        )

    async def _single(
        self, job: GenerationJob, prompt: list[int], labels: Sequence[str]
    ) -> list[int | None]:
        """The one token that each label is behind this prompt; None for one that is more, or
        changes the prompt's end."""
        found: list[int | None] = []
        for label in labels:
            tokens = await self._tokens(replace(job, prompt=f"{job.prompt} {label}"))
            single = tokens[:-1] == prompt and tokens[-1] not in found
            found.append(tokens[-1] if single else None)
        return found

    async def _tokens(self, job: GenerationJob) -> list[int]:
        assert isinstance(job.prompt, str)
        return await self.engine.tokenize(job.prompt, add_bos=job.add_bos, images=job.images)

    async def _ask(self, job: GenerationJob, labels: Sequence[int]) -> tuple[list[float], Usage]:
        """What the model thinks of each of `labels` behind the prompt; without labels that is only
        computed."""
        generation = replace(
            self.generation, max_tokens=int(bool(labels)), logprobs=0, logprobs_of=tuple(labels)
        )
        request = Request(
            secrets.token_hex(12),
            job.prompt,
            generation,
            add_bos=job.add_bos,
            draft="off",
            images=job.images,
        )
        found: dict[int, float] = {}

        def on_event(event: Event) -> None:
            if isinstance(event, Text) and event.logprobs:
                found.update((token, p) for _, token, p in event.logprobs[0].top)

        end = await self.engine.listen(request, on_event)
        if isinstance(end, Failure):
            raise by_code(end.code, end.message, hint=end.hint or None, counts=end.counts)
        caller().charge(
            end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.completion_tokens
        )
        return [found[token] for token in labels], end.usage


def _computed(usage: Usage) -> int:
    return usage.prompt_tokens - usage.cached_tokens
