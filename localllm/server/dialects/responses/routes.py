"""The routes of /v1/responses."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response as HttpResponse

from localllm.errors import LocalLLMError
from localllm.server.dialects.fields import HINTS, read
from localllm.server.dialects.openapi import SSE, body_of
from localllm.server.dialects.responses import events as responses
from localllm.server.dialects.responses.events import ResponsesFields, Store
from localllm.server.generation.folding import Fold
from localllm.server.generation.generate import Job, Progress
from localllm.server.http.streaming import Outbox, read_json
from localllm.server.serving import Dialect, Server, comment


def routes(server: Server) -> APIRouter:
    """The routes, bound to `server`."""
    router = APIRouter(tags=["OpenAI responses"])
    store = Store()

    @router.post(
        "/v1/responses",
        response_model=None,
        openapi_extra=body_of(ResponsesFields, "id", "output", "status", streams=SSE),
    )
    @router.post("/responses", response_model=None, include_in_schema=False)
    async def create(request: Request) -> HttpResponse:
        """Answer a list of items, whole or as events."""
        fields, ignored = read(ResponsesFields, await read_json(request, server.settings), HINTS | responses.HINTS)
        model = server.models.resolve(fields.model)
        items = responses.input_items(fields, store)
        ask, skipped = responses.ask_of(fields, model.sampling, items)
        ignored = [*ignored, *dict.fromkeys(skipped)]
        prepare = server.prepare(ask, model)

        def keep(body: dict[str, Any]) -> None:
            if fields.store is not False:
                store.put(body, items)

        if not fields.stream:

            def body(fold: Fold, job: Job) -> dict[str, Any]:
                return responses.replay(fold, responses.Response(fields, model.name, None, keep))

            return await server.whole(request, model, prepare, body, ignored)

        box: list[responses.Response] = []

        def writer(outbox: Outbox, job: Job, _: Progress) -> responses.Response:
            box.append(responses.Response(fields, model.name, outbox, keep, job.compacted))
            return box[0]

        def frame_error(error: LocalLLMError) -> bytes:
            response = box[0] if box else responses.Response(fields, model.name, None)
            return response.frame_error(error)

        return await server.stream(
            model, prepare, writer, Dialect("text/event-stream; charset=utf-8", frame_error, comment), ignored
        )

    @router.get("/v1/responses/{response_id}")
    async def get(response_id: str) -> dict[str, Any]:
        """A stored response."""
        return store.body(response_id)

    @router.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> dict[str, Any]:
        """Forget a stored response."""
        store.drop(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post(
        "/v1/responses/input_tokens", response_model=None, openapi_extra=body_of(ResponsesFields, "input_tokens")
    )
    async def count(request: Request) -> dict[str, Any]:
        """How many tokens the input makes."""
        fields, _ = read(ResponsesFields, await read_json(request, server.settings))
        model = server.models.resolve(fields.model)
        ask, _ = responses.ask_of(fields, model.sampling, responses.input_items(fields, store))
        return {"object": "response.input_tokens", "input_tokens": await server.count(ask, model)}

    return router
