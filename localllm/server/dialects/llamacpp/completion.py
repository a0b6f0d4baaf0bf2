"""llama.cpp's own dialect: /completion, /infill, /props, /tokenize and friends, and LM Studio's model list."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import Field

from localllm.conversation.fim import fim_prompt
from localllm.conversation.messages import normalise
from localllm.conversation.tools import format_for
from localllm.engine.api import Engine
from localllm.engine.messages import Timings, TokenLogprob
from localllm.errors import RequestError
from localllm.server.dialects.fields import HINTS, SamplingFields, _Body, read
from localllm.server.dialects.openai.chat_reply import frame_error, timings_body
from localllm.server.dialects.openapi import SSE, body_of
from localllm.server.generation import prompting
from localllm.server.generation.conversing import Ask
from localllm.server.generation.folding import Fold
from localllm.server.generation.generate import Job, Outcome, Progress, Spent
from localllm.server.http.streaming import Outbox, read_json
from localllm.server.models.router import ServedModel
from localllm.server.serving import Dialect, Server, comment

_quote = json.encoder.encode_basestring_ascii
_DIALECT = Dialect("text/event-stream; charset=utf-8", frame_error, comment)
# Hints of llama.cpp's clients about its own slots and batches.
_HINTS = HINTS | {
    "n_indent", "t_max_prompt_ms", "n_keep", "slot_id", "timings_per_token", "prompt_progress", "return_progress",
    "n_discard",
}  # fmt: skip
_SSE_PERIOD_S = 10.0


class CompletionFields(SamplingFields):
    """POST /completion."""

    prompt: str | list[Annotated[int, Field(ge=0, le=2**31 - 1)]] = ""
    n_predict: int | None = Field(None, ge=-2, le=2**31 - 1, description="-1: the remaining window")
    n_probs: int | None = Field(None, ge=0, le=20)

    def answer_tokens(self) -> int | None:
        """The longest answer asked for."""
        return None if self.n_predict is None or self.n_predict < 0 else self.n_predict

    def constraint(self) -> tuple[str, str] | None:
        """The one constraint on the answer."""
        if self.grammar and self.json_schema is not None:
            raise RequestError("grammar and json_schema can't be combined: send one", param="grammar")
        if self.grammar:
            return ("gbnf", self.grammar)
        return ("json_schema", json.dumps(self.json_schema)) if self.json_schema is not None else None


class ExtraFile(_Body):
    """One entry of input_extra."""

    filename: str = Field("", max_length=4096)
    text: str = ""


class InfillFields(CompletionFields):
    """POST /infill."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] = Field(default_factory=list, max_length=256)
    n_cmpl: Annotated[int, Field(ge=1, le=16)] | None = None


class TokenizeFields(_Body):
    """POST /tokenize."""

    content: str = ""
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeFields(_Body):
    """POST /detokenize."""

    tokens: list[Annotated[int, Field(ge=0, le=2**31 - 1)]] = Field(default_factory=list)


class TemplateFields(_Body):
    """POST /apply-template."""

    messages: list[Any]
    chat_template_kwargs: dict[str, Any] | None = None


class Events:
    """The Writer of llama.cpp's completion events."""

    def __init__(self, outbox: Outbox, model: ServedModel) -> None:
        self._outbox, self._model = outbox, model
        self._outcome: Outcome | None = None

    def start(self) -> None:
        """Nothing to say yet."""

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        """More of the answer."""
        more = f',"completion_probabilities":{json.dumps(probabilities(logprobs))}' if logprobs else ""
        self._outbox.write(
            f'data: {{"index":{choice},"content":{_quote(text)},"tokens":[],"stop":false{more}}}\n\n'.encode()
        )

    def reasoning(self, choice: int, text: str) -> None:
        """Raw text has no reasoning."""

    def call_start(self, choice: int, index: int, name: str) -> None:
        """Raw text has no calls."""

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        """Raw text has no calls."""

    def finish(self, choice: int, outcome: Outcome) -> None:
        """Remember how it ended."""
        self._outcome = outcome

    def end(self, usage: Spent, timings: Timings) -> None:
        """The last event."""
        assert self._outcome is not None
        self._outbox.write(f"data: {json.dumps(final('', self._outcome, usage, timings, self._model))}\n\n".encode())


