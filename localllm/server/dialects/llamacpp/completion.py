"""POST /completion and /infill: raw completion and fill-in-the-middle in llama.cpp's format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from localllm.conversation.images import images_in_prompt
from localllm.engine.messages import Generation, TokenLogprob
from localllm.engine.worker.client import EngineClient
from localllm.errors import RequestError, UnsupportedError
from localllm.server.dialects.fields import (
    MAX_PROMPTS,
    Bias,
    Choices,
    SamplingFields,
    TokenId,
    first_limit,
)
from localllm.server.dialects.known import BodyPart, Shape, Unused
from localllm.server.dialects.wire import (
    LiveTelemetry,
    TelemetryFields,
    logprob_entry,
    quote,
    timings_body,
)
from localllm.server.generation.job import (
    GenerationJob,
    Outcome,
    PrefillProgress,
    Reply,
    ReplyWriter,
)
from localllm.server.generation.length_check import check_texts_fit
from localllm.server.generation.prompt import fim_prompt, text_job, wants_bos
from localllm.server.http.streaming import Outbox
from localllm.server.models.router import ServedModel
from localllm.server.serving import TranslatedRequest

# Alternatives per token, and in a whole answer that reports more than a few. The largest
# vocabularies have 262,208 tokens. A million alternatives took 230 MiB, and delayed other clients
# by seconds.
_FEW = 20
MAX_PROBABILITIES = 300_000
# llama.cpp's default placeholder for an image.
MARKER = "<__media__>"


# No path of `response_fields` has more steps: the fields of an answer nest less deeply.
_MAX_STEPS = 16
# An answer belongs to no slot: a later request may use any.
_ANY_SLOT = -1
# llama.cpp's samplers that this server does not have, switched off.
_SAMPLERS_OFF = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_n_sigma": -1.0,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
}


class MultimodalPrompt(BodyPart):
    """A prompt with images. The n-th `<__media__>` marks the position of the n-th file, which is
    sent in base64."""

    prompt_string: str
    multimodal_data: list[str] = Field(default_factory=list, max_length=64)


Pieces = Annotated[list[TokenId | str], Field(min_length=1, max_length=1 << 20)]


class LlamaCppFields(SamplingFields, TelemetryFields):
    """POST /completion."""

    shapes: ClassVar[Shape] = {
        **SamplingFields.shapes,
        # Accepted without effect: an answer ends when the context is full, so no tokens are
        # discarded.
        **dict.fromkeys(("slot_id", "n_keep", "n_discard")),
        **dict.fromkeys(("n_indent", "t_max_prompt_ms"), Unused(off=(None, 0, -1))),
    }
    prompt: (
        str
        | Pieces
        | Annotated[list[str | Pieces | MultimodalPrompt], Field(max_length=MAX_PROMPTS)]
        | MultimodalPrompt
    ) = Field("", description="a text, a list of token ids and texts, or a list of such prompts")
    logit_bias: (
        Annotated[dict[str, Bias], Field(max_length=4096)]
        | Annotated[list[tuple[TokenId | str, Bias]], Field(max_length=4096)]
        | None
    ) = Field(  # type: ignore[assignment]
        None, description="biases by token id, or by a text, whose tokens all get the bias"
    )
    n_predict: int | None = Field(None, ge=-2, le=2**31 - 1, description="-1: the remaining window")
    n_probs: int | None = Field(
        None, ge=0, le=1 << 20, description="above 20 only for short answers"
    )
    n_cmpl: Choices | None = None
    # OpenAI's names. As in llama.cpp, they count if its own names are not sent.
    max_tokens: int | None = Field(None, ge=-2, le=2**31 - 1, description="as n_predict")
    logprobs: int | None = Field(None, ge=0, le=1 << 20, description="as n_probs")
    return_tokens: bool | None = Field(None, description="also return the token ids of the answer")
    response_fields: Annotated[list[str], Field(max_length=64)] | None = Field(
        None, description="return only these fields of the answer; a/b means field b of a"
    )


class ExtraFile(BodyPart):
    """One entry of `input_extra`."""

    filename: str = Field("", max_length=4096)
    text: str = ""


class InfillFields(LlamaCppFields):
    """POST /infill."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] = Field(default_factory=list, max_length=256)


def translate(fields: LlamaCppFields, model: ServedModel) -> TranslatedRequest:
    """Translate a raw completion or an infill request. The reply consists of completion objects or
    events."""
    grammar = fields.constraint()

    texts: list[str] = []

    async def job(engine: EngineClient) -> GenerationJob:
        prompts, images = await _prompts(fields, engine)
        texts[:] = [await _as_text(prompt, engine) for prompt in prompts]
        generation = await _generation(fields, model, engine)
        n = fields.n_cmpl or fields.n or 1
        made = await text_job(engine, prompts, generation, grammar, n=n)
        reports_tokens = bool(fields.return_tokens or fields.stream)
        return replace(made, media=images, reports_tokens=reports_tokens)

    def body(reply: Reply, job: GenerationJob) -> Any:
        return completions(reply, job, model, texts, fields.response_fields)

    def writer(outbox: Outbox, job: GenerationJob, progress: PrefillProgress) -> ReplyWriter:
        telemetry = fields.telemetry(progress)
        return CompletionEvents(outbox, job, model, texts, telemetry, fields.response_fields)

    return TranslatedRequest(job, body, writer)


