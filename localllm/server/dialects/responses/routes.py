"""Routes of OpenAI's Responses and Conversations APIs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from localllm.errors import UnsupportedError
from localllm.server.dialects.fields import HINTS, read
from localllm.server.dialects.openapi import body_of
from localllm.server.dialects.responses import items
from localllm.server.dialects.responses.events import ResponseEvents, replay
from localllm.server.dialects.responses.items import ResponsesFields
from localllm.server.dialects.responses.store import (
    ConversationFields,
    ConversationNotFoundError,
    Conversations,
    ItemsFields,
    MetadataFields,
    PageFields,
    ResponseStore,
    listing,
    page,
)
from localllm.server.dialects.responses.toolbox import Toolbox
from localllm.server.dialects.route import COUNT, Route, event_number, mount, mount_prompt
from localllm.server.dialects.wire import EVENTS
from localllm.server.generation.collector import ReplyCollector
from localllm.server.generation.job import GenerationJob, PrefillProgress
from localllm.server.http.accounts import PerCaller
from localllm.server.http.asgi import ignored_header
from localllm.server.http.json_body import read_json
from localllm.server.http.kept_streams import StreamGoneError
from localllm.server.http.streaming import Outbox
from localllm.server.models.router import ServedModel
from localllm.server.serving import Server, TranslatedRequest


def routes(server: Server) -> APIRouter:
    router = APIRouter(tags=["OpenAI responses"])
    states = PerCaller(lambda: ResponseState(ResponseStore(), Conversations()))
    _mount_conversations(router, server, states)
    silence_s = server.settings.keepalive_s / 2
    create = Route(
        "/v1/responses",
        ResponsesFields,
        lambda fields, model: translate(fields, model, states.mine(), silence_s),
        EVENTS,
        "Answer a list of items, whole or as events",
        ("id", "output", "status"),
        aliases=("/responses",),
        hints=HINTS | items.HINTS,
    )
    mount(router, server, create)

    def input_tokens(prompt: str, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    mount_prompt(router, server, "/v1/responses/input_tokens", create, COUNT, input_tokens)

    _mount_stored(router, server, states)
    return router


def _mount_stored(router: APIRouter, server: Server, states: PerCaller[ResponseState]) -> None:
    @router.get("/v1/responses/{response_id}", response_model=None)
    async def get(response_id: str, request: Request) -> dict[str, Any] | Response:
        """A stored response; with `stream=true` the events of one that is kept, behind the number `starting_after`."""
        asked = request.query_params
        return (
            states.mine().responses.body(response_id)
            if asked.get("stream", "false").lower() in ("false", "0")
            else _joined(server, response_id, asked)
        )

    @router.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> dict[str, Any]:
        """Forget a stored response."""
        states.mine().responses.drop(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.get("/v1/responses/{response_id}/input_items")
    async def list_input(response_id: str, request: Request) -> dict[str, Any]:
        """The items a stored response answers, the newest first unless asked otherwise."""
        wanted, _ = read(PageFields, request.query_params)
        return page(states.mine().responses.sent(response_id), wanted)

    @router.post("/v1/responses/compact", response_model=None, include_in_schema=False)
    async def compact() -> dict[str, Any]:
        raise UnsupportedError(
            "responses.compact is not supported: a conversation is shortened by its oldest turns, not rewritten",
            hint="send the whole input with truncation auto",
        )

    @router.post("/v1/responses/{response_id}/cancel", response_model=None)
    async def cancel(response_id: str) -> dict[str, Any]:
        """Refused: a stored response has ended, and a running one is cancelled by disconnecting."""
        states.mine().responses.body(response_id)
        raise UnsupportedError(
            "only a background response can be cancelled, and there are none here",
            hint="close the connection: generation ends at once",
            param="response_id",
        )


def _joined(server: Server, response_id: str, asked: Mapping[str, str]) -> Response:
    """The events of a kept stream, from where the client has them."""
    stream = server.kept.find(response_id)
    if stream is None:
        raise StreamGoneError(f"no stream of {response_id[:80]!r} is kept here", param="response_id")
    return stream.answer(event_number(asked.get("starting_after"), "starting_after"))


def _mount_conversations(router: APIRouter, server: Server, states: PerCaller[ResponseState]) -> None:
    one = "/v1/conversations/{conversation_id}"

    @router.post("/v1/conversations", response_model=None, openapi_extra=body_of(ConversationFields, "id"))
    async def create(request: Request) -> JSONResponse:
        """Begin a conversation that the server keeps."""
        fields, ignored = read(ConversationFields, await read_json(request, server.settings))
        return JSONResponse(states.mine().conversations.create(fields), headers=ignored_header(ignored))

    @router.get(one)
    async def get(conversation_id: str) -> dict[str, Any]:
        """A conversation's object."""
        return states.mine().conversations.body(conversation_id)

    @router.post(one, response_model=None, openapi_extra=body_of(MetadataFields, "id"))
    async def update(conversation_id: str, request: Request) -> JSONResponse:
        """Give a conversation other metadata."""
        fields, ignored = read(MetadataFields, await read_json(request, server.settings))
        body = states.mine().conversations.body(conversation_id)
        body["metadata"] = fields.metadata
        return JSONResponse(body, headers=ignored_header(ignored))

    @router.delete(one)
    async def delete(conversation_id: str) -> dict[str, Any]:
        """Forget a conversation."""
        states.mine().conversations.drop(conversation_id)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    @router.get(one + "/items")
    async def list_items(conversation_id: str, request: Request) -> dict[str, Any]:
        """A conversation's items, the newest first unless asked otherwise."""
        wanted, _ = read(PageFields, request.query_params)
        return page(states.mine().conversations.items(conversation_id), wanted)

    @router.post(one + "/items", response_model=None, openapi_extra=body_of(ItemsFields, "data"))
    async def add_items(conversation_id: str, request: Request) -> JSONResponse:
        """Put items at a conversation's end."""
        fields, ignored = read(ItemsFields, await read_json(request, server.settings))
        return JSONResponse(
            listing(states.mine().conversations.add(conversation_id, fields.items)), headers=ignored_header(ignored)
        )

    @router.get(one + "/items/{item_id}")
    async def get_item(conversation_id: str, item_id: str) -> dict[str, Any]:
        """One item of a conversation."""
        return states.mine().conversations.item(conversation_id, item_id)

    @router.delete(one + "/items/{item_id}")
    async def delete_item(conversation_id: str, item_id: str) -> dict[str, Any]:
        """Take an item out of a conversation."""
        return states.mine().conversations.drop_item(conversation_id, item_id)


