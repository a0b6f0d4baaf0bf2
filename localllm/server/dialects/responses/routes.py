"""Routes of OpenAI's Responses API."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.conversation.messages import normalise
from localllm.errors import UnsupportedError
from localllm.server.dialects.fields import first_limit
from localllm.server.dialects.known import read
from localllm.server.dialects.paths import Paths
from localllm.server.dialects.responses import items
from localllm.server.dialects.responses.events import ResponseEvents, replay
from localllm.server.dialects.route import COUNT, Route, event_number, mount, mount_prompt
from localllm.server.dialects.toolbox import Toolbox
from localllm.server.dialects.wire import EVENTS, PageFields, page
from localllm.server.generation.chat import ChatRequest
from localllm.server.generation.job import GenerationJob, PrefillProgress, Reply, ReplyWriter
from localllm.server.http.accounts import PerCaller
from localllm.server.http.streaming import Outbox, StreamGoneError
from localllm.server.models.router import ServedModel
from localllm.server.serving import Server, TranslatedRequest


def routes(server: Server) -> Paths:
    paths = Paths("OpenAI responses")
    stores = PerCaller(items.ResponseStore)
    silence_s = server.settings.keepalive_s / 2

    def translated(fields: items.ResponsesFields, model: ServedModel) -> TranslatedRequest:
        return translate(fields, model, stores.current(), silence_s)

    create = Route(
        "/v1/responses",
        items.ResponsesFields,
        translated,
        EVENTS,
        "Answer a list of items, whole or as events",
        ("id", "output", "status"),
        aliases=("/responses",),
    )
    mount(paths, server, create)

    def input_tokens(prompt: str, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    mount_prompt(paths, server, "/v1/responses/input_tokens", create, COUNT, input_tokens)

    _mount_stored(paths, server, stores)
    return paths


def _mount_stored(paths: Paths, server: Server, stores: PerCaller[items.ResponseStore]) -> None:
    @paths.answers("GET", "/v1/responses/{response_id}")
    async def get(request: Request) -> dict[str, Any] | Response:
        """A stored response. With `stream=true`, the events of a kept stream after event number
        `starting_after`."""
        response_id = request.path_params["response_id"]
        asked = request.query_params
        if asked.get("stream", "false").lower() in ("false", "0"):
            return stores.current().get(response_id).body
        stream = server.kept.find(response_id)
        if stream is None:
            raise StreamGoneError(
                f"no stream of {response_id[:80]!r} is kept here", param="response_id"
            )
        return stream.answer(event_number(asked.get("starting_after"), "starting_after"))

    @paths.answers("DELETE", "/v1/responses/{response_id}")
    async def delete(request: Request) -> dict[str, Any]:
        """Delete a stored response."""
        response_id = request.path_params["response_id"]
        stores.current().drop(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @paths.answers("GET", "/v1/responses/{response_id}/input_items")
    async def list_input(request: Request) -> dict[str, Any]:
        """The items that a stored response answers, newest first by default."""
        wanted, _ = read(PageFields, request.query_params)
        given = stores.current().get(request.path_params["response_id"]).given
        ordered = given if wanted.order == "asc" else given[::-1]
        return {"object": "list", **page(ordered, wanted)}

    @paths.answers("POST", "/v1/responses/compact", about="")
    async def compact(request: Request) -> dict[str, Any]:
        raise UnsupportedError(
            "responses.compact is not supported: "
            "a conversation is shortened by its oldest turns, not rewritten",
            hint="send the whole input with truncation auto",
        )

    @paths.answers("POST", "/v1/responses/{response_id}/cancel")
    async def cancel(request: Request) -> dict[str, Any]:
        """Always refused. A stored response has ended, and a running one is cancelled by
        disconnecting."""
        stores.current().get(request.path_params["response_id"])
        raise UnsupportedError(
            "only a background response can be cancelled, and there are none here",
            hint="close the connection: generation ends at once",
            param="response_id",
        )


def translate(
    fields: items.ResponsesFields, model: ServedModel, store: items.ResponseStore, silence_s: float
) -> TranslatedRequest:
    """Translate a request of the Responses API. The reply is a response object, or its events, and
    is stored."""
    given = items.input_items(fields, store)
    toolbox = Toolbox.of(fields.tools)
    skipped = list(toolbox.skipped)
    messages = items.messages_of(given, skipped)
    if fields.instructions:
        messages.insert(0, {"role": "system", "content": fields.instructions})
    if not any(m["role"] != "system" for m in messages):
        messages.append({"role": "user", "content": ""})  # Codex probes with an empty input
    options = fields.response_options(
        toolbox,
        fields.tool_choice,
        fields.constraint((fields.text or {}).get("format")),
        parallel=fields.parallel_tool_calls is not False,
    )
    generation = fields.generation(
        model.sampling_for(options.effort),
        first_limit(fields.max_output_tokens),
        logprobs=fields.alternatives(),
        thinking_tokens=fields.thinking_tokens(),
    )
    shortens = fields.truncation == "auto"
    chat = ChatRequest(normalise(messages, skipped), generation, options, compaction=shortens)
    keep = partial(store.put, items=given)
    response = ResponseEvents(fields, model.name, toolbox, generation, keep, silence_s)

    def body(reply: Reply, job: GenerationJob) -> dict[str, Any]:
        return replay(reply, response)

    def writer(outbox: Outbox, job: GenerationJob, progress: PrefillProgress) -> ReplyWriter:
        return response.into(outbox, job.compacted)

    return TranslatedRequest(
        chat,
        body,
        writer,
        tuple(dict.fromkeys(skipped)),
        frame_error=response.frame_error,
        keepalive=response.keepalive,
        stream_id=response.body["id"],
    )