async def _generation(
    fields: LlamaCppFields, model: ServedModel, engine: EngineClient
) -> Generation:
    """Return the generation settings. If `logit_bias` names a text, each of its tokens gets the
    bias."""
    # In llama.cpp, 0 alternatives means no log-probabilities.
    longest = first_limit(fields.n_predict, fields.max_tokens)
    asked = fields.n_probs if fields.n_probs is not None else fields.logprobs
    alternatives = min(asked or 0, engine.info.n_vocab)
    if alternatives > _FEW and (longest is None or alternatives * longest > MAX_PROBABILITIES):
        raise RequestError(
            f"n_probs times n_predict is above {MAX_PROBABILITIES:,}",
            hint=f"send a smaller n_predict, or n_probs up to {_FEW}",
            param="n_probs",
        )
    generation = fields.generation(model.sampling, longest, logprobs=alternatives or None)
    if not fields.logit_bias:
        return generation
    bias: dict[int, float] = {}
    for key, amount in dict(fields.logit_bias).items():
        text = str(key)
        if re.fullmatch("[0-9]{1,10}", text):
            bias[int(text)] = amount
        else:
            for token in await engine.tokenize(text, special=False):
                bias[token] = amount
    return replace(generation, sampling=replace(generation.sampling, logit_bias=bias))


async def _prompts(
    fields: LlamaCppFields, engine: EngineClient
) -> tuple[list[str | list[int]], dict[str, str]]:
    """Return the prompts, and the images by their marks in the prompt. Several prompts, or a prompt
    with token ids, are converted to token ids."""
    sent = fields.prompt
    if isinstance(fields, InfillFields):
        return [await _gap(fields, engine)], {}
    if isinstance(sent, MultimodalPrompt):
        where = "prompt.multimodal_data"
        sees = engine.info.vision
        text, images = images_in_prompt(
            sent.prompt_string, MARKER, sent.multimodal_data, where, vision=sees
        )
        return [text], images
    if isinstance(sent, str):
        return [sent], {}
    if not sent:
        raise RequestError("prompt is an empty array", param="prompt")
    each: Sequence[Any] = sent
    if any(isinstance(part, int) for part in sent):
        each = [sent]
    prompts: list[str | list[int]] = []
    for prompt in each:
        prompts.append(await _ids(_pieces(prompt), engine))
    return prompts, {}


def _pieces(prompt: Any) -> Sequence[Any]:
    """Return the texts and token ids of one of several prompts. Raises UnsupportedError."""
    if isinstance(prompt, MultimodalPrompt):
        if prompt.multimodal_data:
            raise UnsupportedError("one of several prompts can't have images", param="prompt")
        return [prompt.prompt_string]
    return [prompt] if isinstance(prompt, str) else prompt


async def _as_text(prompt: str | list[int], engine: EngineClient) -> str:
    if isinstance(prompt, str):
        return prompt
    text = await engine.detokenize(prompt)
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


async def _ids(pieces: Sequence[Any], engine: EngineClient) -> list[int]:
    await check_texts_fit([piece for piece in pieces if isinstance(piece, str)], engine)
    ids: list[int] = []
    for i, piece in enumerate(pieces):
        if isinstance(piece, int):
            ids.append(piece)
        else:
            bos = i == 0 and wants_bos(engine.info, piece)
            ids += await engine.tokenize(piece, add_bos=bos)
    return ids


async def _gap(fields: InfillFields, engine: EngineClient) -> list[int]:
    if isinstance(fields.prompt, MultimodalPrompt):
        raise UnsupportedError("fill-in-the-middle does not support images", param="prompt")
    return await fim_prompt(
        engine,
        fields.input_prefix,
        fields.input_suffix,
        extra=[(e.filename, e.text) for e in fields.input_extra],
        answer_tokens=first_limit(fields.n_predict, fields.max_tokens),
        middle=fields.prompt if isinstance(fields.prompt, str) else "",
    )


