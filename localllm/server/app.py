"""Builds the ASGI application: middleware, the routes of every dialect, health, metrics and error
responses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import cache, partial
from itertools import chain
from typing import Any, NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Router

from localllm.server.dialects.paths import Paths, answer_of
from localllm.server.http.accounts import caller
from localllm.server.http.asgi import Receive, Scope, Send
from localllm.server.http.errors import (
    MethodError,
    RouteNotFoundError,
    is_another_server_s,
)
from localllm.server.http.gate import SecurityGate
from localllm.server.http.prometheus import CONTENT_TYPE
from localllm.server.http.settings import ServerSettings
from localllm.server.metrics import render_metrics
from localllm.server.models.router import ModelRouter
from localllm.server.models.served import ModelStore
from localllm.server.serving import Server

_NOT_OK = {
    "loading": "Loading model",
    "error": "No model named at the start could be loaded",
}
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def create_app(
    models: ModelRouter,
    *,
    settings: ServerSettings | None = None,
    store: ModelStore | None = None,
    power: Callable[[], dict[str, float]] | None = None,
) -> Starlette:
    """Return the ASGI application that serves `models`.

    `store`: the store that clients may pull models to and remove models from.
    `power`: returns the machine's power figures by their names in /metrics. Names that end in
    _total are counters."""
    settings = settings or ServerSettings()
    server = Server(models, settings, store)
    own = Paths("server")
    others = _LaterPaths(partial(_other_dialects, server))
    first = _LaterPaths(partial(_first_dialect, server), default=others)

    @cache
    def document() -> dict[str, Any]:
        from localllm.server.dialects import openapi

        return openapi.document([*first.paths(), own, *others.paths()])

    _own_paths(own, server, document, power)
    app = Starlette(routes=own, exception_handlers={HTTPException: _http})
    app.router.redirect_slashes = False
    app.router.default = first
    app.state.server = server
    app.state.document = document
    app.state.dialects = (first, others)
    if models.upstreams is not None:
        # Imported here because it loads an HTTP client.
        from localllm.server.proxy.middleware import ProxyMiddleware

        app.add_middleware(
            ProxyMiddleware,
            upstreams=models.upstreams,
            served=models.local_models_named,
            is_full=models.full,
            settings=settings,
        )
    # The middleware that is added last runs first.
    app.add_middleware(SecurityGate, settings=settings, accounts=server.accounts)
    return app


class _LaterPaths:
    """An application of dialects that are imported at the first request for one of their paths, or
    after the server's own paths answer.

    Importing all dialects takes a third of the start. `default`: gets the requests for other paths.
    """

    def __init__(self, make: Callable[[], list[Paths]], default: _LaterPaths | None = None) -> None:
        self._make = make
        self._default = default
        # Several threads may ask at the same time.
        self._lock = threading.Lock()
        self._paths: list[Paths] = []
        self._router: Router | None = None

    def paths(self) -> list[Paths]:
        """Return the paths of these dialects. Imports them if that is necessary."""
        with self._lock:
            if self._router is None:
                self._paths = self._make()
                routes = list(chain(*self._paths))
                self._router = Router(routes, redirect_slashes=False, default=self._default)
            return self._paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._router is None:
            await asyncio.to_thread(self.paths)
        assert self._router is not None
        await self._router(scope, receive, send)


def _first_dialect(server: Server) -> list[Paths]:
    """Return the paths of OpenAI's chat: the most likely first request."""
    from localllm.server.dialects.openai import routes as openai

    return [openai.routes(server)]


def _other_dialects(server: Server) -> list[Paths]:
    from localllm.server.dialects import vectors
    from localllm.server.dialects.anthropic import routes as anthropic
    from localllm.server.dialects.llamacpp import routes as llamacpp
    from localllm.server.dialects.ollama import routes as ollama
    from localllm.server.dialects.responses import routes as responses
    from localllm.server.dialects.systemone import routes as systemone
    from localllm.server.kv_transfer import routes as kv_transfer

    kinds = (responses, vectors, systemone, anthropic, ollama, llamacpp, kv_transfer)
    return [dialect.routes(server) for dialect in kinds]


