"""Routes of System One, which answers typed questions about a state with probabilities. Also fits a
model's temperature.

Many questions about one state cost one prefill. The common prefix of their prompts is computed
once. Then each prompt is a fork that reads the probabilities of the labels as its next token."""

from __future__ import annotations

import asyncio
import secrets
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from localllm.conversation.messages import normalise
from localllm.engine.adapters import adapted_fingerprint
from localllm.engine.messages import Event, Failure, Generation, Request, Text, Usage
from localllm.engine.worker.client import EngineClient
from localllm.errors import RequestError, UnsupportedError, WorkerDiedError, by_code
from localllm.server.dialects.fields import RequestBody
from localllm.server.dialects.known import BodyPart, Refused, Shape
from localllm.server.dialects.paths import Paths
from localllm.server.dialects.route import mount_non_streaming
from localllm.server.dialects.systemone.questions import (
    Content,
    Question,
    as_text,
    fit_temperature,
    loss,
    save_temperature,
    saved_temperature,
    softmax,
)
from localllm.server.generation.chat import ChatRequest
from localllm.server.generation.generate import all_of
from localllm.server.generation.job import GenerationJob
from localllm.server.generation.prompt import ResponseOptions
from localllm.server.http.accounts import admins_only, caller, salt_of
from localllm.server.models.router import ServedModel
from localllm.server.serving import Server

# The prompt ends with this beginning of the answer, so the next token is a label.
ANSWER_PREFIX = "Answer:"
_AT_ONCE = 16


class CannotDecideError(UnsupportedError, code="not_implemented", http_status=501):
    """The model can't answer with the probabilities of labels."""


def _usage_of(costs: Sequence[Usage]) -> dict[str, Any]:
    """Return the usage of an answer. The common prefix of the prompts counts once, and each fork
    has one output token."""
    tokens = sum(cost.prompt_tokens for cost in costs)
    cached = sum(c.cached_tokens for c in costs)
    return {
        "input_tokens": tokens,
        "output_tokens": sum(cost.completion_tokens for cost in costs),
        "input_tokens_details": {"cached_tokens": cached, "prefilled_tokens": tokens - cached},
    }


# A, B … Z, AA, AB … ZZ.
_CODES = [*string.ascii_uppercase, *map("".join, product(string.ascii_uppercase, repeat=2))]


_MAX_QUESTIONS = 256
# Limit of the number of questions times the number of orders.
_MAX_FORKS = 512
# Other servers read these media with a question. An answer without them would be about something
# else, so they are refused.
_MEDIA = Refused("send images as `images`", (None, [], {}, ""))
_NOT_STREAMED = {"stream": Refused("decisions can't be streamed", (None, False))}
_PROMPT = (
    "Judge what is between the marks, then answer the question behind it.\n"
    "<state>\n{state}\n</state>\n"
)
_PROMPT_END = "\nAnswer with the letter in front of what fits best, and nothing else."
Questions = Annotated[dict[str, Question], Field(min_length=1, max_length=_MAX_QUESTIONS)]
Images = Annotated[list[str], Field(max_length=8)]
Orders = Annotated[
    int,
    Field(
        ge=1,
        le=8,
        description=(
            "number of option orders whose probabilities are averaged; each order costs one fork"
        ),
    ),
]


class SystemOneFields(RequestBody):
    """POST /v1/systemone."""

    shapes: ClassVar[Shape] = {
        **_NOT_STREAMED,
        **dict.fromkeys(("assets", "files", "videos"), _MEDIA),
    }
    state: Content
    questions: Questions
    images: Images | None = Field(
        None, description="base64 or data URLs; only for models with vision"
    )
    orders: Orders = 1
    temperature: float | None = Field(
        None, gt=0, le=100, description="default: the fitted temperature of the model, or 1"
    )


class _Example(BodyPart):
    """A state, questions about it, and the right answers by the names of the questions."""

    model_config = ConfigDict(extra="forbid")
    state: Content
    questions: Questions
    answers: Annotated[dict[str, str | bool | int], Field(min_length=1)]
    images: Images | None = None

    def correct_options(self) -> dict[str, int]:
        """Return the index of the right option for each question. Raises RequestError."""
        unknown = self.answers.keys() - self.questions.keys()
        if unknown:
            raise RequestError(f"there is no question {min(unknown)[:80]!r}", param="examples")
        return {
            name: self.questions[name].option_of(answer) for name, answer in self.answers.items()
        }


class FitFields(RequestBody):
    """POST /v1/systemone/fit."""

    shapes: ClassVar[Shape] = _NOT_STREAMED
    examples: Annotated[list[_Example], Field(min_length=1, max_length=1000)]
    orders: Orders = 1


