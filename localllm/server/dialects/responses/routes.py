"""Routes of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from localllm.errors import UnsupportedError
from localllm.server.dialects.known import read
from localllm.server.dialects.responses import items
from localllm.server.dialects.responses.events import ResponseEvents, replay
from localllm.server.dialects.responses.items import (
    PageFields,
    ResponsesFields,
    ResponseStore,
    page,
)
from localllm.server.dialects.route import COUNT, Route, event_number, mount, mount_prompt
from localllm.server.dialects.toolbox import Toolbox
from localllm.server.dialects.wire import EVENTS
from localllm.server.http.accounts import PerCaller
from localllm.server.http.streaming import StreamGoneError
from localllm.server.models.router import ServedModel
from localllm.server.serving import Server, TranslatedRequest


def routes(server: Server) -> APIRouter:
    router = APIRouter(tags=["OpenAI responses"])
    stores = PerCaller(ResponseStore)
    silence_s = server.settings.keepalive_s / 2
    create = Route(
        "/v1/responses",
        ResponsesFields,
        lambda fields, model: translate(fields, model, stores.current(), silence_s),
        EVENTS,
        "Answer a list of items, whole or as events",
        ("id", "output", "status"),
        aliases=("/responses",),
    )
    mount(router, server, create)

    def input_tokens(prompt: str, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    mount_prompt(router, server, "/v1/responses/input_tokens", create, COUNT, input_tokens)

    _mount_stored(router, server, stores)
    return router


def _mount_stored(router: APIRouter, server: Server, stores: PerCaller[ResponseStore]) -> None:
    @router.get("/v1/responses/{response_id}", response_model=None)
    async def get(response_id: str, request: Request) -> dict[str, Any] | Response:
        """A stored response; with `stream=true` the events of one that is kept, behind the number
        `starting_after`."""
        asked = request.query_params
        return (
            stores.current().body(response_id)
            if asked.get("stream", "false").lower() in ("false", "0")
            else _joined(server, response_id, asked)
        )

    @router.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> dict[str, Any]:
        """Forget a stored response."""
        stores.current().drop(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.get("/v1/responses/{response_id}/input_items")
    async def list_input(response_id: str, request: Request) -> dict[str, Any]:
        """The items a stored response answers, the newest first unless asked otherwise."""
        wanted, _ = read(PageFields, request.query_params)
        return page(stores.current().sent(response_id), wanted)

    @router.post("/v1/responses/compact", response_model=None, include_in_schema=False)
    async def compact() -> dict[str, Any]:
        raise UnsupportedError(
            "responses.compact is not supported: a conversation is shortened by its oldest turns, "
            "not rewritten",
            hint="send the whole input with truncation auto",
        )

    @router.post("/v1/responses/{response_id}/cancel", response_model=None)
    async def cancel(response_id: str) -> dict[str, Any]:
        """Refused: a stored response has ended, and a running one is cancelled by disconnecting."""
        stores.current().body(response_id)
        raise UnsupportedError(
            "only a background response can be cancelled, and there are none here",
            hint="close the connection: generation ends at once",
            param="response_id",
        )


def _joined(server: Server, response_id: str, asked: Mapping[str, str]) -> Response:
    """The events of a kept stream, from where the client has them."""
    stream = server.kept.find(response_id)
    if stream is None:
        raise StreamGoneError(
            f"no stream of {response_id[:80]!r} is kept here", param="response_id"
        )
    return stream.answer(event_number(asked.get("starting_after"), "starting_after"))


def translate(
    fields: ResponsesFields, model: ServedModel, store: ResponseStore, silence_s: float
) -> TranslatedRequest:
    """A Responses request, answered as a response object or its events, and stored."""
    before, sent = items.input_items(fields, store)
    toolbox = Toolbox.of(fields.tools)
    chat, skipped = items.chat_request(
        fields, model.sampling_for(fields.effort()), [*before, *sent], toolbox
    )

    def keep(body: dict[str, Any]) -> None:
        if fields.store is not False:
            store.put(body, before, sent)

    response = ResponseEvents(fields, model.name, toolbox, chat.generation, keep, silence_s)

    return TranslatedRequest(
        chat,
        lambda collected, job: replay(collected, response),
        lambda outbox, job, progress: response.into(outbox, job.compacted),
        tuple(dict.fromkeys(skipped)),
        frame_error=response.frame_error,
        keepalive=response.keepalive,
        stream_id=response.body["id"],
    )
