"""The OpenAI face: models, chat completions, completions and fill-in-the-middle."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from localllm.engine.api import Engine
from localllm.errors import UnsupportedError
from localllm.server.dialects import vectors as embeddings
from localllm.server.dialects.fields import ChatFields, read
from localllm.server.dialects.openai import chat_reply as openai_chat
from localllm.server.dialects.openai import completions as openai_completions
from localllm.server.dialects.openai import model_list as model_lists
from localllm.server.dialects.openai.completions import CompletionFields
from localllm.server.dialects.openapi import SSE as SSE_TYPE
from localllm.server.dialects.openapi import body_of
from localllm.server.dialects.vectors import EmbeddingFields
from localllm.server.generation.generate import Job, Progress
from localllm.server.http.streaming import Outbox, read_json
from localllm.server.serving import Dialect, Server, comment

SSE = Dialect("text/event-stream; charset=utf-8", openai_chat.frame_error, comment)


def routes(server: Server) -> APIRouter:
    """The routes, bound to `server`."""
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models")
    @router.get("/models", include_in_schema=False)
    async def list_models() -> dict[str, Any]:
        """The models this server offers."""
        return model_lists.openai_list(server.models)

    @router.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> dict[str, Any]:
        """One model."""
        return model_lists.entry(server.models.resolve(model_id))

    @router.post(
        "/v1/chat/completions",
        response_model=None,
        openapi_extra=body_of(ChatFields, "id", "choices", "usage", streams=SSE_TYPE),
    )
    @router.post("/chat/completions", response_model=None, include_in_schema=False)
    @router.post("/api/v0/chat/completions", response_model=None, include_in_schema=False)
    async def chat(request: Request) -> Response:
        """Answer a conversation, whole or as server-sent events."""
        fields, ignored = read(ChatFields, await read_json(request, server.settings))
        model = server.models.resolve(fields.model)
        prepare = server.prepare(openai_chat.ask_of(fields, model.sampling), model)
        if not fields.stream:
            return await server.whole(
                request, model, prepare, lambda fold, job: openai_chat.whole(fold, model.name), ignored
            )
        include_usage = bool(fields.stream_options and fields.stream_options.include_usage)

        def writer(outbox: Outbox, job: Job, _: Progress) -> openai_chat.Chunks:
            return openai_chat.Chunks(
                outbox, model.name, n=job.choices, include_usage=include_usage, compacted=job.compacted
            )

        return await server.stream(model, prepare, writer, SSE, ignored)

    @router.post(
        "/v1/completions",
        response_model=None,
        openapi_extra=body_of(CompletionFields, "id", "choices", "usage", streams=SSE_TYPE),
    )
    @router.post("/completions", response_model=None, include_in_schema=False)
    async def completions(request: Request) -> Response:
        """Continue raw text, or fill in between a prompt and a suffix."""
        fields, ignored = read(CompletionFields, await read_json(request, server.settings))
        model = server.models.resolve(fields.model)
        openai_completions.check(fields)
        echo = bool(fields.echo)

        async def prepare(engine: Engine) -> Job:
            return await openai_completions.job_of(fields, model, engine)

        if not fields.stream:
            return await server.whole(
                request, model, prepare, lambda f, j: openai_completions.whole(f, j, model.name, echo=echo), ignored
            )
        include_usage = bool(fields.stream_options and fields.stream_options.include_usage)

        def writer(outbox: Outbox, job: Job, _: Progress) -> openai_completions.Chunks:
            return openai_completions.Chunks(outbox, model.name, job, include_usage=include_usage, echo=echo)

        return await server.stream(model, prepare, writer, SSE, ignored)

    @router.post(
        "/v1/fim/completions",
        response_model=None,
        openapi_extra=body_of(CompletionFields, "id", "choices", "usage", streams=SSE_TYPE),
    )
    @router.post("/fim/completions", response_model=None, include_in_schema=False)
    async def fill_in(request: Request) -> Response:
        """Mistral's fill-in-the-middle: a completion with a suffix, answered in the shape of a chat."""
        fields, ignored = read(CompletionFields, await read_json(request, server.settings))
        model = server.models.resolve(fields.model)
        openai_completions.check(fields)

        async def prepare(engine: Engine) -> Job:
            return await openai_completions.job_of(fields, model, engine)

        if not fields.stream:
            return await server.whole(
                request, model, prepare, lambda fold, job: openai_chat.whole(fold, model.name), ignored
            )

        def writer(outbox: Outbox, job: Job, _: Progress) -> openai_chat.Chunks:
            return openai_chat.Chunks(outbox, model.name, n=job.choices, include_usage=True)

        return await server.stream(model, prepare, writer, SSE, ignored)

    @router.post("/v1/embeddings", response_model=None, openapi_extra=body_of(EmbeddingFields))
    @router.post("/embeddings", response_model=None, include_in_schema=False)
    async def embed(request: Request) -> Response:
        """Turn texts into vectors."""
        fields, ignored = read(EmbeddingFields, await read_json(request, server.settings))
        return await embeddings.openai(server, request, fields, ignored)

    @router.post("/v1/rerank", response_model=None)
    async def not_spoken(request: Request) -> Response:
        """Refused: no model here ranks."""
        raise UnsupportedError("this server does not rank texts", hint="rank by the distance of their embeddings")

    return router
