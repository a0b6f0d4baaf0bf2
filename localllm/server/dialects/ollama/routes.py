"""The paths of Ollama's API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from localllm.engine.api import Engine
from localllm.errors import UnsupportedError
from localllm.server.dialects import vectors
from localllm.server.dialects.fields import read
from localllm.server.dialects.ollama import embed, lines, model_list, requests
from localllm.server.dialects.ollama.embed import OllamaEmbed, OllamaEmbeddings
from localllm.server.dialects.ollama.lines import Shape
from localllm.server.dialects.ollama.requests import OllamaChat, OllamaGenerate
from localllm.server.dialects.openapi import body_of
from localllm.server.dialects.route import Preload, Route, mount, post, refusing
from localllm.server.generation.conversing import Ask
from localllm.server.generation.folding import Fold
from localllm.server.generation.job import Job, Progress
from localllm.server.http.json_body import read_json
from localllm.server.http.streaming import Outbox
from localllm.server.models.router import ServedModel
from localllm.server.serving import Dialect, MakeJob, Order, Server

# The release of Ollama whose API this is; VS Code asks for at least 0.6.4.
VERSION = "0.12.6"
# A blank line would break clients that parse every line: silence is broken by the headers alone.
_OLLAMA = Dialect("application/x-ndjson", lines.frame_error, lambda _: b"", lines.error_body, streams=True)
# How the model is loaded is not a request's to say, and nothing is sampled.
_EMBED_HINTS = requests.HINTS | {"options"}
# Models are managed on the command line, not over HTTP.
_MANAGING = (
    ("POST", "/api/pull"), ("POST", "/api/create"), ("POST", "/api/push"), ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
)  # fmt: skip


def chat(fields: OllamaChat, model: ServedModel) -> Order | Preload:
    """A conversation; without messages it is Ollama's way to load a model ahead."""
    ignored = fields.ignored()
    if not fields.messages:
        return Preload(lines.loaded(model.name, Shape(chat=True)))
    return _order(requests.chat_ask(fields, model.sampling), model, Shape(chat=True), ignored)


def generate(fields: OllamaGenerate, model: ServedModel) -> Order | Preload:
    """A prompt: through the template, raw, or filled in before a suffix."""
    ignored = fields.ignored()
    if not fields.prompt and not fields.suffix:
        return Preload(lines.loaded(model.name, Shape(chat=False)))
    task: Ask | MakeJob
    if fields.raw or fields.suffix:
        fields.constraint()

        async def raw(engine: Engine) -> Job:
            return await requests.raw_job(fields, model, engine)

        task = raw
    else:
        task = requests.generate_ask(fields, model.sampling)
    return _order(task, model, Shape(chat=False), ignored)


def _order(task: Ask | MakeJob, model: ServedModel, shape: Shape, ignored: list[str]) -> Order:
    def whole(fold: Fold, job: Job) -> dict[str, Any]:
        return lines.whole(fold, model.name, shape)

    def writer(outbox: Outbox, job: Job, progress: Progress) -> lines.Lines:
        return lines.Lines(outbox, model.name, shape)

    return Order(task, whole, writer, tuple(ignored))


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


def routes(server: Server) -> APIRouter:
    """The routes, bound to `server`."""
    router = APIRouter(tags=["Ollama"])
    mount(router, server, CHAT, GENERATE)
    _about_models(router, server)
    _embeddings(router, server)

    async def manage(request: Request) -> Response:
        raise UnsupportedError("models are managed on the command line: `localllm pull`, `localllm models`")

    for method, path in _MANAGING:
        router.add_api_route(
            path,
            refusing(_OLLAMA, manage),
            methods=[method],
            response_model=None,
            description="Refused: models are managed on the command line, not over HTTP",
            include_in_schema=path == "/api/pull",
        )
    return router


def _about_models(router: APIRouter, server: Server) -> None:
    @router.get("/", response_class=PlainTextResponse, include_in_schema=False)
    @router.head("/", response_class=PlainTextResponse, include_in_schema=False)
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
        return {"models": [model_list.tag(m) for m in server.models.list()]}

    @router.get("/api/ps")
    async def ps() -> dict[str, Any]:
        """The models that are loaded."""
        return {"models": [model_list.running(m) for m in server.models.list() if m.loaded]}

    async def show(request: Request) -> Response:
        body = await read_json(request, server.settings)
        name = body.get("model") or body.get("name")
        model = server.models.resolve(name if isinstance(name, str) else None)
        template = (model.info.chat_template or "") if model.info else ""
        return JSONResponse(model_list.show(model, template))

    post(router, "/api/show", refusing(_OLLAMA, show), "One model's facts")


def _embeddings(router: APIRouter, server: Server) -> None:
    async def answer(request: Request) -> Response:
        fields, ignored = read(OllamaEmbed, await read_json(request, server.settings), _EMBED_HINTS)
        model = vectors.model_for(server.models, fields.model)
        return await vectors.answer(server, request, model, embed.order(fields, model), ignored)

    async def answer_older(request: Request) -> Response:
        fields, ignored = read(OllamaEmbeddings, await read_json(request, server.settings), _EMBED_HINTS)
        model = vectors.model_for(server.models, fields.model)
        return await vectors.answer(server, request, model, embed.older_order(fields, model), ignored)

    post(router, "/api/embed", refusing(_OLLAMA, answer), "Turn texts into vectors", body_of(OllamaEmbed))
    older = "Turn one text into a vector: the older form"
    post(router, "/api/embeddings", refusing(_OLLAMA, answer_older), older, body_of(OllamaEmbeddings))
