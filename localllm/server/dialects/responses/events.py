"""Writes answers in the format of the Responses API: events and the response object."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.engine.messages import Generation, TokenLogprob
from localllm.errors import LocalLLMError
from localllm.server.dialects.responses.items import ResponsesFields
from localllm.server.dialects.toolbox import CustomInputReader, Toolbox
from localllm.server.dialects.wire import LiveTelemetry, comment, logprob_entry, quote
from localllm.server.generation.job import (
    CUT,
    PrefillProgress,
    Reply,
    ReplyWriter,
)
from localllm.server.http.asgi import new_id
from localllm.server.http.streaming import Outbox


@dataclass(frozen=True, slots=True)
class _Kind:
    """How items of one kind are written.

    `id_head`: beginning of the item's id.
    `field`: the field that is streamed. `event`: name of the events about it. `done`: fields of its
    last event.
    `defaults`: fields of an item at its start.
    `part_event`, `part_type`: event name and type of the item's part, for kinds that have a
    part."""

    id_head: str
    field: str
    event: str
    done: tuple[str, ...]
    defaults: Mapping[str, Any]
    part_event: str = ""
    part_type: str = ""


_MESSAGE = _Kind(
    "msg_",
    "content",
    "response.output_text",
    ("text", "logprobs"),
    {"role": "assistant", "content": []},
    "response.content_part",
    "output_text",
)
_REASONING = _Kind(
    "rs_",
    "content",
    "response.reasoning_text",
    ("text",),
    {"summary": [], "content": []},
    "response.content_part",
    "reasoning_text",
)
_SUMMARY = _Kind(
    "rs_",
    "summary",
    "response.reasoning_summary_text",
    ("text",),
    {"summary": [], "content": []},
    "response.reasoning_summary_part",
    "summary_text",
)
_FUNCTION_CALL = _Kind(
    "fc_",
    "arguments",
    "response.function_call_arguments",
    ("arguments", "name"),
    {"arguments": ""},
)
_CUSTOM_CALL = _Kind("ctc_", "input", "response.custom_tool_call_input", ("input",), {"input": ""})
# Fields of OpenAI's response object that are null at its start. Some are set later, the others stay
# null.
_NOTHING = dict.fromkeys(
    (
        "access_programs", "completed_at", "conversation", "error", "image",
        "incomplete_details", "input_transformations", "moderation", "prompt",
        "prompt_cache_diagnostics", "prompt_cache_options", "tool_usage", "usage",
    )
)  # fmt: skip
_SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
# Fields of the request that are repeated in the response object.
_ECHOED = (
    "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id",
    "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user",
)  # fmt: skip


def _new_body(fields: ResponsesFields, model: str, used: Generation) -> dict[str, Any]:
    """Return the response object at its start."""
    body: dict[str, Any] = {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "model": model,
        "output": [],
        **_NOTHING,
    }
    for name in _ECHOED:
        body[name] = getattr(fields, name, None)
    body["parallel_tool_calls"] = fields.parallel_tool_calls is not False
    body["reasoning"] = {"effort": fields.effort(), "summary": fields.summarises()}
    body["service_tier"] = fields.service_tier
    if fields.service_tier in (None, "auto"):
        body["service_tier"] = "default"
    body["store"] = fields.store is not False
    body["text"] = {"format": {"type": "text"}, "verbosity": "medium", **(fields.text or {})}
    body["tool_choice"] = fields.tool_choice or "auto"
    body["tools"] = fields.tools or []
    body["top_logprobs"] = used.logprobs or 0
    for name in _SAMPLED:
        body[name] = getattr(used.sampling, name)
    body["truncation"] = fields.truncation or "disabled"
    body["metadata"] = getattr(fields, "metadata", None) or {}
    return body


class ResponseEvents(ReplyWriter):
    """Builds the response object, and writes its events after `into` has set an outbox.

    `keep` stores the finished body. A stream has an event at least every `silence_s` seconds."""

    def __init__(
        self,
        fields: ResponsesFields,
        model: str,
        toolbox: Toolbox,
        used: Generation,
        keep: Callable[[dict[str, Any]], None],
        silence_s: float,
    ) -> None:
        self._outbox = Outbox()  # never read if the answer is not streamed
        self._notes: Sequence[str] = ()
        self._telemetry: LiveTelemetry | None = None
        self._toolbox = toolbox
        self._keep = keep
        self._silence_s = silence_s
        self._sequence = 0  # number of the next event
        self._last_event_s = time.monotonic()
        self._text_of: CustomInputReader | None = None
        self._open: dict[str, Any] | None = None
        self._kind = _MESSAGE  # kind of the open item
        self._thought = _SUMMARY if fields.summarises() else _REASONING
        self.body = _new_body(fields, model, used)

    def write_to(
        self, outbox: Outbox, notes: Sequence[str], telemetry: LiveTelemetry
    ) -> ResponseEvents:
        """Set the outbox for the events and return self. `notes`: comments at the beginning.
        `telemetry`: the client's wishes for progress."""
        self._outbox = outbox
        self._telemetry = telemetry
        self._notes = notes
        return self

    def start(self) -> None:
        for note in self._notes:
            self._outbox.write(comment(note))
        if not self._sequence:
            self._outbox.write(self._in_progress())

    def keepalive(self, progress: PrefillProgress) -> bytes:
        """Return the progress as a comment, and from time to time an event. Codex disconnects from
        a stream without events."""
        if time.monotonic() - self._last_event_s < self._silence_s:
            return comment(progress)
        return comment(progress) + self._in_progress()

    def _in_progress(self) -> bytes:
        created = b""
        if not self._sequence:
            created = self._frame("response.created", {"response": self.body})
        return created + self._frame("response.in_progress", {"response": self.body})

    def prefill(self) -> None:
        if self._telemetry is not None:
            self._send_progress(self._telemetry.prefill_reports())

    def _send_progress(self, reports: Sequence[Mapping[str, int]]) -> None:
        for report in reports:
            fields = {"response": self.body, "prompt_progress": report}
            self._event("response.in_progress", fields)

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        if not text and not logprobs:
            return
        self._open_item("message", _MESSAGE)
        if not logprobs:
            self._delta(text, ',"logprobs":[]')
            return
        entries = [logprob_entry(p) for p in logprobs]
        self._logprobs += entries
        self._delta(text, f',"logprobs":{json.dumps(entries)}')

    def reasoning(self, choice: int, text: str) -> None:
        self._open_item("reasoning", self._thought)
        self._delta(text)

    def call_start(self, choice: int, index: int, name: str) -> None:
        self._close_item()
        called = self._toolbox.called(name)
        fields = {"call_id": new_id("call_"), "name": called.name}
        if called.namespace is not None:
            fields["namespace"] = called.namespace
        if called.custom:
            self._text_of = CustomInputReader()
            self._open_item("custom_tool_call", _CUSTOM_CALL, fields)
        else:
            self._text_of = None
            self._open_item("function_call", _FUNCTION_CALL, fields)

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        if self._text_of is not None:
            text = self._text_of.feed(text)
        if text:
            self._delta(text)

    def end(self, reply: Reply) -> None:
        outcome = reply.choices[0].outcome
        usage = reply.usage
        cut = outcome.reason in CUT
        # If the answer was cut after a complete call, the status of that call is "completed".
        called = self._kind in (_FUNCTION_CALL, _CUSTOM_CALL)
        incomplete = outcome.incomplete_call or (cut and not called)
        self._close_item("incomplete" if incomplete else "completed")
        if cut:
            self.body["status"] = "incomplete"
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.body["status"] = "completed"
            self.body["completed_at"] = int(time.time())
        self.body["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        if self.body["store"]:
            self._keep(self.body)
        self._event(f"response.{self.body['status']}", {"response": self.body})

    def frame_error(self, error: LocalLLMError) -> bytes:
        """Return `response.failed`, the last event of a failed stream."""
        if self._open is not None:
            self.body["output"].append({**self._open, "status": "incomplete"})
        self.body["status"] = "failed"
        self.body["error"] = {"code": error.code, "message": error.message}
        return self._frame("response.failed", {"response": self.body})

    def _open_item(self, item_type: str, kind: _Kind, fields: Mapping[str, Any] = {}) -> None:
        """Begin an item of that kind with `fields`, unless the open item has the same kind."""
        if self._open is not None and self._kind is kind:
            return
        self._close_item()
        if self._telemetry is not None:
            self._send_progress(self._telemetry.last_reports())
        self._kind = kind
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        item_id = new_id(kind.id_head)
        index = len(self.body["output"])
        item = {"type": item_type, "id": item_id, **kind.defaults, **fields}
        self._open = {**item, "status": "in_progress"}
        self._event("response.output_item.added", {"output_index": index, "item": self._open})
        self._place = {"item_id": item_id, "output_index": index}
        if kind.part_event:
            self._place[f"{kind.field}_index"] = 0
            self._event(f"{kind.part_event}.added", {**self._place, "part": self._part("")})
        event = f"{kind.event}.delta"
        head = json.dumps({"type": event, **self._place})
        self._delta_head = f"event: {event}\ndata: {head[:-1]}"

    def _part(self, text: str) -> dict[str, Any]:
        """Return the part of the open item. A message's part contains the log-probabilities so
        far."""
        part: dict[str, Any] = {"type": self._kind.part_type, "text": text}
        if self._kind is _MESSAGE:
            part |= {"annotations": [], "logprobs": self._logprobs}
        return part

    def _close_item(self, status: str = "completed") -> None:
        item = self._open
        if item is None:
            return
        kind = self._kind
        text = "".join(self._pieces)
        item["status"] = status
        if kind.part_event:
            part = self._part(text)
            item[kind.field] = [part]
            self._done(part)
            self._event(f"{kind.part_event}.done", {**self._place, "part": part})
        else:
            item[kind.field] = text
            self._done(item)
        ended = {"output_index": len(self.body["output"]), "item": item}
        self._event("response.output_item.done", ended)
        self.body["output"].append(item)
        self._open = None

    def _done(self, written: Mapping[str, Any]) -> None:
        """Write the last event about the streamed field, with its value from `written`."""
        values = {name: written[name] for name in self._kind.done}
        self._event(f"{self._kind.event}.done", {**self._place, **values})

    def _delta(self, text: str, more: str = "") -> None:
        if self._telemetry is not None:
            timings = self._telemetry.timings()
            if timings is not None:
                more += f',"timings":{json.dumps(timings)}'
        self._pieces.append(text)
        self._last_event_s = time.monotonic()
        self._outbox.write(
            f'{self._delta_head},"sequence_number":{self._sequence}{more},"delta":{quote(text)}}}\n\n'.encode()
        )
        self._sequence += 1

    def _event(self, event: str, fields: Mapping[str, Any]) -> None:
        self._outbox.write(self._frame(event, fields))

    def _frame(self, event: str, fields: Mapping[str, Any]) -> bytes:
        self._last_event_s = time.monotonic()
        data = json.dumps({"type": event, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return f"event: {event}\ndata: {data}\n\n".encode()


def replay(reply: Reply, response: ResponseEvents) -> dict[str, Any]:
    """Return the response object of a complete reply. The writer of streams builds it."""
    choice = reply.choices[0]
    if choice.reasoning:
        response.reasoning(0, choice.reasoning)
    if choice.text:
        response.text(0, choice.text, tuple(choice.logprobs))
    for index, call in enumerate(choice.calls):
        response.call_start(0, index, call.name)
        response.call_arguments(0, index, call.arguments)
    response.end(reply)
    return response.body
