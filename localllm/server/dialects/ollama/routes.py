"""Routes of Ollama's API."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from localllm.engine.worker.client import EngineClient
from localllm.errors import ModelNotFoundError, UnsupportedError
from localllm.server.dialects import vectors
from localllm.server.dialects.fields import read
from localllm.server.dialects.ollama import lines, model_list, requests
from localllm.server.dialects.ollama.lines import LineShape
from localllm.server.dialects.ollama.pulling import ModelPuller, allowed
from localllm.server.dialects.ollama.requests import (
    OllamaBody,
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaManaged,
    OllamaPull,
)
from localllm.server.dialects.openapi import body_of
from localllm.server.dialects.route import PreloadRequest, Route, mount, post, refusing
from localllm.server.generation.chat import ChatRequest
from localllm.server.generation.job import GenerationJob
from localllm.server.http.accounts import admins_only
from localllm.server.http.asgi import answer_headers, ignored_header
from localllm.server.http.errors import ollama_envelope
from localllm.server.http.json_body import read_json
from localllm.server.http.streaming import Outbox, StreamResponse, unless_gone
from localllm.server.models.router import ServedModel
from localllm.server.serving import Dialect, JobFactory, Server, TranslatedRequest

# The Ollama release whose API this is; VS Code requires at least 0.6.4.
VERSION = "0.12.11"
# No keep-alives: clients parse every line, even a blank one.
_OLLAMA = Dialect("application/x-ndjson", lines.frame_error, lambda _: b"", ollama_envelope, streams=True)
# Load parameters have no effect, and nothing is sampled.
_EMBED_HINTS = requests.HINTS | {"options", "truncate"}
_UNSUPPORTED = ("/api/create", "/api/push", "/api/copy")


def chat(fields: OllamaChat, model: ServedModel) -> TranslatedRequest | PreloadRequest:
    """A chat; without messages it loads the model, or unloads it."""
    ignored, shape = fields.ignored(), LineShape(chat=True)
    if not fields.messages:
        return _preload(fields, model, shape)
    chat, omitted = requests.chat_request(fields, model.sampling_for(fields.effort()))
    return _translated(chat, model, shape, [*ignored, *omitted], fields.keep_s())


def generate(fields: OllamaGenerate, model: ServedModel) -> TranslatedRequest | PreloadRequest:
    """A prompt: templated, raw, or with a suffix."""
    ignored, shape = fields.ignored(), LineShape(chat=False)
    if not fields.prompt and not fields.suffix:
        return _preload(fields, model, shape)
    task: ChatRequest | JobFactory
    if fields.untemplated:
        fields.constraint()

        async def raw(engine: EngineClient) -> GenerationJob:
            return await requests.raw_job(fields, model, engine)

        task = raw
    else:
        task = requests.generate_request(fields, model.sampling_for(fields.effort()))
    return _translated(task, model, shape, ignored, fields.keep_s())


def _preload(fields: OllamaBody, model: ServedModel, shape: LineShape) -> PreloadRequest:
    keep_s = fields.keep_s()
    return PreloadRequest(lines.loaded(model.name, shape, "unload" if keep_s == 0 else "load"), keep_s)


def _translated(
    task: ChatRequest | JobFactory, model: ServedModel, shape: LineShape, ignored: list[str], keep_s: float | None
) -> TranslatedRequest:
    return TranslatedRequest(
        task,
        lambda collected, job: lines.answer(collected, model.name, shape),
        lambda outbox, job, progress: lines.JsonLines(outbox, model.name, shape),
        tuple(ignored),
        keep_s=keep_s,
    )


CHAT = Route(
    "/api/chat",
    OllamaChat,
    chat,
    _OLLAMA,
    "Answer a conversation; streams unless told not to",
    ("message", "done"),
    hints=requests.HINTS,
)
GENERATE = Route(
    "/api/generate",
    OllamaGenerate,
    generate,
    _OLLAMA,
    "Continue a prompt: through the template, raw, or filling in before a suffix",
    ("response", "done"),
    hints=requests.HINTS,
)

EMBED = Route(
    "/api/embed",
    OllamaEmbed,
    requests.translate_embed,
    _OLLAMA,
    "Turn texts into vectors",
    hints=_EMBED_HINTS,
)
OLDER_EMBED = Route(
    "/api/embeddings",
    OllamaEmbeddings,
    requests.translate_older_embed,
    _OLLAMA,
    "Turn one text into a vector: the older form",
    hints=_EMBED_HINTS,
)


def routes(server: Server) -> APIRouter:
    router = APIRouter(tags=["Ollama"])
    mount(router, server, CHAT, GENERATE)
    _about_models(router, server)
    vectors.mount(router, server, EMBED, OLDER_EMBED)
    _managing(router, server)
    return router


def _managing(router: APIRouter, server: Server) -> None:
    puller = ModelPuller()

    async def pull(request: Request) -> Response:
        admins_only("fetching a model")
        store = allowed(server.store)
        fields, ignored = read(OllamaPull, await read_json(request, server.settings), requests.HINTS)
        name, headers = fields.wanted(), answer_headers(ignored)
        if fields.stream is False:
            reported: list[dict[str, Any]] = []
            await unless_gone(request.receive, puller.pull(store, name, reported.append))
            return JSONResponse(reported[-1], headers=headers) if reported else Response(status_code=499)

        async def produce(outbox: Outbox) -> None:
            await puller.pull(store, name, lambda line: outbox.write(json.dumps(line).encode() + b"\n"))

        return StreamResponse(
            produce,
            settings=server.settings,
            media_type=_OLLAMA.media_type,
            keepalive=lambda: b"",
            frame_error=lines.frame_error,
            error_body=ollama_envelope,
            headers=lambda: headers,
        )

    async def delete(request: Request) -> Response:
        admins_only("removing a model")
        store = allowed(server.store)
        fields, ignored = read(OllamaManaged, await read_json(request, server.settings), requests.HINTS)
        name = fields.wanted()
        with suppress(ModelNotFoundError):
            # Mapped files would keep their disk space; a model in use is not removed.
            model = await server.models.find(name)
            if model.loaded:
                await model.worker.unload()
        await asyncio.to_thread(store.remove, name)
        return Response(headers=answer_headers(ignored))

    async def unsupported(request: Request) -> Response:
        raise UnsupportedError(
            "models are neither made nor published over HTTP: those of this disk are managed on the command line, `localllm models`"
        )

    about = "Fetch a model, where --allow-pull lets clients do that"
    described = body_of(OllamaPull, "status", streams="application/x-ndjson")
    post(router, "/api/pull", refusing(_OLLAMA, pull), about, described)
    router.add_api_route(
        "/api/delete",
        refusing(_OLLAMA, delete),
        methods=["DELETE"],
        response_model=None,
        description="Remove a model from this disk, where --allow-pull lets clients do that",
        openapi_extra=body_of(OllamaManaged),
    )
    for path in _UNSUPPORTED:
        router.add_api_route(
            path, refusing(_OLLAMA, unsupported), methods=["POST"], response_model=None, include_in_schema=False
        )


def _about_models(router: APIRouter, server: Server) -> None:
    @router.get("/", response_class=PlainTextResponse, include_in_schema=False)
    async def root() -> str:
        """What Ollama's clients look for."""
        return "Ollama is running"

    @router.get("/api/version")
    async def version() -> dict[str, str]:
        """The release of Ollama whose API this is."""
        return {"version": VERSION}

    @router.get("/api/tags")
    async def tags() -> dict[str, Any]:
        """The models on offer."""
        return model_list.tags(server.models)

    @router.get("/api/ps")
    async def ps() -> dict[str, Any]:
        """The models that are loaded."""
        loaded = [m for m in server.models.list() if m.loaded]
        return {"models": [model_list.running(m, server.models.idle_s) for m in loaded]}

    async def show(request: Request) -> Response:
        fields, ignored = read(OllamaManaged, await read_json(request, server.settings), requests.HINTS)
        model = await server.models.find(fields.wanted())
        template = (model.info.chat_template or "") if model.info else ""
        body = await asyncio.to_thread(model_list.show, model, template)
        return JSONResponse(body, headers=ignored_header(ignored))

    post(router, "/api/show", refusing(_OLLAMA, show), "One model's facts", body_of(OllamaManaged, "capabilities"))
