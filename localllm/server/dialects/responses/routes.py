"""Routes of OpenAI's Responses API."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from localllm.conversation.messages import normalise
from localllm.errors import RequestError, UnsupportedError
from localllm.server.dialects.fields import first_limit
from localllm.server.dialects.known import read
from localllm.server.dialects.paths import Paths
from localllm.server.dialects.responses import items
from localllm.server.dialects.responses.compaction import (
    Compaction,
    CompactionEvents,
    compacted_body,
    expanded,
    is_triggered,
)
from localllm.server.dialects.responses.events import ResponseEvents, replay
from localllm.server.dialects.route import COUNT, Route, event_number, mount, mount_prompt
from localllm.server.dialects.toolbox import Toolbox
from localllm.server.dialects.wire import EVENTS, PageFields, page
from localllm.server.generation.chat import ChatRequest
from localllm.server.generation.job import GenerationJob, PrefillProgress, Reply, ReplyWriter
from localllm.server.generation.summarising import Receipt
from localllm.server.http.accounts import PerCaller
from localllm.server.http.streaming import Outbox, StreamGoneError
from localllm.server.models.router import ServedModel
from localllm.server.serving import COMPACTED, JobFactory, Server, TranslatedRequest

Events = TypeVar("Events", bound=ResponseEvents)


def routes(server: Server) -> Paths:
    paths = Paths("OpenAI responses")
    stores = PerCaller(items.ResponseStore)
    silence_s = server.settings.keepalive_s / 2

    def translated(fields: items.ResponsesFields, model: ServedModel) -> TranslatedRequest:
        asked = ResponsesRequest(server, fields, model, stores.current(), silence_s)
        return asked.compaction() if asked.is_triggered else asked.answer()

    def compacted(fields: items.ResponsesFields, model: ServedModel) -> TranslatedRequest:
        compaction = ResponsesRequest(
            server, fields, model, stores.current(), silence_s
        ).compaction()

        def body(reply: Reply, job: GenerationJob) -> dict[str, Any]:
            return compacted_body(compaction.body(reply, job))

        return replace(compaction, body=body)

    create = Route(
        "/v1/responses",
        items.ResponsesFields,
        translated,
        EVENTS,
        "Answer a list of items, as one object or as events",
        ("id", "output", "status"),
        aliases=("/responses",),
    )
    compact = Route(
        "/v1/responses/compact",
        items.ResponsesFields,
        compacted,
        EVENTS,
        "Summarise a conversation as one `compaction` item, which later requests send in its place",
        ("id", "object", "created_at", "output", "usage"),
        aliases=("/responses/compact",),
    )
    mount(paths, server, create, compact)

    def input_tokens(job: GenerationJob, tokens: int) -> dict[str, Any]:
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
        stream = server.kept_streams.find(response_id)
        if stream is None:
            raise StreamGoneError(
                f"this server does not store the stream of {response_id[:80]!r}",
                param="response_id",
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
        given = stores.current().get(request.path_params["response_id"]).input_items
        ordered = given if wanted.order == "asc" else given[::-1]
        return {"object": "list", **page(ordered, wanted)}

    @paths.answers("POST", "/v1/responses/{response_id}/cancel")
    async def cancel(request: Request) -> dict[str, Any]:
        """Always refused. A stored response has ended, and a running one is cancelled by
        disconnecting."""
        stores.current().get(request.path_params["response_id"])
        raise UnsupportedError(
            "only background responses can be cancelled, and this server does not support them",
            hint="close the connection: generation ends at once",
            param="response_id",
        )


class ResponsesRequest:
    """A request of the Responses API. The reply is a response object, or its events, and is stored."""

    def __init__(
        self,
        server: Server,
        fields: items.ResponsesFields,
        model: ServedModel,
        store: items.ResponseStore,
        silence_s: float,
    ) -> None:
        given = items.input_items(fields, store)
        self._server = server
        self._fields = fields
        self._model = model
        self._silence_s = silence_s
        self._keep = partial(store.put, items=given)
        self._toolbox = Toolbox.of(fields.tools)
        self._conversation = expanded(given)
        self.is_triggered = is_triggered(given)
        skipped = [*self._toolbox.skipped, *fields.not_included()]
        self._messages = items.messages_of(self._conversation.items, skipped)
        if fields.instructions:
            self._messages.insert(0, {"role": "system", "content": fields.instructions})
        self._chat = self._chat_request(skipped)
        self._ignored = tuple(dict.fromkeys(skipped))

    def _has_turns(self) -> bool:
        return any(m["role"] != "system" for m in self._messages)

    def _chat_request(self, skipped: list[str]) -> ChatRequest:
        fields = self._fields
        messages = self._messages
        if not self._has_turns():
            # Codex probes with an empty input
            messages = [*messages, {"role": "user", "content": ""}]
        options = fields.response_options(
            self._toolbox,
            fields.tool_choice,
            fields.constraint((fields.text or {}).get("format")),
            parallel=fields.parallel_tool_calls is not False,
        )
        generation = fields.generation(
            self._model.sampling_for(options.effort),
            first_limit(fields.max_output_tokens),
            logprobs=fields.alternatives(),
            thinking_tokens=fields.thinking_tokens(),
        )
        shortens = fields.truncation == "auto"
        return ChatRequest(normalise(messages, skipped), generation, options, compaction=shortens)

    def answer(self) -> TranslatedRequest:
        """Return the request for an answer."""
        return self._translated(self._events(ResponseEvents), self._chat)

    def compaction(self) -> TranslatedRequest:
        """Return the request for a compaction. Raises RequestError if there is no conversation."""
        if not self._has_turns():
            raise RequestError("input has no messages: there is nothing to compact", param="input")
        events = self._events(CompactionEvents)
        receipt = Receipt()
        events.compaction = Compaction(
            self._server, self._model, self._chat, self._conversation, receipt
        )

        def headers(reply: Reply) -> dict[str, str]:
            return {COMPACTED: receipt.text(reply)}

        translated = self._translated(events, events.compaction.job)
        return replace(translated, receipt=headers)

    def _events(self, kind: type[Events]) -> Events:
        return kind(
            self._fields,
            self._model.name,
            self._toolbox,
            self._chat.generation,
            self._keep,
            self._silence_s,
        )

    def _translated(
        self, response: ResponseEvents, task: ChatRequest | JobFactory
    ) -> TranslatedRequest:
        def body(reply: Reply, job: GenerationJob) -> dict[str, Any]:
            return replay(reply, response)

        def writer(outbox: Outbox, job: GenerationJob, progress: PrefillProgress) -> ReplyWriter:
            return response.write_to(outbox, job.notes, self._fields.telemetry(progress))

        return TranslatedRequest(
            task,
            body,
            writer,
            self._ignored,
            frame_error=response.frame_error,
            keepalive=response.keepalive,
            stream_id=response.body["id"],
        )