class CompletionEvents(ReplyWriter):
    """Writes llama.cpp's completion events."""

    def __init__(
        self,
        outbox: Outbox,
        job: GenerationJob,
        model: ServedModel,
        prompts: Sequence[str],
        telemetry: LiveTelemetry,
        wanted: Sequence[str] | None,
    ) -> None:
        self._outbox = outbox
        self._job = job
        self._model = model
        self._prompts = prompts
        self._telemetry = telemetry
        self._wanted = wanted
        self._ids: list[int] = []

    def prefill(self) -> None:
        self._send_progress(self._telemetry.prefill_reports())

    def _send_progress(self, reports: Sequence[Mapping[str, int]]) -> None:
        for report in reports:
            event = {
                "index": 0, "content": "", "tokens": [], "stop": False, "prompt_progress": report
            }  # fmt: skip
            self._outbox.write(f"data: {json.dumps(event)}\n\n".encode())

    def tokens(self, choice: int, ids: tuple[int, ...]) -> None:
        self._ids += ids

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        more = ""
        self._send_progress(self._telemetry.last_reports())
        timings = self._telemetry.timings()
        if timings is not None:
            more = f',"timings":{json.dumps(timings)}'
        if logprobs:
            more += f',"completion_probabilities":{json.dumps(probabilities(logprobs))}'
        written = f'"content":{quote(text)},"tokens":{self._ids}'
        event = f'data: {{"index":{choice},{written},"stop":false{more}}}\n\n'
        self._outbox.write(event.encode())
        self._ids = []

    def end(self, reply: Reply) -> None:
        choice = reply.choices[0]
        outcome = replace(choice.outcome, usage=reply.usage)
        prompt = self._prompts[0]
        last = final("", outcome, self._job, self._model, prompt)
        last |= {"tokens": self._ids, "has_new_line": "\n" in choice.text}
        self._outbox.write(f"data: {json.dumps(selected(last, self._wanted))}\n\n".encode())


def selected(body: dict[str, Any], wanted: Sequence[str] | None) -> dict[str, Any]:
    """Return the wanted fields of `body`. The path a/b means field b of a. Missing fields are left
    out."""
    if not wanted:
        return body
    found = {}
    for path in wanted:
        value: Any = body
        try:
            for name in path.split("/", _MAX_STEPS):
                value = value[name]
        except (KeyError, TypeError):
            continue
        found[path] = value
    return found


def _settings(job: GenerationJob, model: ServedModel) -> dict[str, Any]:
    """Return llama.cpp's `generation_settings`. A bias of null is minus infinity."""
    generation = job.generation
    max_tokens = generation.max_tokens
    biases: list[dict[str, Any]] = [
        {"token": token, "bias": bias} for token, bias in generation.sampling.logit_bias.items()
    ]
    if generation.ignore_eos and model.info is not None:
        biases += ({"token": token, "bias": None} for token in model.info.eog_tokens)
    return {
        **_SAMPLERS_OFF,
        **asdict(generation.sampling),
        "logit_bias": biases,
        "n_ctx": model.served_n_ctx,
        "n_predict": -1 if max_tokens is None else max_tokens,
        "max_tokens": -1 if max_tokens is None else max_tokens,
        "n_probs": generation.logprobs or 0,
        "ignore_eos": generation.ignore_eos,
        "stop": generation.stop,
    }


def final(
    text: str, outcome: Outcome, job: GenerationJob, model: ServedModel, prompt: str
) -> dict[str, Any]:
    """Return the last object of a stream, or the complete reply."""
    usage = outcome.usage
    return {
        "index": 0,
        "content": text,
        "tokens": [],
        "id_slot": _ANY_SLOT,
        "prompt": prompt,
        "has_new_line": "\n" in text,
        "stop": True,
        "model": model.name,
        "tokens_predicted": usage.completion_tokens,
        "tokens_evaluated": usage.prompt_tokens,
        "tokens_cached": usage.cached_tokens,
        "truncated": False,
        "stop_type": _stop_type(outcome),
        "stopping_word": outcome.stop or "",
        "timings": timings_body(usage, outcome.timings),
        "generation_settings": _settings(job, model),
    }


def _stop_type(outcome: Outcome) -> str:
    if outcome.reason == "length":
        return "limit"
    if outcome.reason == "repetition":
        return "repetition"
    return "word" if outcome.stop else "eos"


def completions(
    reply: Reply,
    job: GenerationJob,
    model: ServedModel,
    prompts: Sequence[str],
    wanted: Sequence[str] | None,
) -> Any:
    """Return the complete reply: one object, or a list if there are several choices."""
    bodies = []
    for i, choice in enumerate(reply.choices):
        body = final(choice.text, choice.outcome, job, model, prompts[i // job.n])
        body |= {"index": i, "tokens": choice.tokens}
        if choice.logprobs:
            body["completion_probabilities"] = probabilities(choice.logprobs)
        bodies.append(selected(body, wanted))
    if len(bodies) == 1:
        return bodies[0]
    return bodies


def probabilities(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return the tokens and their alternatives, each with its id."""
    entries = []
    for p in logprobs:
        entry = {**logprob_entry(p), "id": p.token}
        for alternative, (_, token, _) in zip(entry["top_logprobs"], p.top, strict=True):
            alternative["id"] = token
        entries.append(entry)
    return entries
