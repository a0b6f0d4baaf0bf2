"""POST /v1/completions and Mistral's /v1/fim/completions: raw completion and fill-in-the-middle."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from localllm.engine.messages import Timings, TokenLogprob
from localllm.engine.worker.client import EngineClient
from localllm.errors import RequestError
from localllm.server.dialects.fields import Limit, SamplingFields, first_limit
from localllm.server.dialects.known import FORM, Shape
from localllm.server.dialects.openai.chat import (
    ChatChunks,
    Chunks,
    StreamOptions,
    chat_completion,
    usage_body,
    wants_usage,
)
from localllm.server.dialects.wire import quote, timings_body, token_logprob
from localllm.server.generation.job import GenerationJob, Outcome, Reply, ReplyUsage
from localllm.server.generation.prompt import text_job
from localllm.server.http.asgi import new_id
from localllm.server.http.streaming import Outbox
from localllm.server.models.router import ServedModel
from localllm.server.serving import JobFactory, TranslatedRequest

MAX_PROMPTS = 16
Ids = Annotated[
    list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1, max_length=1 << 20)
]


class CompletionFields(SamplingFields):
    """POST /v1/completions. Special tokens in a text prompt are parsed."""

    shapes: ClassVar[Shape] = {"response_format": FORM}
    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(max_length=MAX_PROMPTS)]
        | Annotated[list[Ids], Field(max_length=MAX_PROMPTS)]
    ) = ""
    suffix: str | None = Field(
        None, description="text behind the insertion; needs a model with FIM tokens"
    )
    max_tokens: Limit | None = Field(None, description="default, and -1: the remaining window")
    n_predict: Limit | None = None
    echo: bool | None = Field(None, description="put the prompt before the answer")
    logprobs: int | None = Field(None, ge=0, le=20, strict=True)
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None

    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself."""
        sent: Any = self.prompt
        if sent == []:
            raise RequestError("prompt is an empty array", param="prompt")
        alone = isinstance(sent, str) or isinstance(sent[0], int)
        return [sent] if alone else list(sent)

    def answer_tokens(self) -> int | None:
        return first_limit(self.max_tokens, self.n_predict)

    def alternatives(self) -> int | None:
        return self.logprobs


def translate(fields: CompletionFields, model: ServedModel) -> TranslatedRequest:
    """Raw text, answered as text_completion or its chunks."""
    return TranslatedRequest(
        _task(fields, model),
        lambda reply, job: text_completion(reply, job, model.name, echo=bool(fields.echo)),
        lambda outbox, job, progress: CompletionChunks(
            outbox,
            model.name,
            job,
            include_usage=wants_usage(fields.stream_options),
            echo=bool(fields.echo),
        ),
    )


def translate_fill_in(fields: CompletionFields, model: ServedModel) -> TranslatedRequest:
    """Mistral's fill-in-the-middle: a completion with a suffix, answered like a chat."""
    return TranslatedRequest(
        _task(fields, model),
        lambda reply, job: chat_completion(reply, model.name),
        lambda outbox, job, progress: FillInChunks(
            outbox, model.name, n=job.choices, include_usage=False
        ),
    )


def _task(fields: CompletionFields, model: ServedModel) -> JobFactory:
    """A factory for the generation job. Raises RequestError."""
    prompts = fields.prompts()
    if fields.suffix and (len(prompts) > 1 or not isinstance(prompts[0], str)):
        raise RequestError("suffix needs one prompt that is text", param="suffix")
    if fields.echo and fields.logprobs is not None:
        raise RequestError(
            "echo can't be combined with logprobs: the prompt's are not computed", param="echo"
        )
    if fields.echo and any(not isinstance(p, str) for p in prompts):
        raise RequestError("echo needs prompts that are text", param="echo")
    grammar = fields.constraint(fields.response_format)

    async def job(engine: EngineClient) -> GenerationJob:
        generation = fields.generation(model.sampling)
        return await text_job(
            engine, prompts, generation, grammar, suffix=fields.suffix, n=fields.n or 1
        )

    return job


