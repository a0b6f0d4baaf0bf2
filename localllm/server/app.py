"""Puts the server together: the gate, the faces, and one shape for every error."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

import localllm
from localllm.errors import LocalLLMError
from localllm.server import metrics
from localllm.server.dialects import openapi
from localllm.server.dialects.anthropic import routes as anthropic_routes
from localllm.server.dialects.llamacpp import routes as llamacpp_routes
from localllm.server.dialects.ollama import routes as ollama_routes
from localllm.server.dialects.openai import routes as openai_routes
from localllm.server.dialects.responses import routes as responses_routes
from localllm.server.http.asgi import App, Message, Receive, Scope, Send
from localllm.server.http.errors import MethodError, RouteNotFoundError, headers_of, internal, log_failure
from localllm.server.http.gate import SecurityGate, refuse
from localllm.server.http.settings import ServerSettings
from localllm.server.models.router import ModelRouter
from localllm.server.serving import Server


class _Edge:
    """ASGI middleware: `/v1/completions/` is `/v1/completions` (editors are configured with either), and whatever
    nobody foresaw becomes one error object without a word about the inside."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(scope["path"]) > 1 and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, sending)
        except Exception as e:
            log_failure(e)
            if not started:
                await refuse(send, internal(e))


def create_app(models: ModelRouter, *, settings: ServerSettings | None = None) -> FastAPI:
    """The ASGI application that serves `models` under `settings`."""
    settings = settings or ServerSettings()
    app = FastAPI(
        title="localllm",
        version=localllm.__version__,
        description="Language models on this machine, in the dialects editors speak.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    server = Server(models, settings)
    app.state.server = server
    app.add_middleware(_Edge)
    app.add_middleware(SecurityGate, settings=settings)  # added last: runs first
    _errors(app)
    for face in (openai_routes, responses_routes, anthropic_routes, ollama_routes, llamacpp_routes):
        app.include_router(face.routes(server))

    @app.get("/health", tags=["server"])
    @app.get("/v1/health", include_in_schema=False)
    async def health() -> dict[str, str]:
        """Alive; answered without a key."""
        return {"status": "ok"}

    @app.get("/metrics", tags=["server"], response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Counters in Prometheus' text format."""
        return Response(await metrics.render(server), media_type=metrics.CONTENT_TYPE)

    openapi.install(app)
    return app


def _errors(app: FastAPI) -> None:
    @app.exception_handler(LocalLLMError)
    async def ours(request: Request, error: Exception) -> JSONResponse:
        return error_response(internal(error))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: Exception) -> JSONResponse:
        status = error.status_code if isinstance(error, HTTPException) else 500
        if status == 405:
            return error_response(MethodError("this path does not answer that method"))
        if status == 404:
            return error_response(RouteNotFoundError("no such path here", hint="GET /openapi.json lists them"))
        return error_response(LocalLLMError("the request failed"))


def error_response(error: LocalLLMError) -> JSONResponse:
    """`error` as OpenAI's clients expect it."""
    return JSONResponse(error.to_openai(), status_code=error.http_status, headers=headers_of(error))
