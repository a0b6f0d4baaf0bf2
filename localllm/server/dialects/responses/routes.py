"""The paths of OpenAI's Responses API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from localllm.errors import LocalLLMError
from localllm.server.dialects.fields import HINTS
from localllm.server.dialects.responses import items
from localllm.server.dialects.responses.events import Response, replay
from localllm.server.dialects.responses.items import ResponsesFields
from localllm.server.dialects.responses.store import Store
from localllm.server.dialects.route import Route, mount, mount_count
from localllm.server.dialects.wire import EVENTS
from localllm.server.generation.folding import Fold
from localllm.server.generation.job import Job, Progress
from localllm.server.http.streaming import Outbox
from localllm.server.models.router import ServedModel
from localllm.server.serving import Order, Server


def routes(server: Server) -> APIRouter:
    """The routes, bound to `server`."""
    router = APIRouter(tags=["OpenAI responses"])
    store = Store()
    create = Route(
        "/v1/responses",
        ResponsesFields,
        lambda fields, model: order(fields, model, store),
        EVENTS,
        "Answer a list of items, whole or as events",
        ("id", "output", "status"),
        aliases=("/responses",),
        hints=HINTS | items.HINTS,
    )
    mount(router, server, create)
    mount_count(
        router,
        server,
        "/v1/responses/input_tokens",
        create,
        lambda n: {"object": "response.input_tokens", "input_tokens": n},
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

    return router


def order(fields: ResponsesFields, model: ServedModel, store: Store) -> Order:
    """The conversation of `fields`, answered as a response object or its events; kept in `store` when it has ended."""
    sent = items.input_items(fields, store)
    ask, skipped = items.ask_of(fields, model.sampling, sent)
    # The response that is being streamed: an error ends that one.
    streamed: list[Response] = []

    def keep(body: dict[str, Any]) -> None:
        if fields.store is not False:
            store.put(body, sent)

    def whole(fold: Fold, job: Job) -> dict[str, Any]:
        return replay(fold, Response(fields, model.name, None, keep))

    def writer(outbox: Outbox, job: Job, progress: Progress) -> Response:
        streamed.append(Response(fields, model.name, outbox, keep, job.compacted))
        return streamed[0]

    def frame_error(error: LocalLLMError) -> bytes:
        response = streamed[0] if streamed else Response(fields, model.name, None)
        return response.frame_error(error)

    return Order(ask, whole, writer, tuple(dict.fromkeys(skipped)), frame_error)