class FillInChunks(ChatChunks):
    """Mistral's chunks: the usage is in the last choice's end, and no chunk is without a choice."""

    def __init__(self, outbox: Outbox, model: str, *, n: int, include_usage: bool) -> None:
        super().__init__(outbox, model, n=n, include_usage=include_usage)
        self._ended: list[tuple[int, Outcome]] = []

    def finish(self, choice: int, outcome: Outcome) -> None:
        self._ended.append((choice, outcome))

    def end(self, usage: ReplyUsage, timings: Timings) -> None:
        for choice, outcome in self._ended[:-1]:
            super().finish(choice, outcome)
        for choice, outcome in self._ended[-1:]:
            data = {"index": choice, "delta": {}, "logprobs": None, "finish_reason": outcome.reason}
            body = {
                "choices": [data],
                "usage": usage_body(usage),
                "timings": timings_body(usage, timings),
            }
            self._outbox.write(f"{self._head},{json.dumps(body)[1:]}\n\n".encode())
        super().end(usage, timings)


class CompletionChunks(Chunks):
    """Writes text_completion events; `echo` puts the prompt before each choice's answer."""

    def __init__(
        self, outbox: Outbox, model: str, job: GenerationJob, *, include_usage: bool, echo: bool
    ) -> None:
        super().__init__(
            outbox, "text_completion", new_id("cmpl-"), model, include_usage=include_usage
        )
        self._job, self._echo = job, echo
        self._tokens_end = [0] * job.choices

    def start(self) -> None:
        if self._echo:
            prompts = (self._job.prompt, *self._job.also)
            for i in range(self._job.choices):
                self.text(i, str(prompts[i // self._job.n]), ())

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        data = json.dumps(logprobs_body(logprobs, self._tokens_end[choice])) if logprobs else "null"
        self._tokens_end[choice] = offsets(logprobs, self._tokens_end[choice])[-1]
        self._outbox.write(
            f'{self._head},"choices":[{{"index":{choice},"text":{quote(text)},"logprobs":{data},'
            f'"finish_reason":null{self._tail}'.encode()
        )

    def finish(self, choice: int, outcome: Outcome) -> None:
        self._outbox.write(
            f'{self._head},"choices":[{{"index":{choice},"text":"","logprobs":null,'
            f'"finish_reason":"{outcome.reason}"{self._tail}'.encode()
        )


def text_completion(reply: Reply, job: GenerationJob, model: str, *, echo: bool) -> dict[str, Any]:
    prompts = (job.prompt, *job.also)
    choices = []
    for i, choice in enumerate(reply.choices):
        text = f"{prompts[i // job.n]}{choice.text}" if echo else choice.text
        logprobs = (
            logprobs_body(tuple(choice.logprobs)) if job.generation.logprobs is not None else None
        )
        choices.append(
            {"index": i, "text": text, "logprobs": logprobs, "finish_reason": choice.outcome.reason}
        )
    return {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": None,
        "choices": choices,
        "usage": usage_body(reply.usage),
        "timings": timings_body(reply.usage, reply.timings),
    }


def logprobs_body(logprobs: tuple[TokenLogprob, ...], at: int = 0) -> dict[str, Any]:
    """The legacy format: parallel arrays. `at` is the offset of the first token in the answer."""
    return {
        "tokens": [token_logprob(p.text, p.logprob)["token"] for p in logprobs],
        "token_logprobs": [p.logprob for p in logprobs],
        "top_logprobs": [_by_name(p.top) for p in logprobs],
        "text_offset": offsets(logprobs, at)[:-1],
    }


def offsets(logprobs: Sequence[TokenLogprob], at: int = 0) -> list[int]:
    """Where each token begins in the answer, of which the first one is at `at`, and where the last
    one ends; of several tokens that make one character, at that character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    found = [at]
    for p in logprobs:
        found.append(found[-1] + len(decoder.decode(p.text.encode("utf-8", "surrogateescape"))))
    return found


def _named(text: str) -> str:
    """A token's text, or what OpenAI writes for one that is no text: bytes:\\xf0\\x9f."""
    data = text.encode("utf-8", "surrogateescape")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def _by_name(top: Sequence[tuple[str, int, float]]) -> dict[str, float]:
    """All alternatives: of two tokens that are written alike (a byte, a control token) the second
    goes by its id."""
    named: dict[str, float] = {}
    for text, token, logprob in top:
        name = _named(text)
        named[name if name not in named else f"token_id:{token}"] = logprob
    return named
