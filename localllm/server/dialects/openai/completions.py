"""POST /v1/completions and Mistral's /v1/fim/completions: raw completion and fill-in-the-middle."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from localllm.engine.messages import TokenLogprob
from localllm.engine.worker.client import EngineClient
from localllm.errors import RequestError
from localllm.server.dialects.fields import (
    MAX_PROMPTS,
    Limit,
    SamplingFields,
    TokenId,
    each,
    first_limit,
)
from localllm.server.dialects.known import FORM, Shape
from localllm.server.dialects.openai.chat import (
    Chunks,
    StreamOptions,
    chat_completion,
    counted,
    head,
)
from localllm.server.dialects.wire import LiveTelemetry, TelemetryFields, quote, token_logprob
from localllm.server.generation.job import GenerationJob, PrefillProgress, Reply, ReplyWriter
from localllm.server.generation.prompt import text_job
from localllm.server.http.streaming import Outbox
from localllm.server.models.router import ServedModel
from localllm.server.serving import JobFactory, TranslatedRequest

Ids = Annotated[list[TokenId], Field(min_length=1, max_length=1 << 20)]


class CompletionFields(SamplingFields, TelemetryFields):
    """POST /v1/completions. Special tokens in a text prompt are parsed."""

    shapes: ClassVar[Shape] = {**SamplingFields.shapes, "response_format": FORM}
    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(max_length=MAX_PROMPTS)]
        | Annotated[list[Ids], Field(max_length=MAX_PROMPTS)]
    ) = ""
    suffix: str | None = Field(
        None, description="text after the completion; needs a model with FIM tokens"
    )
    max_tokens: Limit | None = Field(None, description="default and -1: the rest of the context")
    n_predict: Limit | None = None
    echo: bool | None = Field(None, description="put the prompt before the answer")
    logprobs: int | None = Field(None, ge=0, le=20, strict=True)
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None


def translate(fields: CompletionFields, model: ServedModel) -> TranslatedRequest:
    """Translate a completion of raw text. The reply is a text_completion object, or its chunks."""
    echoes = _echoes(fields)

    def body(reply: Reply, job: GenerationJob) -> dict[str, Any]:
        return text_completion(reply, job, model.name, echoes)

    def writer(outbox: Outbox, job: GenerationJob, progress: PrefillProgress) -> ReplyWriter:
        telemetry = fields.telemetry(progress)
        return CompletionChunks(outbox, model.name, job, fields.stream_options, echoes, telemetry)

    return TranslatedRequest(_task(fields, model), body, writer)


def translate_fill_in(fields: CompletionFields, model: ServedModel) -> TranslatedRequest:
    """Translate Mistral's fill-in-the-middle: a completion with a suffix. The reply has the format
    of a chat."""

    def body(reply: Reply, job: GenerationJob) -> dict[str, Any]:
        return chat_completion(reply, model.name)

    def writer(outbox: Outbox, job: GenerationJob, progress: PrefillProgress) -> ReplyWriter:
        return Chunks(outbox, model.name, job, counts_in_choice=True)

    return TranslatedRequest(_task(fields, model), body, writer)


def _task(fields: CompletionFields, model: ServedModel) -> JobFactory:
    """Return a factory for the generation job. Raises RequestError."""
    if fields.prompt == []:
        raise RequestError("prompt is an empty array", param="prompt")
    prompts = each(fields.prompt)
    if fields.suffix and (len(prompts) > 1 or not isinstance(prompts[0], str)):
        raise RequestError("suffix needs a single text prompt", param="suffix")
    if fields.echo and fields.logprobs is not None:
        raise RequestError(
            "echo can't be combined with logprobs: this server does not compute "
            "log-probabilities of the prompt",
            param="echo",
        )
    if fields.echo and any(not isinstance(p, str) for p in prompts):
        raise RequestError("echo needs text prompts", param="echo")
    grammar = fields.constraint(fields.response_format)

    async def job(engine: EngineClient) -> GenerationJob:
        longest = first_limit(fields.max_tokens, fields.n_predict)
        generation = fields.generation(model.sampling, longest, logprobs=fields.logprobs)
        return await text_job(
            engine, prompts, generation, grammar, suffix=fields.suffix, n=fields.n or 1
        )

    return job


class CompletionChunks(Chunks):
    """Writes text_completion events. `echoes`: the text before the answer of each choice."""

    kind = "text_completion"
    ids = "cmpl-"
    nothing = '"text":""'

    def __init__(
        self,
        outbox: Outbox,
        model: str,
        job: GenerationJob,
        options: StreamOptions | None,
        echoes: Sequence[str],
        telemetry: LiveTelemetry | None = None,
    ) -> None:
        super().__init__(outbox, model, job, options=options, telemetry=telemetry)
        self._echoes = echoes
        self._tokens_end = [0] * job.choices

    def start(self) -> None:
        for i, text in enumerate(self._echoes):
            self._send(i, f'"text":{quote(text)}')

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        data = "null"
        if logprobs:
            begins = self._tokens_end[choice]
            data = json.dumps(logprobs_body(logprobs, begins))
            self._tokens_end[choice] = offsets(logprobs, begins)[-1]
        self._send_part(choice, f'"text":{quote(text)}', data)


def _echoes(fields: CompletionFields) -> list[str]:
    """Return the prompt of each choice if the client wants it before the answer, else []."""
    if not fields.echo:
        return []
    texts: list[str] = []
    for prompt in each(fields.prompt or ""):
        texts += [str(prompt)] * (fields.n or 1)
    return texts


def text_completion(
    reply: Reply, job: GenerationJob, model: str, echoes: Sequence[str]
) -> dict[str, Any]:
    choices = []
    for i, choice in enumerate(reply.choices):
        text = choice.text
        if echoes:
            text = echoes[i] + text
        logprobs = None
        if job.generation.logprobs is not None:
            logprobs = logprobs_body(tuple(choice.logprobs))
        choices.append(
            {"index": i, "text": text, "logprobs": logprobs, "finish_reason": choice.outcome.reason}
        )
    return {**head("cmpl-", "text_completion", model), "choices": choices, **counted(reply)}


def logprobs_body(logprobs: tuple[TokenLogprob, ...], at: int = 0) -> dict[str, Any]:
    """Return log-probabilities in the legacy format of parallel arrays. `at` is the offset of the
    first token in the answer."""
    return {
        "tokens": [token_logprob(p.text, p.logprob)["token"] for p in logprobs],
        "token_logprobs": [p.logprob for p in logprobs],
        "top_logprobs": [_by_name(p.top) for p in logprobs],
        "text_offset": offsets(logprobs, at)[:-1],
    }


def offsets(logprobs: Sequence[TokenLogprob], at: int) -> list[int]:
    """Return the offset of each token in the answer, and the end of the last token.

    The first token begins at `at`. Tokens that together form one character have the offset of that
    character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    found = [at]
    for p in logprobs:
        added = decoder.decode(p.text.encode("utf-8", "surrogateescape"))
        found.append(found[-1] + len(added))
    return found


def _by_name(top: Sequence[tuple[str, int, float]]) -> dict[str, float]:
    """Return all alternatives by their texts.

    Bytes that are not text are named as OpenAI names them (bytes:\\xf0\\x9f). If two tokens have
    the same text (a byte, a control token), the second is named by its id."""
    named: dict[str, float] = {}
    for text, token, logprob in top:
        data = text.encode("utf-8", "surrogateescape")
        name = data.decode("utf-8", "replace")
        if name.encode() != data:
            name = "bytes:" + "".join(f"\\x{b:02x}" for b in data)
        if name in named:
            name = f"token_id:{token}"
        named[name] = logprob
    return named
