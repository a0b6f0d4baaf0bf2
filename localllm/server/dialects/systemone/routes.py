"""Routes of System One: a state and typed questions in, probabilities out; and the fit of a model's
temperature."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from localllm.conversation.messages import normalise
from localllm.engine.messages import Generation
from localllm.errors import RequestError, UnsupportedError, WorkerDiedError
from localllm.server.dialects.fields import RequestBody
from localllm.server.dialects.known import BodyPart, Refused, Shape
from localllm.server.dialects.paths import Paths
from localllm.server.dialects.route import mount_whole
from localllm.server.dialects.systemone.forks import BEGUN, CannotDecideError, Forks, Spent
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
from localllm.server.generation.job import GenerationJob
from localllm.server.generation.prompt import ResponseOptions
from localllm.server.http.accounts import admins_only, caller, salt_of
from localllm.server.models.router import ServedModel
from localllm.server.serving import Server

_MOST_QUESTIONS = 256
# Questions times orders.
_MOST_FORKS = 512
# What other servers read with a question: an answer without it would be about something else.
_MEDIA = Refused("send pictures as `images`", (None, [], {}, ""))
_ASK = (
    "Judge what is between the marks, then answer the question behind "
    "it.\n<state>\n{state}\n</state>\n"
)
_CHOOSE = "\nAnswer with the letter in front of what fits best, and nothing else."
Questions = Annotated[dict[str, Question], Field(min_length=1, max_length=_MOST_QUESTIONS)]
Images = Annotated[list[str], Field(max_length=8)]
Orders = Annotated[int, Field(ge=1, le=8)]
_ORDERS = "orders of the options that are shown and averaged; each costs a fork"


class SystemOneFields(RequestBody):
    """POST /v1/systemone."""

    shapes: ClassVar[Shape] = dict.fromkeys(("assets", "files", "videos"), _MEDIA)
    state: Content
    questions: Questions
    images: Images | None = Field(None, description="in base64, or data URLs; for models that see")
    orders: Orders = Field(1, description=_ORDERS)
    temperature: float | None = Field(
        None, gt=0, le=100, description="default: what was fitted for the model, else 1"
    )


class _Example(BodyPart):
    """A state, questions about it, and the right answers by the questions' names."""

    model_config = ConfigDict(extra="forbid")
    state: Content
    questions: Questions
    answers: dict[str, str | bool | int]
    images: Images | None = None


class FitFields(RequestBody):
    """POST /v1/systemone/fit."""

    examples: Annotated[list[_Example], Field(min_length=1, max_length=1000)]
    orders: Orders = Field(1, description=_ORDERS)


def routes(server: Server) -> Paths:
    paths = Paths("Decisions")

    async def decide(fields: SystemOneFields) -> Any:
        model = await _model(server, fields)
        with server.serving(model):
            scores, spent, fingerprint = await _scores(server, model, fields, fields.orders)
        t = fields.temperature or saved_temperature(fingerprint)
        answers = {name: q.answer(softmax(scores[name], t)) for name, q in fields.questions.items()}
        return {"model": model.name, "answers": answers, "temperature": t, "usage": spent.body()}

    async def fit(fields: FitFields) -> Any:
        admins_only("fitting a model's temperature")
        right = [_right(i, example) for i, example in enumerate(fields.examples)]
        model = await _model(server, fields)
        examples: list[tuple[Sequence[float], int]] = []
        spent = Spent()
        with server.serving(model):
            for example, options in zip(fields.examples, right, strict=True):
                scores, cost, fingerprint = await _scores(server, model, example, fields.orders)
                spent.add(cost)
                examples += ((scores[name], option) for name, option in options.items())
        t = await asyncio.to_thread(fit_temperature, examples)
        save_temperature(fingerprint, t, len(examples))
        losses = {"before": loss(examples, 1.0), "after": loss(examples, t)}
        found = {"temperature": t, "examples": len(examples), "loss_nats": losses}
        return {"model": model.name, **found, "usage": spent.body()}

    mount_whole(
        paths,
        server,
        "/v1/systemone",
        SystemOneFields,
        decide,
        "Answer typed questions (choice, score, noul) about a state by the model's probabilities, "
        "without writing text",
        ("model", "answers", "usage"),
    )
    mount_whole(
        paths,
        server,
        "/v1/systemone/fit",
        FitFields,
        fit,
        "Fit the temperature of a model's decisions to answers that are right, and keep it",
        ("model", "temperature", "usage"),
    )
    return paths


