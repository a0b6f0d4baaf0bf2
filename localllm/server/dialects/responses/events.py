"""Writes an answer in the format of the Responses API: its events and the response object."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from localllm.engine.messages import Generation, Timings, TokenLogprob
from localllm.errors import LocalLLMError
from localllm.server.dialects.responses.items import ResponsesFields
from localllm.server.dialects.toolbox import CustomInputReader, Toolbox
from localllm.server.dialects.wire import comment, compacted_comment, logprob_entry, quote
from localllm.server.generation.job import (
    CUT,
    Outcome,
    PrefillProgress,
    Reply,
    ReplyUsage,
    ReplyWriter,
)
from localllm.server.http.asgi import new_id
from localllm.server.http.streaming import Outbox

# What an item consists of, by its type, and the field and the index that hold it; events are named
# after it. A summary's parts are called otherwise.
_PARTS = {
    "message": ("output_text", "content", "response.content_part"),
    "reasoning": ("reasoning_text", "content", "response.content_part"),
    "summary": ("reasoning_summary_text", "summary", "response.reasoning_summary_part"),
}
# Of OpenAI's response object, where nothing here is said of it.
_NOTHING = dict.fromkeys(
    (
        "access_programs", "completed_at", "conversation", "error", "image",
        "incomplete_details", "input_transformations", "moderation", "prompt",
        "prompt_cache_diagnostics", "prompt_cache_options", "tool_usage", "usage",
    )
)  # fmt: skip
_SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
# Of a call, by its type: how its id begins, the field that holds what it is called with, and what its
# events are named after.
_CALLS = {
    "function_call": ("fc_", "arguments", "response.function_call_arguments"),
    "custom_tool_call": ("ctc_", "input", "response.custom_tool_call_input"),
}


class ResponseEvents(ReplyWriter):
    """Builds the response object, and writes its events once `into` has set an outbox. `keep`
    stores the finished body. A stream has an event at least every `silence_s`."""

    def __init__(
        self,
        fields: ResponsesFields,
        model: str,
        toolbox: Toolbox,
        used: Generation,
        keep: Callable[[dict[str, Any]], None],
        silence_s: float,
    ) -> None:
        self._outbox = Outbox()  # of an answer that is not streamed nobody reads it
        self._compacted = ""
        self._toolbox, self._keep, self._silence_s = toolbox, keep, silence_s
        self._sequence = 0
        self._begun = False
        self._said_s = time.monotonic()
        self._text_of: CustomInputReader | None = None
        self._open: dict[str, Any] | None = None
        self._kind = ""  # of the open item: one of _PARTS, or a call
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        tier = fields.service_tier
        self._thought = "summary" if fields.summarises() else "reasoning"
        echoed = (
            "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id",
            "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user",
        )  # fmt: skip
        self.body: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "model": model,
            "output": [],
            **_NOTHING,
            **{name: getattr(fields, name, None) for name in echoed},
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "reasoning": {"effort": fields.effort(), "summary": fields.summarises()},
            "service_tier": "default" if tier in (None, "auto") else tier,
            "store": fields.store is not False,
            "text": {"format": {"type": "text"}, "verbosity": "medium", **(fields.text or {})},
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools or [],
            "top_logprobs": used.logprobs or 0,
            **{name: getattr(used.sampling, name) for name in _SAMPLED},
            "truncation": fields.truncation or "disabled",
            "metadata": getattr(fields, "metadata", None) or {},
        }

    def into(self, outbox: Outbox, compacted: str) -> ResponseEvents:
        """Write events into `outbox`; returns itself. `compacted`: what compaction left out."""
        self._outbox, self._compacted = outbox, compacted
        return self

    def start(self) -> None:
        if self._compacted:
            self._outbox.write(compacted_comment(self._compacted))
        if not self._begun:
            self._outbox.write(self._beginning())

    def keepalive(self, progress: PrefillProgress) -> bytes:
        """The progress as a comment, and from time to time an event: Codex gives up on a stream
        without events."""
        data = comment(progress)
        if time.monotonic() - self._said_s < self._silence_s:
            return data
        self._said_s = time.monotonic()
        return data + (
            self._frame("response.in_progress", {"response": self.body})
            if self._begun
            else self._beginning()
        )

    def _beginning(self) -> bytes:
        self._begun = True
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._frame(kind, {"response": self.body}) for kind in kinds)

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        if not text and not logprobs:
            return
        self._enter("message")
        data = "[]"
        if logprobs:
            entries = [logprob_entry(p) for p in logprobs]
            self._logprobs += entries
            data = json.dumps(entries)
        self._delta("response.output_text.delta", text, f',"content_index":0,"logprobs":{data}')

    def reasoning(self, choice: int, text: str) -> None:
        self._enter(self._thought)
        kind, field, _ = _PARTS[self._thought]
        self._delta(f"response.{kind}.delta", text, f',"{field}_index":0')

    def call_start(self, choice: int, index: int, name: str) -> None:
        self._leave()
        called = self._toolbox.called(name)
        self._text_of = CustomInputReader() if called.custom else None
        kind = "custom_tool_call" if called.custom else "function_call"
        prefix, content, _ = _CALLS[kind]
        item = {
            "type": kind,
            "id": new_id(prefix),
            "call_id": new_id("call_"),
            "name": called.name,
            content: "",
        }
        if called.namespace is not None:
            item["namespace"] = called.namespace
        self._begin({**item, "status": "in_progress"})

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        assert self._open is not None
        data = text if self._text_of is None else self._text_of.feed(text)
        if data:
            self._delta(f"{_CALLS[self._open['type']][2]}.delta", data, "")

    def finish(self, choice: int, outcome: Outcome) -> None:
        cut = outcome.reason in CUT
        # A call that is whole when the answer is cut has been said to its end.
        called = self._open is not None and self._kind not in _PARTS
        self._leave("incomplete" if outcome.half_call or (cut and not called) else "completed")
        if cut:
            self.body["status"] = "incomplete"
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.body |= {"status": "completed", "completed_at": int(time.time())}

    def end(self, usage: ReplyUsage, timings: Timings) -> None:
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
        self._keep(self.body)
        self._event(f"response.{self.body['status']}", {"response": self.body})

    def frame_error(self, error: LocalLLMError) -> bytes:
        """`response.failed`, the end of a failed stream."""
        if self._open is not None:
            self.body["output"].append({**self._open, "status": "incomplete"})
        self.body["status"] = "failed"
        self.body["error"] = {"code": error.code, "message": error.message}
        return self._frame("response.failed", {"response": self.body})

    def _enter(self, kind: str) -> None:
        """Be in an item of that kind, one of _PARTS."""
        if self._open is not None and self._kind == kind:
            return
        self._leave()
        if kind == "message":
            item = {"type": "message", "id": new_id("msg_"), "role": "assistant", "content": []}
        else:
            item = {"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": []}
        self._begin({**item, "status": "in_progress"}, kind)
        _, field, event = _PARTS[kind]
        self._event(
            f"{event}.added", {**self._place(), f"{field}_index": 0, "part": self._part("")}
        )

    def _part(self, text: str) -> dict[str, Any]:
        """The part of the open item, with the log-probabilities there are."""
        kind = "summary_text" if self._kind == "summary" else _PARTS[self._kind][0]
        part: dict[str, Any] = {"type": kind, "text": text}
        if self._kind == "message":
            part |= {"annotations": [], "logprobs": self._logprobs}
            self._logprobs = []
        return part

    def _begin(self, item: dict[str, Any], kind: str = "") -> None:
        self._open, self._kind, self._pieces = item, kind, []
        self._event(
            "response.output_item.added", {"output_index": len(self.body["output"]), "item": item}
        )

    def _leave(self, status: str = "completed") -> None:
        item = self._open
        if item is None:
            return
        text = "".join(self._pieces)
        place = self._place()
        item["status"] = status
        if item["type"] in _CALLS:
            _, field, event = _CALLS[item["type"]]
            item[field] = text
            named = {"name": item["name"]} if field == "arguments" else {}
            self._event(f"{event}.done", {**place, field: text, **named})
        else:
            kind, field, event = _PARTS[self._kind]
            part = self._part(text)
            item[field] = [part]
            at = {**place, f"{field}_index": 0}
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            self._event(f"response.{kind}.done", {**at, "text": text, **more})
            self._event(f"{event}.done", {**at, "part": part})
        self._event(
            "response.output_item.done", {"output_index": place["output_index"], "item": item}
        )
        self.body["output"].append(item)
        self._open = None

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.body["output"])}

    def _delta(self, event: str, text: str, more: str) -> None:
        self._pieces.append(text)
        assert self._open is not None
        self._said_s = time.monotonic()
        self._outbox.write(
            f'event: {event}\ndata: {{"type":"{event}","sequence_number":{self._sequence},'
            f'"item_id":"{self._open["id"]}","output_index":{len(self.body["output"])}{more},'
            f'"delta":{quote(text)}}}\n\n'.encode()
        )
        self._sequence += 1

    def _event(self, event: str, fields: Mapping[str, Any]) -> None:
        self._said_s = time.monotonic()
        self._outbox.write(self._frame(event, fields))

    def _frame(self, event: str, fields: Mapping[str, Any]) -> bytes:
        data = json.dumps({"type": event, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return f"event: {event}\ndata: {data}\n\n".encode()


def replay(reply: Reply, response: ResponseEvents) -> dict[str, Any]:
    """The response object of a whole reply: made by the stream's own writer."""
    choice = reply.choices[0]
    if choice.reasoning:
        response.reasoning(0, choice.reasoning)
    if choice.text:
        response.text(0, choice.text, tuple(choice.logprobs))
    for index, call in enumerate(choice.calls):
        response.call_start(0, index, call.name)
        response.call_arguments(0, index, call.arguments)
    response.finish(0, choice.outcome)
    response.end(reply.usage, reply.timings)
    return response.body
