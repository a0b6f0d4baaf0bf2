"""Writes an answer in the format of the Responses API: its events and the response object."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from localllm.engine.messages import Generation, TokenLogprob
from localllm.errors import LocalLLMError
from localllm.server.dialects.responses.items import ResponsesFields
from localllm.server.dialects.toolbox import CustomInputReader, Toolbox
from localllm.server.dialects.wire import comment, logprob_entry, quote
from localllm.server.generation.job import (
    CUT,
    PrefillProgress,
    Reply,
    ReplyWriter,
)
from localllm.server.http.asgi import new_id
from localllm.server.http.streaming import Outbox

# By the kind of an item: how its id begins, the field that is written, what the events of that are
# named after and what the last one says; of one with a part also the part's events and its type;
# with what it begins.
_KINDS: Mapping[str, tuple[str, str, str, tuple[str, ...], str, str, Mapping[str, Any]]] = {
    "message": (
        "msg_", "content", "response.output_text", ("text", "logprobs"),
        "response.content_part", "output_text", {"role": "assistant", "content": []},
    ),
    "reasoning": (
        "rs_", "content", "response.reasoning_text", ("text",),
        "response.content_part", "reasoning_text", {"summary": [], "content": []},
    ),
    "summary": (
        "rs_", "summary", "response.reasoning_summary_text", ("text",),
        "response.reasoning_summary_part", "summary_text", {"summary": [], "content": []},
    ),
    "function_call": (
        "fc_", "arguments", "response.function_call_arguments", ("arguments", "name"), "", "",
        {"arguments": ""},
    ),
    "custom_tool_call": (
        "ctc_", "input", "response.custom_tool_call_input", ("input",), "", "", {"input": ""},
    ),
}  # fmt: skip
# Of OpenAI's response object, where nothing here is said of it.
_NOTHING = dict.fromkeys(
    (
        "access_programs", "completed_at", "conversation", "error", "image",
        "incomplete_details", "input_transformations", "moderation", "prompt",
        "prompt_cache_diagnostics", "prompt_cache_options", "tool_usage", "usage",
    )
)  # fmt: skip
_SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


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
        self._toolbox = toolbox
        self._keep = keep
        self._silence_s = silence_s
        self._sequence = 0  # events so far
        self._said_s = time.monotonic()
        self._text_of: CustomInputReader | None = None
        self._open: dict[str, Any] | None = None
        self._kind = ""  # of the open item
        tier = fields.service_tier
        if fields.summarises():
            self._thought = "summary"
        else:
            self._thought = "reasoning"
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
        self._outbox = outbox
        self._compacted = compacted
        return self

    def start(self) -> None:
        if self._compacted:
            self._outbox.write(comment(f"compacted {self._compacted}"))
        if not self._sequence:
            self._outbox.write(self._in_progress())

    def keepalive(self, progress: PrefillProgress) -> bytes:
        """The progress as a comment, and from time to time an event: Codex gives up on a stream
        without events."""
        silent = time.monotonic() - self._said_s >= self._silence_s
        return comment(progress) + (self._in_progress() if silent else b"")

    def _in_progress(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        wanted = kinds[1:] if self._sequence else kinds
        return b"".join(self._frame(kind, {"response": self.body}) for kind in wanted)

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        if not text and not logprobs:
            return
        self._enter("message")
        entries = [logprob_entry(p) for p in logprobs]
        self._logprobs += entries
        self._delta(text, f',"logprobs":{json.dumps(entries) if entries else "[]"}')

    def reasoning(self, choice: int, text: str) -> None:
        self._enter(self._thought)
        self._delta(text)

    def call_start(self, choice: int, index: int, name: str) -> None:
        self._leave()
        called = self._toolbox.called(name)
        self._text_of = CustomInputReader() if called.custom else None
        kind = "custom_tool_call" if called.custom else "function_call"
        if called.namespace is None:
            space = {}
        else:
            space = {"namespace": called.namespace}
        self._enter(kind, call_id=new_id("call_"), name=called.name, **space)

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        if self._text_of is None:
            data = text
        else:
            data = self._text_of.feed(text)
        if data:
            self._delta(data)

    def end(self, reply: Reply) -> None:
        outcome = reply.choices[0].outcome
        usage = reply.usage
        cut = outcome.reason in CUT
        # A call that is whole when the answer is cut has been said to its end.
        called = self._open is not None and self._kind.endswith("_call")
        self._leave("incomplete" if outcome.half_call or (cut and not called) else "completed")
        self.body |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        if self.body["store"]:
            self._keep(self.body)
        self._event(f"response.{self.body['status']}", {"response": self.body})

    def frame_error(self, error: LocalLLMError) -> bytes:
        """`response.failed`, the end of a failed stream."""
        if self._open is not None:
            self.body["output"].append({**self._open, "status": "incomplete"})
        self.body["status"] = "failed"
        self.body["error"] = {"code": error.code, "message": error.message}
        return self._frame("response.failed", {"response": self.body})

    def _enter(self, kind: str, **fields: Any) -> None:
        """Be in an item of that kind, one of _KINDS, which has these `fields` too."""
        if self._open is not None and self._kind == kind:
            return
        self._leave()
        prefix, field, event, _, part_event, _, begun = _KINDS[kind]
        self._kind = kind
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        shown = "reasoning" if kind == "summary" else kind
        item = {"type": shown, "id": new_id(prefix), **begun, **fields}
        self._open = {**item, "status": "in_progress"}
        at = {"output_index": len(self.body["output"])}
        self._event("response.output_item.added", {**at, "item": self._open})
        self._place = {"item_id": item["id"], **at}
        if part_event:
            self._place[f"{field}_index"] = 0
            self._event(f"{part_event}.added", {**self._place, "part": self._part("")})
        head = json.dumps({"type": f"{event}.delta", **self._place})
        self._delta_head = f"event: {event}.delta\ndata: {head[:-1]}"

    def _part(self, text: str) -> dict[str, Any]:
        """The part of the open item, with the log-probabilities there are."""
        if self._kind == "message":
            more = {"annotations": [], "logprobs": self._logprobs}
        else:
            more = {}
        return {"type": _KINDS[self._kind][5], "text": text, **more}

    def _leave(self, status: str = "completed") -> None:
        item = self._open
        if item is None:
            return
        _, field, event, said, part_event, *_ = _KINDS[self._kind]
        text = "".join(self._pieces)
        part = self._part(text)
        item |= {"status": status, field: [part] if part_event else text}
        whole = part if part_event else item
        self._event(f"{event}.done", {**self._place, **{name: whole[name] for name in said}})
        if part_event:
            self._event(f"{part_event}.done", {**self._place, "part": part})
        done = {"output_index": len(self.body["output"]), "item": item}
        self._event("response.output_item.done", done)
        self.body["output"].append(item)
        self._open = None

    def _delta(self, text: str, more: str = "") -> None:
        self._pieces.append(text)
        self._said_s = time.monotonic()
        self._outbox.write(
            f'{self._delta_head},"sequence_number":{self._sequence}{more},"delta":{quote(text)}}}\n\n'.encode()
        )
        self._sequence += 1

    def _event(self, event: str, fields: Mapping[str, Any]) -> None:
        self._outbox.write(self._frame(event, fields))

    def _frame(self, event: str, fields: Mapping[str, Any]) -> bytes:
        self._said_s = time.monotonic()
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
    response.end(reply)
    return response.body
