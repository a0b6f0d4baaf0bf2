"""Routes of Anthropic's API and its output: stream events, the message object, errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from localllm.engine.messages import TokenLogprob
from localllm.errors import LocalLLMError
from localllm.server.dialects.anthropic import messages
from localllm.server.dialects.anthropic.context_management import applied_body, compaction_block
from localllm.server.dialects.paths import Paths
from localllm.server.dialects.route import COUNT, Route, mount, mount_prompt
from localllm.server.dialects.wire import EVENT_STREAM, arguments_object, quote
from localllm.server.generation.job import (
    GenerationJob,
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
    """Writes Anthropic's events. `message_start` is sent with the first content, when the prompt's
    length is known. `managed`: the message's field about context edits."""

    def __init__(
        self,
        outbox: Outbox,
        model: ServedModel,
        progress: PrefillProgress,
        job: GenerationJob,
        managed: Mapping[str, Any],
    ) -> None:
        self._outbox = outbox
        self._managed = managed
        self._model = model
        self._progress = progress
        self._job = job
        self._block = -1
        self._kind = ""  # kind of the open block

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

    def end(self, reply: Reply) -> None:
        self._begin()
        self._close()
        usage = usage_body(reply.usage) | _iterations(self._job, reply.usage, self._model)
        ended = {"delta": _end_of(reply, self._job, self._model), "usage": usage, **self._managed}
        self._send("message_delta", json.dumps(ended)[1:-1])
        self._send("message_stop", "")

    def _begin(self) -> None:
        if self._block >= 0:
            return
        size = ReplyUsage(self._progress.total, 0, self._progress.cached)
        self._send("message_start", f'"message":{json.dumps(_message(self._model, size))}')
        if self._job.summary is not None:
            self._block = 0
            self._compaction(compaction_block(self._job.summary))

    def _compaction(self, block: Mapping[str, Any]) -> None:
        """Send a block in one piece, as Anthropic does. Its fields are null at the start."""
        empty = dict.fromkeys(block) | {"type": block["type"]}
        self._send("content_block_start", f'"index":0,"content_block":{json.dumps(empty)}')
        self._delta(json.dumps({**block, "type": "compaction_delta"}))
        self._send("content_block_stop", '"index":0')

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
            # Clients send the signature back with the thinking. It is not checked.
            self._delta('{"type":"signature_delta","signature":"localllm"}')
        if self._kind:
            self._send("content_block_stop", f'"index":{self._block}')
        self._kind = ""

    def _send(self, event: str, fields: str) -> None:
        more = f",{fields}" if fields else ""
        self._outbox.write(f'event: {event}\ndata: {{"type":"{event}"{more}}}\n\n'.encode())


def ping(progress: PrefillProgress) -> bytes:
    """Return Anthropic's keep-alive event, with the progress as a comment."""
    return f': {progress}\nevent: ping\ndata: {{"type": "ping"}}\n\n'.encode()


def frame_error(error: LocalLLMError) -> bytes:
    return b"event: error\ndata: " + json.dumps(anthropic_envelope(error)).encode() + b"\n\n"


def message(reply: Reply, job: GenerationJob, model: ServedModel) -> dict[str, Any]:
    """Return a complete answer."""
    choice = reply.choices[0]
    content: list[dict[str, Any]] = []
    if job.summary is not None:
        content.append(compaction_block(job.summary))
    if choice.reasoning:
        content.append({"type": "thinking", "thinking": choice.reasoning, "signature": "localllm"})
    if choice.text:
        content.append({"type": "text", "text": choice.text})
    for call in choice.calls:
        body = {"name": call.name, "input": arguments_object(call.arguments)}
        content.append({"type": "tool_use", "id": new_id("toolu_"), **body})
    body = {**_message(model, reply.usage), "content": content, **_end_of(reply, job, model)}
    body["usage"] |= _iterations(job, reply.usage, model)
    return body


def _message(model: ServedModel, usage: ReplyUsage) -> dict[str, Any]:
    """Return the message object at its start."""
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": model.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_body(usage),
    }


def _end_of(reply: Reply, job: GenerationJob, model: ServedModel) -> dict[str, str | None]:
    """Return the stop reason and the stop sequence. A full context has its own reason, because a
    higher token limit would not help."""
    outcome = reply.choices[0].outcome
    n_ctx = model.served_n_ctx
    used = outcome.usage.prompt_tokens + outcome.usage.completion_tokens
    reason = _STOP_REASONS[outcome.reason]
    sequence = None
    if job.pauses:
        reason = "compaction"
    elif outcome.stop is not None and outcome.reason == "stop":
        reason = "stop_sequence"
        sequence = outcome.stop
    elif outcome.reason == "length" and n_ctx is not None and used >= n_ctx:
        reason = "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _iterations(job: GenerationJob, usage: ReplyUsage, model: ServedModel) -> dict[str, Any]:
    """Return the usage of the summary and of the answer apart, if there is a summary. Anthropic's
    totals leave the summary out."""
    if job.summary is None:
        return {}
    iterations = [{"type": "compaction", **usage_body(job.summary.usage)}]
    if not job.pauses:
        iterations.append({"type": "message", "model": model.name, **usage_body(usage)})
    return {"iterations": iterations}


def usage_body(usage: ReplyUsage) -> dict[str, Any]:
    """Return Anthropic's usage object. It counts cached tokens separately from new ones."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


_ANTHROPIC = Dialect(EVENT_STREAM, frame_error, ping)


def translate(fields: messages.MessagesFields, model: ServedModel) -> TranslatedRequest:
    """Translate a chat request. The reply is a message, or its events."""
    chat, skipped = messages.chat_request(fields, model)

    def managed(job: GenerationJob) -> dict[str, Any]:
        if fields.context_management is None:
            return {}
        return {"context_management": applied_body(job.applied)}

    def body(reply: Reply, job: GenerationJob) -> dict[str, Any]:
        return {**message(reply, job, model), **managed(job)}

    def writer(outbox: Outbox, job: GenerationJob, progress: PrefillProgress) -> ReplyWriter:
        return MessageEvents(outbox, model, progress, job, managed(job))

    return TranslatedRequest(chat, body, writer, tuple(skipped))


MESSAGES = Route(
    "/v1/messages",
    messages.MessagesFields,
    translate,
    _ANTHROPIC,
    "Answer a conversation, as one object or as events",
    ("content", "usage"),
)


def routes(server: Server) -> Paths:
    paths = Paths("Anthropic")
    mount(paths, server, MESSAGES)

    def count(job: GenerationJob, tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {"input_tokens": tokens}
        if job.original_tokens:
            body["context_management"] = {"original_input_tokens": job.original_tokens}
        return body

    mount_prompt(paths, server, "/v1/messages/count_tokens", MESSAGES, COUNT, count)
    return paths