async def _model(server: Server, fields: RequestBody) -> ServedModel:
    if fields.stream:
        raise UnsupportedError(
            "decisions come in one piece: there is nothing to stream", param="stream"
        )
    model = await server.models.find(fields.model)
    if model.facts.embeds or model.facts.ranks:
        raise CannotDecideError(
            f"{model.name} {'embeds' if model.facts.embeds else 'ranks'} texts: it has no next "
            "token to read a decision from",
            hint="name a chat model",
            param="model",
        )
    return model


def _right(i: int, example: _Example) -> dict[str, int]:
    """Which option of each question is right. Raises RequestError."""
    found = {}
    for name, answer in example.answers.items():
        if name not in example.questions:
            raise RequestError(
                f"examples.{i}.answers: there is no question {name[:80]!r}", param="examples"
            )
        found[name] = example.questions[name].option_of(answer)
    if not found:
        raise RequestError(
            f"examples.{i}.answers is empty: which answers are right?", param="examples"
        )
    return found


async def _scores(
    server: Server, model: ServedModel, asked: SystemOneFields | _Example, orders: int
) -> tuple[dict[str, list[float]], Spent, str]:
    """What the model thinks of each question's options, as log-odds; what that cost, and the
    model's fingerprint."""
    shown: list[tuple[str, list[int]]] = []
    for name, question in asked.questions.items():
        shown += [(name, order) for order in question.orders(orders)]
    if len(shown) > _MOST_FORKS:
        raise RequestError(
            f"{len(shown)} questions and orders; {_MOST_FORKS} are answered at once",
            param="questions",
        )

    def texts(labels: Sequence[str]) -> list[str]:
        return [asked.questions[name].text(order, labels) for name, order in shown]

    generation = Generation(ignore_eos=True, tenant=caller().name, salt=salt_of(""))

    async def ask() -> tuple[list[list[float]], Spent, str]:
        engine = await model.engine()
        if asked.images and not engine.info.vision:
            raise CannotDecideError(f"{model.name} reads text only, not images", param="images")

        async def render(text: str) -> GenerationJob:
            return await server.job(_chat(asked, text, generation), model, engine)

        found, spent = await Forks(engine, render, generation).log_probabilities(
            texts, [len(o) for _, o in shown]
        )
        return found, spent, engine.info.fingerprint

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
    """Each question's log-odds over the orders that its options were `shown` in. The mean of
    logarithms: what a place adds to whatever stands in it cancels over a full turn (Zheng et al.,
    "LLMs are not robust multiple choice selectors", ICLR 2024)."""
    sums = {name: [0.0] * len(question.options()) for name, question in questions.items()}
    for (name, order), found in zip(shown, answered, strict=True):
        total = math.log(sum(map(math.exp, found)))
        for option, p in zip(order, found, strict=True):
            sums[name][option] += p - total
    counts = Counter(name for name, _ in shown)
    for name, scores in sums.items():
        sums[name] = [score / counts[name] for score in scores]
    return sums


def _chat(asked: SystemOneFields | _Example, question: str, generation: Generation) -> ChatRequest:
    """The conversation in which the model is about to answer a question's text with a label."""
    content = _ASK.format(state=as_text(asked.state)) + question + _CHOOSE
    # Each by itself: the images are asked about, though an answer has begun behind them.
    messages = normalise([{"role": "user", "content": content, "images": asked.images}])
    messages += normalise([{"role": "assistant", "content": BEGUN}])
    return ChatRequest(messages, generation, ResponseOptions(effort="none"))
