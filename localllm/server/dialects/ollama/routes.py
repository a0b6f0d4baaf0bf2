"""The routes of Ollama's dialect."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from localllm.engine.api import Engine
from localllm.errors import LocalLLMError, UnsupportedError
from localllm.server.dialects import vectors as embeddings
from localllm.server.dialects.fields import read
from localllm.server.dialects.ollama import lines as ollama
from localllm.server.dialects.ollama.lines import OllamaChat, OllamaGenerate, Shape
from localllm.server.dialects.openapi import NDJSON, body_of
from localllm.server.dialects.vectors import OllamaEmbed, OllamaEmbeddings
from localllm.server.generation.generate import Job, Progress
from localllm.server.http.errors import headers_of, to_ollama
from localllm.server.http.streaming import Outbox, read_json
from localllm.server.models.router import ServedModel
from localllm.server.serving import Dialect, Prepare, Server

# A blank line would break clients that parse every line: silence is broken by the headers alone.
_DIALECT = Dialect("application/x-ndjson", ollama.frame_error, lambda progress: b"", to_ollama)

# How the model is loaded is not a request's to say, and nothing is sampled.
_EMBED_HINTS = ollama.HINTS | {"options"}


def routes(server: Server) -> APIRouter:
    """The routes, bound to `server`."""
    router = APIRouter(tags=["Ollama"])

    @router.get("/", response_class=PlainTextResponse, include_in_schema=False)
    @router.head("/", response_class=PlainTextResponse, include_in_schema=False)
    async def root() -> str:
        """What Ollama's clients look for."""
        return "Ollama is running"

    @router.get("/api/version")
    async def version() -> dict[str, str]:
        """The release of Ollama whose API this is."""
        return {"version": ollama.VERSION}

    @router.get("/api/tags")
    async def tags() -> dict[str, Any]:
        """The models on offer."""
        return {"models": [ollama.tag(m) for m in server.models.list()]}

    @router.get("/api/ps")
    async def ps() -> dict[str, Any]:
        """The models that are loaded."""
        return {
            "models": [
                {**ollama.tag(m), "expires_at": "0001-01-01T00:00:00Z", "size_vram": 0,
                 "context_length": m.served_n_ctx}
                for m in server.models.list() if m.loaded
            ]
        }  # fmt: skip

    @router.post("/api/show", response_model=None)
    async def show(request: Request) -> Response:
        """One model's facts."""
        try:
            body = await read_json(request, server.settings)
            model = server.models.resolve(_text(body.get("model") or body.get("name")))
            template = (model.info.chat_template or "") if model.info else ""
            return JSONResponse(ollama.show(model, template))
        except LocalLLMError as e:
            return _refused(e)

    async def reply(request: Request, model: ServedModel, prepare: Prepare, stream: bool, chat: bool,
                    ignored: list[str]) -> Response:  # fmt: skip
        shape = Shape(chat)
        if not stream:
            return await server.whole(
                request, model, prepare, lambda fold, job: ollama.whole(fold, model.name, shape), ignored
            )

        def writer(outbox: Outbox, job: Job, _: Progress) -> ollama.Lines:
            return ollama.Lines(outbox, model.name, shape)

        return await server.stream(model, prepare, writer, _DIALECT, ignored)

    @router.post("/api/chat", response_model=None, openapi_extra=body_of(OllamaChat, "message", "done", streams=NDJSON))
    async def chat(request: Request) -> Response:
        """Answer a conversation; streams unless told not to."""
        try:
            fields, ignored = read(OllamaChat, await read_json(request, server.settings), ollama.HINTS)
            model = server.models.resolve(fields.model)
            ignored += fields.ignored()
            if not fields.messages:
                await model.engine()  # Ollama's way to load a model ahead
                return _loaded(model, {"message": {"role": "assistant", "content": ""}})
            prepare = server.prepare(ollama.chat_ask(fields, model.sampling), model)
            return await reply(request, model, prepare, fields.stream is not False, True, ignored)
        except LocalLLMError as e:
            return _refused(e)

    @router.post(
        "/api/generate", response_model=None, openapi_extra=body_of(OllamaGenerate, "response", "done", streams=NDJSON)
    )
    async def generate(request: Request) -> Response:
        """Continue a prompt: through the template, raw, or filling in before a suffix."""
        try:
            fields, ignored = read(OllamaGenerate, await read_json(request, server.settings), ollama.HINTS)
            model = server.models.resolve(fields.model)
            ignored += fields.ignored()
            if not fields.prompt and not fields.suffix:
                await model.engine()
                return _loaded(model, {"response": ""})
            if fields.raw or fields.suffix:
                fields.constraint()

                async def prepare(engine: Engine) -> Job:
                    return await ollama.raw_job(fields, model, engine)
            else:
                prepare = server.prepare(ollama.generate_ask(fields, model.sampling), model)  # type: ignore[assignment]
            return await reply(request, model, prepare, fields.stream is not False, False, ignored)
        except LocalLLMError as e:
            return _refused(e)

    @router.post("/api/embed", response_model=None, openapi_extra=body_of(OllamaEmbed))
    async def embed(request: Request) -> Response:
        """Turn texts into vectors."""
        try:
            fields, ignored = read(OllamaEmbed, await read_json(request, server.settings), _EMBED_HINTS)
            return await embeddings.ollama(server, request, fields, ignored)
        except LocalLLMError as e:
            return _refused(e)

    @router.post("/api/embeddings", response_model=None, openapi_extra=body_of(OllamaEmbeddings))
    async def embed_one(request: Request) -> Response:
        """Turn one text into a vector: the older form."""
        try:
            fields, ignored = read(OllamaEmbeddings, await read_json(request, server.settings), _EMBED_HINTS)
            return await embeddings.ollama_one(server, request, fields, ignored)
        except LocalLLMError as e:
            return _refused(e)

    @router.post("/api/pull", response_model=None)
    @router.post("/api/create", response_model=None, include_in_schema=False)
    @router.post("/api/push", response_model=None, include_in_schema=False)
    @router.post("/api/copy", response_model=None, include_in_schema=False)
    @router.delete("/api/delete", response_model=None, include_in_schema=False)
    async def manage(request: Request) -> Response:
        """Refused: models are managed on the command line, not over HTTP."""
        return _refused(UnsupportedError("models are managed on the command line: `localllm pull`, `localllm models`"))

    return router


def _loaded(model: ServedModel, body: dict[str, Any]) -> JSONResponse:
    said = {"model": model.name, "created_at": ollama.now(), **body, "done": True, "done_reason": "load"}
    return JSONResponse(said)


def _refused(error: LocalLLMError) -> JSONResponse:
    return JSONResponse(to_ollama(error), status_code=error.http_status, headers=headers_of(error))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