def _shared_tokens(prompts: Sequence[list[int]]) -> int:
    """Return the length of the common prefix of all prompts in tokens, or 0 for a single prompt."""
    if len(prompts) < 2:
        return 0
    # The first and the last prompt in sorted order have the shortest common prefix.
    first = min(prompts)
    last = max(prompts)
    shared = 0
    while shared < min(len(first), len(last)) and first[shared] == last[shared]:
        shared += 1
    return shared


def _with_tokens(job: GenerationJob, prompt: list[int]) -> GenerationJob:
    """Return the job with its prompt as tokens. A prompt with images stays text; its first fork
    computes the tokens that all forks share."""
    return job if job.media else replace(job, prompt=prompt)


@dataclass
class Forks:
    """The prompts of the questions about one state, on one engine."""

    server: Server
    model: ServedModel
    engine: EngineClient
    request: SystemOneFields | _Example

    async def log_probabilities(
        self, shown: Sequence[tuple[str, list[int]]]
    ) -> tuple[list[list[float]], Usage]:
        """Return the log-probabilities of the labels as the next token, for each question and order
        in `shown`, and the usage.

        Raises LocalLLMError, and CannotDecideError if too few labels are a single token at the end
        of a prompt."""
        max_options = max(len(order) for _, order in shown)
        # All prompts have the same end after their options, whatever the labels. So the first
        # prompt is enough to find the labels.
        first_name, first_order = shown[0]
        labels = await self._labels(
            await self._render(first_name, first_order, _CODES), max_options
        )
        ids = list(labels.values())
        jobs = [await self._render(name, order, list(labels)) for name, order in shown]
        prompts = [await self._tokens(job) for job in jobs]
        shared = _shared_tokens(prompts)
        usages: list[Usage] = []
        if shared:
            begin = _with_tokens(jobs[0], prompts[0][:shared])
            _, usage = await self._ask(begin, ())
            usages.append(usage)
        gate = asyncio.Semaphore(_AT_ONCE)

        async def ask(job: GenerationJob, n: int) -> tuple[list[float], Usage]:
            async with gate:
                return await self._ask(job, ids[:n])

        forks = []
        for job, prompt, (_, order) in zip(jobs, prompts, shown, strict=True):
            forks.append(ask(_with_tokens(job, prompt), len(order)))
        answers = await all_of(forks)
        usages += (usage for _, usage in answers)
        computed = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
        total = shared + sum(len(prompt) - shared for prompt in prompts)
        spent = Usage(total, len(prompts), max(0, total - computed))
        return [found for found, _ in answers], spent

    async def _render(
        self, name: str, order: Sequence[int], labels: Sequence[str]
    ) -> GenerationJob:
        """Return the job for a question in one order. Its prompt ends just before the label."""
        question = self.request.questions[name].text(order, labels)
        content = _PROMPT.format(state=as_text(self.request.state)) + question + _PROMPT_END
        # Normalised separately, because the images belong to the question although the answer has
        # begun after them.
        messages = normalise([{"role": "user", "content": content, "images": self.request.images}])
        messages += normalise([{"role": "assistant", "content": ANSWER_PREFIX}])
        generation = Generation(ignore_eos=True, tenant=caller().name, salt=salt_of(""))
        generation = self.model.adapters_for(generation)
        chat = ChatRequest(messages, generation, ResponseOptions(effort="none"))
        return await self.server.job(chat, self.model, self.engine)

    async def _labels(self, job: GenerationJob, n: int) -> dict[str, int]:
        """Return `n` labels with their tokens. Each label is a single token after this prompt and
        leaves the prompt's last tokens unchanged. Raises CannotDecideError."""
        prompt = await self._tokens(job)
        found: dict[str, int] = {}
        for label in _CODES:
            *before, last = await self._tokens(replace(job, prompt=f"{job.prompt} {label}"))
            if before == prompt and last not in found.values():
                found[label] = last
            if len(found) == n:
                return found
        raise CannotDecideError(
            f"this model can't answer with labels: its tokenizer has {len(found)} of the {n} "
            "required single-token labels",
            hint="send fewer options, or use another model",
            param="questions",
        )

    async def _tokens(self, job: GenerationJob) -> list[int]:
        assert isinstance(job.prompt, str)
        return await self.engine.tokenize(job.prompt, add_bos=job.add_bos, media=job.media)

    async def _ask(self, job: GenerationJob, labels: Sequence[int]) -> tuple[list[float], Usage]:
        """Return the log-probability of each of `labels` after the prompt, and the usage. Without
        labels, the prompt is only computed."""
        generation = replace(
            job.generation, max_tokens=int(bool(labels)), logprobs=0, logprobs_of=tuple(labels)
        )
        request = Request(
            secrets.token_hex(12),
            job.prompt,
            generation,
            add_bos=job.add_bos,
            draft="off",
            media=job.media,
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


def routes(server: Server) -> Paths:
    paths = Paths("Decisions")

    async def decide(fields: SystemOneFields) -> Any:
        model = await _model(server, fields)
        with server.serving(model):
            scores, cost, fingerprint = await _scores(server, model, fields, fields.orders)
        t = fields.temperature or saved_temperature(fingerprint)
        answers = {name: q.answer(softmax(scores[name], t)) for name, q in fields.questions.items()}
        return {
            "model": model.name,
            "answers": answers,
            "temperature": t,
            "usage": _usage_of([cost]),
        }

    async def fit(fields: FitFields) -> Any:
        admins_only("fitting a model's temperature")
        right = [example.correct_options() for example in fields.examples]
        model = await _model(server, fields)
        examples: list[tuple[Sequence[float], int]] = []
        costs: list[Usage] = []
        with server.serving(model):
            for example, options in zip(fields.examples, right, strict=True):
                scores, cost, fingerprint = await _scores(server, model, example, fields.orders)
                costs.append(cost)
                examples += ((scores[name], option) for name, option in options.items())
        t = await asyncio.to_thread(fit_temperature, examples)
        save_temperature(fingerprint, t, len(examples))
        losses = {"before": loss(examples, 1.0), "after": loss(examples, t)}
        found = {"temperature": t, "examples": len(examples), "loss_nats": losses}
        return {"model": model.name, **found, "usage": _usage_of(costs)}

    mount_non_streaming(
        paths,
        server,
        "/v1/systemone",
        SystemOneFields,
        decide,
        "Answer typed questions (choice, score, noul) about a state by the model's probabilities, "
        "without writing text",
        ("model", "answers", "usage"),
    )
    mount_non_streaming(
        paths,
        server,
        "/v1/systemone/fit",
        FitFields,
        fit,
        "Fit the temperature of a model's decisions to correct answers, and save it",
        ("model", "temperature", "usage"),
    )
    return paths


async def _model(server: Server, fields: RequestBody) -> ServedModel:
    model = await server.models.find(fields.model)
    if model.facts.embeds or model.facts.ranks:
        does = "embeds" if model.facts.embeds else "ranks"
        raise CannotDecideError(
            f"{model.name} {does} texts and predicts no next token, so it can't decide",
            hint="use a chat model",
            param="model",
        )
    return model


async def _scores(
    server: Server, model: ServedModel, asked: SystemOneFields | _Example, orders: int
) -> tuple[dict[str, list[float]], Usage, str]:
    """Return the log-odds of each question's options, the usage, and the fingerprint of the model
    with its adapters."""
    shown: list[tuple[str, list[int]]] = []
    for name, question in asked.questions.items():
        shown += [(name, order) for order in question.orders(orders)]
    if len(shown) > _MAX_FORKS:
        raise RequestError(
            f"{len(shown)} prompts (questions times orders), but the limit is {_MAX_FORKS}: "
            "send fewer questions or orders",
            param="questions",
        )

    async def ask() -> tuple[list[list[float]], Usage, str]:
        engine = await model.engine()
        if asked.images and not engine.info.vision:
            raise CannotDecideError(f"{model.name} does not support images", param="images")
        found, spent = await Forks(server, model, engine, asked).log_probabilities(shown)
        adapters = model.adapters_for(Generation()).adapters
        return found, spent, adapted_fingerprint(engine.info, adapters)

    try:
        answered, spent, fingerprint = await ask()
    except WorkerDiedError:
        answered, spent, fingerprint = await ask()
    return _averaged(asked.questions, shown, answered), spent, fingerprint


def _averaged(
    questions: Mapping[str, Question],
    shown: Sequence[tuple[str, list[int]]],
    answered: Sequence[Sequence[float]],
) -> dict[str, list[float]]:
    """Return each question's log-odds as the mean over the orders in which its options were
    `shown`.

    The mean is taken of logarithms. The bias of each position then cancels over a full rotation
    (Zheng et al., "LLMs are not robust multiple choice selectors", ICLR 2024)."""
    scores = {name: [0.0] * len(question.options()) for name, question in questions.items()}
    counts = Counter(name for name, _ in shown)
    for (name, order), found in zip(shown, answered, strict=True):
        for option, p in zip(order, found, strict=True):
            scores[name][option] += p / counts[name]
    return scores