def _own_paths(
    paths: Paths,
    server: Server,
    document: Callable[[], dict[str, Any]],
    power: Callable[[], dict[str, float]] | None,
) -> None:
    loading = {
        "503": {
            "description": "no model is loaded: the models are loading, or none could be loaded"
        }
    }

    @paths.answers("GET", "/openapi.json", about="")
    async def described(request: Request) -> dict[str, Any]:
        return document()

    @paths.answers("GET", "/health", "/v1/health", responses={**answer_of(), **loading})
    async def health(request: Request) -> Response:
        """Report that the server is alive; needs no key. While the models named at the start
        are loading, the status is 503 with `progress`, as in llama.cpp's server. Requests wait for
        these models."""
        status, progress = server.models.health
        if status == "ok":
            return JSONResponse({"status": status})
        error = {"code": 503, "message": _NOT_OK[status], "type": "unavailable_error"}
        body = {"status": status, "progress": round(progress, 3), "error": error}
        return JSONResponse(body, status_code=503, headers={"retry-after": "1"})

    @paths.answers("GET", "/metrics", responses=answer_of("text/plain", "string"))
    async def prometheus(request: Request) -> Response:
        """The server's metrics in Prometheus' text format."""
        figures: dict[str, float] = {}
        if power is not None and caller().admin:
            figures = await asyncio.to_thread(power)
        page = await render_metrics(server, figures)
        headers = {"process-start-time-unix": f"{server.totals.started_s:.0f}"}
        return Response(page, media_type=CONTENT_TYPE, headers=headers)

    @paths.answers("GET", "/usage.csv", responses=answer_of("text/csv", "string"))
    async def usage(request: Request) -> Response:
        """The usage of named keys since the server started, as CSV. Admins get the usage of all
        keys, other callers only their own."""
        return Response(server.accounts.table(caller()), media_type="text/csv")


async def _http(request: Request, error: Exception) -> NoReturn:
    """Raise the error for an unknown path or method. The gate turns it into a response."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        methods = ", ".join(_methods(request))
        wrong = MethodError("this path does not support that method", hint=f"it answers {methods}")
        wrong.methods = methods
        raise wrong
    raise RouteNotFoundError("this server has no such path", hint=_hint(request))


def _hint(request: Request) -> str:
    """Return what to do about a path that does not exist."""
    path = request.url.path
    if is_another_server_s(path):
        base = f"{request.base_url}v1"
        return f"set the base URL to {base}: /api/v0 and /api/v1 are LM Studio's and Lemonade's"
    if path.rstrip("/") == "/v1":
        return "this is the base URL, to which clients add a path such as /chat/completions"
    near = _nearest_path(request)
    if near:
        return f"did you mean {near}?"
    return "GET /openapi.json lists all paths"


def _methods(request: Request, path: str = "") -> list[str]:
    """Return the methods that `path` answers. Default: the path of `request`."""
    found = set()
    routes = list(request.app.routes)
    for dialects in request.app.state.dialects:
        routes += chain(*dialects.paths())
    for method in _METHODS:
        asked = {**request.scope, "path": path or request.url.path, "method": method}
        if any(route.matches(asked)[0] is Match.FULL for route in routes):
            found.add(method)
    if "GET" in found:
        found.add("HEAD")
    return sorted(found)


def _nearest_path(request: Request) -> str:
    """Return the existing path that the client probably means, or "".

    Clients may send /v1 twice (from a base URL and a path) or not at all. So the candidates are the
    path without its first segments, and its last segment after /v1."""
    parts = request.url.path.split("/")[1:]
    likely = ["/" + "/".join(parts[i:]) for i in range(1, min(len(parts), 8))]
    likely.append(f"/v1/{parts[-1]}")
    for path in likely:
        if request.method in _methods(request, path):
            return path
    return ""
