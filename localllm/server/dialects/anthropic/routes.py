"""The routes of Anthropic's dialect."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from localllm.errors import LocalLLMError
from localllm.server.dialects.anthropic import messages as anthropic
from localllm.server.dialects.anthropic.messages import MessagesFields
from localllm.server.dialects.fields import HINTS, read
from localllm.server.dialects.openapi import SSE, body_of
from localllm.server.generation.generate import Job, Progress
from localllm.server.http.errors import headers_of, to_anthropic
from localllm.server.http.streaming import Outbox, read_json
from localllm.server.serving import Dialect, Server

_DIALECT = Dialect("text/event-stream; charset=utf-8", anthropic.frame_error, anthropic.ping, to_anthropic)


def routes(server: Server) -> APIRouter:
    """The routes, bound to `server`."""
    router = APIRouter(tags=["Anthropic"])

    async def _read(request: Request) -> tuple[MessagesFields, list[str]]:
        return read(MessagesFields, await read_json(request, server.settings), HINTS | anthropic.HINTS)

    @router.post(
        "/v1/messages", response_model=None, openapi_extra=body_of(MessagesFields, "content", "usage", streams=SSE)
    )
    async def messages(request: Request) -> Response:
        """Answer a conversation, whole or as events."""
        try:
            fields, ignored = await _read(request)
            model = server.models.resolve(fields.model)
            ask, skipped = anthropic.ask_of(fields, model.sampling)
            ignored += skipped
            prepare = server.prepare(ask, model)
            if not fields.stream:
                return await server.whole(
                    request, model, prepare, lambda fold, job: anthropic.whole(fold, model.name), ignored
                )

            def writer(outbox: Outbox, job: Job, progress: Progress) -> anthropic.Events:
                return anthropic.Events(outbox, model.name, progress)

            return await server.stream(model, prepare, writer, _DIALECT, ignored)
        except LocalLLMError as e:
            return JSONResponse(to_anthropic(e), status_code=e.http_status, headers=headers_of(e))

    @router.post(
        "/v1/messages/count_tokens", response_model=None, openapi_extra=body_of(MessagesFields, "input_tokens")
    )
    async def count(request: Request) -> Any:
        """How many tokens the conversation makes."""
        try:
            fields, _ = await _read(request)
            model = server.models.resolve(fields.model)
            ask, _ = anthropic.ask_of(fields, model.sampling)
            return {"input_tokens": await server.count(ask, model)}
        except LocalLLMError as e:
            return JSONResponse(to_anthropic(e), status_code=e.http_status, headers=headers_of(e))

    return router