def final(text: str, outcome: Outcome, usage: Spent, timings: Timings, model: ServedModel) -> dict[str, Any]:
    """The object that ends a stream or is the whole reply."""
    stop_type = "limit" if outcome.reason == "length" else "word" if outcome.stop else "eos"
    return {
        "index": 0,
        "content": text,
        "tokens": [],
        "stop": True,
        "model": model.name,
        "tokens_predicted": usage.completion_tokens,
        "tokens_evaluated": usage.prompt_tokens,
        "tokens_cached": usage.cached_tokens,
        "truncated": False,
        "stop_type": stop_type,
        "stopping_word": outcome.stop or "",
        "timings": timings_body(usage, timings),
        "generation_settings": {"n_ctx": model.served_n_ctx},
    }


def whole(fold: Fold, model: ServedModel) -> Any:
    """The whole reply: one object, or a list where several choices were asked for."""
    bodies = []
    for i, choice in enumerate(fold.choices):
        assert choice.outcome is not None
        body = {**final(choice.text, choice.outcome, choice.outcome.usage, choice.outcome.timings, model), "index": i}
        if choice.logprobs:
            body["completion_probabilities"] = probabilities(tuple(choice.logprobs))
        bodies.append(body)
    return bodies[0] if len(bodies) == 1 else bodies


def probabilities(logprobs: tuple[TokenLogprob, ...]) -> list[dict[str, Any]]:
    """llama.cpp's log-probabilities."""
    return [
        {"token": p.text, "id": p.token, "logprob": p.logprob,
         "top_logprobs": [{"token": t, "id": i, "logprob": lp} for t, i, lp in p.top]}
        for p in logprobs
    ]  # fmt: skip


