"""Routes of Anthropic's API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from localllm.server.dialects.anthropic import events, messages
from localllm.server.dialects.anthropic.messages import MessagesFields
from localllm.server.dialects.fields import HINTS
from localllm.server.dialects.route import COUNT, Route, mount, mount_prompt
from localllm.server.dialects.wire import EVENT_STREAM
from localllm.server.generation.collector import ReplyCollector
from localllm.server.generation.job import GenerationJob, PrefillProgress
from localllm.server.http.streaming import Outbox
from localllm.server.models.router import ServedModel
from localllm.server.serving import Dialect, Server, TranslatedRequest

_ANTHROPIC = Dialect(EVENT_STREAM, events.frame_error, events.ping, events.error_body)


def translate(fields: MessagesFields, model: ServedModel) -> TranslatedRequest:
    """A chat, answered as a message or its events."""
    off = (fields.thinking or {}).get("type") == "disabled"
    chat, skipped = messages.chat_request(fields, model.sampling_for("none" if off else None))

    def whole(collected: ReplyCollector, job: GenerationJob) -> dict[str, Any]:
        return events.whole(collected, model)

    def writer(outbox: Outbox, job: GenerationJob, progress: PrefillProgress) -> events.MessageEvents:
        return events.MessageEvents(outbox, model, progress)

    return TranslatedRequest(chat, whole, writer, tuple(skipped))


MESSAGES = Route(
    "/v1/messages",
    MessagesFields,
    translate,
    _ANTHROPIC,
    "Answer a conversation, whole or as events",
    ("content", "usage"),
    hints=HINTS | messages.HINTS,
)


def routes(server: Server) -> APIRouter:
    router = APIRouter(tags=["Anthropic"])
    mount(router, server, MESSAGES)
    mount_prompt(router, server, "/v1/messages/count_tokens", MESSAGES, COUNT, lambda _, n: {"input_tokens": n})
    return router