class ResponseState(NamedTuple):
    """One caller's stored responses and conversations."""

    responses: ResponseStore
    conversations: Conversations


def translate(fields: ResponsesFields, model: ServedModel, state: ResponseState, silence_s: float) -> TranslatedRequest:
    """A Responses request, answered as a response object or its events, and stored."""
    before, sent = items.input_items(fields, state.responses, state.conversations)
    toolbox = Toolbox.of(fields.tools or [])
    effort = fields.reasoning.level if fields.reasoning else None
    chat, skipped = items.chat_request(fields, model.sampling_for(effort), [*before, *sent], toolbox)

    def keep(body: dict[str, Any]) -> None:
        if fields.store is not False:
            state.responses.put(body, before, sent)
        if fields.conversation_id is not None:
            with suppress(ConversationNotFoundError):  # it was evicted meanwhile
                state.conversations.add(fields.conversation_id, [*sent, *body["output"]])

    response = ResponseEvents(fields, model.name, toolbox, keep, silence_s)

    def whole(collected: ReplyCollector, job: GenerationJob) -> dict[str, Any]:
        return replay(collected, response)

    def writer(outbox: Outbox, job: GenerationJob, progress: PrefillProgress) -> ResponseEvents:
        return response.into(outbox, job.compacted)

    return TranslatedRequest(
        chat,
        whole,
        writer,
        tuple(dict.fromkeys(skipped)),
        frame_error=response.frame_error,
        keepalive=response.keepalive,
        stream_id=response.body["id"],
    )