def routes(server: Server) -> APIRouter:
    """The routes, bound to `server`."""
    router = APIRouter(tags=["llama.cpp"])

    async def reply(request: Request, fields: CompletionFields, ignored: list[str], infill: bool) -> Response:
        model = server.models.resolve(fields.model)
        fields.constraint()

        async def prepare(engine: Engine) -> Job:
            prompt: str | list[int] = fields.prompt
            n = fields.n or 1
            if infill and isinstance(fields, InfillFields):
                prompt = await fim_prompt(
                    engine,
                    fields.input_prefix,
                    fields.input_suffix,
                    extra=[(e.filename, e.text) for e in fields.input_extra],
                    answer_tokens=fields.answer_tokens(),
                    middle=fields.prompt if isinstance(fields.prompt, str) else "",
                )
                n = fields.n_cmpl or n
            return Job(
                prompt=prompt,
                add_bos=isinstance(prompt, str) and prompting.wants_bos(engine.info, prompt),
                max_tokens=fields.answer_tokens(),
                sampling=fields.sampling(model.sampling),
                stop=fields.stops(),
                ignore_eos=bool(fields.ignore_eos),
                logprobs=fields.n_probs or None,
                grammar=fields.constraint(),
                cache_prompt=fields.cache_prompt is not False,
                time_limit_s=fields.time_limit_s(),
                n=n,
            )

        if not fields.stream:
            return await server.whole(request, model, prepare, lambda fold, job: whole(fold, model), ignored)

        def writer(outbox: Outbox, job: Job, _: Progress) -> Events:
            return Events(outbox, model)

        return await server.stream(model, prepare, writer, _DIALECT, ignored)

    @router.post("/completion", response_model=None, openapi_extra=body_of(CompletionFields, streams=SSE))
    async def completion(request: Request) -> Response:
        """Continue raw text."""
        fields, ignored = read(CompletionFields, await read_json(request, server.settings), _HINTS)
        return await reply(request, fields, ignored, infill=False)

    @router.post("/infill", response_model=None, openapi_extra=body_of(InfillFields, streams=SSE))
    async def infill(request: Request) -> Response:
        """Fill in between a prefix and a suffix, with other files as context."""
        fields, ignored = read(InfillFields, await read_json(request, server.settings), _HINTS)
        return await reply(request, fields, ignored, infill=True)

    @router.get("/props")
    async def props(model: str | None = None) -> dict[str, Any]:
        """Facts of a model; never loads it."""
        served = server.models.resolve(model)
        info = served.info
        template = (info.chat_template or "") if info else ""
        return {
            "default_generation_settings": {"n_ctx": served.served_n_ctx, "params": {}},
            "total_slots": info.n_seq_max if info else 1,
            "model_alias": served.name,
            "model_path": served.name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": template,
            "chat_template_caps": {
                "supports_tools": True,
                "supports_tool_calls": True,
                "supports_system_role": True,
                "supports_parallel_tool_calls": True,
                "native_format": format_for(template).name if info else None,
            },
            "bos_token": info.bos_text if info else "",
            "eos_token": info.eos_text if info else "",
            "build_info": "localllm",
            "is_sleeping": False,
        }

    @router.post("/tokenize", response_model=None, openapi_extra=body_of(TokenizeFields, "tokens"))
    async def tokenize(request: Request) -> dict[str, Any]:
        """Token ids of a text."""
        fields, _ = read(TokenizeFields, await read_json(request, server.settings))
        model = server.models.resolve(fields.model)
        with model.lease():
            engine = await model.engine()
            tokens = await engine.tokenize(fields.content, special=fields.parse_special, add_bos=fields.add_special)
            if not fields.with_pieces:
                return {"tokens": tokens}
            return {"tokens": [{"id": t, "piece": await engine.detokenize([t])} for t in tokens]}

    @router.post("/detokenize", response_model=None, openapi_extra=body_of(DetokenizeFields, "content"))
    async def detokenize(request: Request) -> dict[str, Any]:
        """Text of token ids."""
        fields, _ = read(DetokenizeFields, await read_json(request, server.settings))
        model = server.models.resolve(fields.model)
        with model.lease():
            engine = await model.engine()
            bad = next((t for t in fields.tokens if t >= engine.info.n_vocab), None)
            if bad is not None:
                raise RequestError(f"token {bad} is outside the vocabulary", param="tokens")
            return {"content": await engine.detokenize(fields.tokens)}

    @router.post("/apply-template", response_model=None, openapi_extra=body_of(TemplateFields, "prompt"))
    async def apply_template(request: Request) -> dict[str, Any]:
        """The prompt a conversation becomes."""
        fields, _ = read(TemplateFields, await read_json(request, server.settings))
        model = server.models.resolve(fields.model)
        ask = Ask(normalise(fields.messages), model.sampling, template_kwargs=fields.chat_template_kwargs)
        with model.lease():
            job = await server.prepare(ask, model)(await model.engine())
        return {"prompt": job.prompt}

    @router.get("/models/sse", response_model=None, include_in_schema=False)
    async def model_events() -> Response:
        """Zed's subscription to loading and unloading: the state now, then each change."""

        async def events() -> AsyncIterator[bytes]:
            said: dict[str, str] = {}
            while True:
                for m in server.models.list():
                    status = "loaded" if m.loaded else "unloaded"
                    if said.get(m.name) != status:
                        said[m.name] = status
                        event = {"model": m.name, "event": "status", "data": {"status": status}}
                        yield f"data: {json.dumps(event)}\n\n".encode()
                await asyncio.sleep(_SSE_PERIOD_S)
                yield b": keepalive\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @router.get("/api/v0/models", tags=["LM Studio"])
    async def lm_studio() -> dict[str, Any]:
        """LM Studio's model list."""
        return {"object": "list", "data": [_lm_studio(m) for m in server.models.list()]}

    @router.get("/api/v0/models/{model_id:path}", tags=["LM Studio"])
    async def lm_studio_one(model_id: str) -> dict[str, Any]:
        """One entry of LM Studio's list."""
        return _lm_studio(server.models.resolve(model_id))

    return router


def _lm_studio(model: ServedModel) -> dict[str, Any]:
    info = model.info
    return {
        "id": model.name,
        "object": "model",
        "type": "embeddings" if model.embeds else "llm",
        "publisher": "localllm",
        "arch": info.architecture if info else "",
        "compatibility_type": str(model.details.get("format", "gguf")),
        "quantization": str(model.details.get("quant", "")),
        "state": "loaded" if model.loaded else "not-loaded",
        "max_context_length": model.served_n_ctx,
        "loaded_context_length": model.served_n_ctx,
        "capabilities": [] if model.embeds else ["tool_use"],
    }
