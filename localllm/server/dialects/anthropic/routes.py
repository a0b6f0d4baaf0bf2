"""Routes of Anthropic's API, and its answers: stream events, the message object, errors."""

from __future__ import annotations

import json
from typing import Any

from localllm.engine.messages import Timings, TokenLogprob
from localllm.errors import LocalLLMError
from localllm.server.dialects.anthropic import messages
from localllm.server.dialects.anthropic.messages import MessagesFields
from localllm.server.dialects.paths import Paths
from localllm.server.dialects.route import COUNT, Route, mount, mount_prompt
from localllm.server.dialects.wire import EVENT_STREAM, arguments_object, quote
from localllm.server.generation.job import (
    Outcome,
    PrefillProgress,
    Reply,
    ReplyUsage,
    ReplyWriter,
)
from localllm.server.http.asgi import new_id
from localllm.server.http.errors import anthropic_envelope
from localllm.server.http.streaming import Outbox
from localllm.server.models.router import ServedModel
from localllm.server.serving import Dialect, Server, TranslatedRequest

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "repetition": "max_tokens",
}


class MessageEvents(ReplyWriter):
    """Writes Anthropic's events. `message_start` waits for the first content, when the prompt's
    size is known."""

    def __init__(self, outbox: Outbox, model: ServedModel, progress: PrefillProgress) -> None:
        self._outbox, self._model, self._progress = outbox, model, progress
        self._block = -1
        self._kind = ""
        self._begun = False

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        if not text:
            return
        self._open("text", '{"type":"text","text":""}')
        self._delta(f'{{"type":"text_delta","text":{quote(text)}}}')

    def reasoning(self, choice: int, text: str) -> None:
        self._open("thinking", '{"type":"thinking","thinking":"","signature":""}')
        self._delta(f'{{"type":"thinking_delta","thinking":{quote(text)}}}')

    def call_start(self, choice: int, index: int, name: str) -> None:
        body = f'{{"type":"tool_use","id":"{new_id("toolu_")}","name":{quote(name)},"input":{{}}}}'
        self._open(f"call{index}", body)

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        self._delta(f'{{"type":"input_json_delta","partial_json":{quote(text)}}}')

    def finish(self, choice: int, outcome: Outcome) -> None:
        self._begin()
        self._close()
        self._outcome = outcome

    def end(self, usage: ReplyUsage, timings: Timings) -> None:
        reason, sequence = stop_reason(self._outcome, self._model.served_n_ctx)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        self._send("message_delta", json.dumps({"delta": delta, "usage": usage_body(usage)})[1:-1])
        self._send("message_stop", "")

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        counted = ReplyUsage(
            prompt_tokens=self._progress.total, cached_tokens=self._progress.cached
        )
        message: dict[str, Any] = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": self._model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_body(counted),
        }
        self._send("message_start", f'"message":{json.dumps(message)}')

    def _open(self, kind: str, body: str) -> None:
        if kind == self._kind:
            return
        self._begin()
        self._close()
        self._block += 1
        self._kind = kind
        self._send("content_block_start", f'"index":{self._block},"content_block":{body}')

    def _delta(self, delta: str) -> None:
        self._send("content_block_delta", f'"index":{self._block},"delta":{delta}')

    def _close(self) -> None:
        if self._kind == "thinking":
            # Clients send the signature back with the thinking; it is not checked.
            self._delta('{"type":"signature_delta","signature":"localllm"}')
        if self._kind:
            self._send("content_block_stop", f'"index":{self._block}')
        self._kind = ""

    def _send(self, event: str, fields: str) -> None:
        more = f",{fields}" if fields else ""
        self._outbox.write(f'event: {event}\ndata: {{"type":"{event}"{more}}}\n\n'.encode())


def ping(progress: PrefillProgress) -> bytes:
    """Anthropic's keep-alive, with the progress as a comment."""
    return f': {progress}\nevent: ping\ndata: {{"type": "ping"}}\n\n'.encode()


def frame_error(error: LocalLLMError) -> bytes:
    return b"event: error\ndata: " + json.dumps(anthropic_envelope(error)).encode() + b"\n\n"


def message(reply: Reply, model: ServedModel) -> dict[str, Any]:
    choice = reply.choices[0]
    content: list[dict[str, Any]] = []
    if choice.reasoning:
        content.append({"type": "thinking", "thinking": choice.reasoning, "signature": "localllm"})
    if choice.text:
        content.append({"type": "text", "text": choice.text})
    for call in choice.calls:
        content.append(
            {
                "type": "tool_use",
                "id": new_id("toolu_"),
                "name": call.name,
                "input": arguments_object(call.arguments),
            }
        )
    reason, sequence = stop_reason(choice.outcome, model.served_n_ctx)
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": model.name,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage_body(reply.usage),
    }


def stop_reason(outcome: Outcome, n_ctx: int | None) -> tuple[str, str | None]:
    """Anthropic's stop_reason and stop_sequence. A full window has a name of its own: a higher
    limit would not help."""
    if outcome.stop is not None and outcome.reason == "stop":
        return "stop_sequence", outcome.stop
    used = outcome.usage.prompt_tokens + outcome.usage.completion_tokens
    if outcome.reason == "length" and n_ctx is not None and used >= n_ctx:
        return "model_context_window_exceeded", None
    return _STOP_REASONS[outcome.reason], None


def usage_body(usage: ReplyUsage) -> dict[str, Any]:
    """Anthropic counts cached tokens apart from the fresh ones."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


_ANTHROPIC = Dialect(EVENT_STREAM, frame_error, ping)


def translate(fields: MessagesFields, model: ServedModel) -> TranslatedRequest:
    """A chat, answered as a message or its events."""
    chat, skipped = messages.chat_request(fields, model.sampling_for(fields.effort()))

    return TranslatedRequest(
        chat,
        lambda reply, job: message(reply, model),
        lambda outbox, job, progress: MessageEvents(outbox, model, progress),
        tuple(skipped),
    )


MESSAGES = Route(
    "/v1/messages",
    MessagesFields,
    translate,
    _ANTHROPIC,
    "Answer a conversation, whole or as events",
    ("content", "usage"),
)


def routes(server: Server) -> Paths:
    paths = Paths("Anthropic")
    mount(paths, server, MESSAGES)
    mount_prompt(
        paths,
        server,
        "/v1/messages/count_tokens",
        MESSAGES,
        COUNT,
        lambda _, n: {"input_tokens": n},
    )
    return paths
