"""Writes an answer in Ollama's format: JSON lines, whole replies, errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from localllm.engine.messages import Timings, TokenLogprob
from localllm.errors import LocalLLMError
from localllm.server.dialects.wire import arguments_object, logprob_entry
from localllm.server.generation.job import Outcome, ReplyCollector, ReplyUsage, ReplyWriter
from localllm.server.http.asgi import new_id
from localllm.server.http.errors import ollama_envelope
from localllm.server.http.streaming import Outbox


@dataclass(frozen=True, slots=True)
class LineShape:
    """Where /api/chat and /api/generate put text, thinking and tool calls."""

    chat: bool

    def body(
        self, text: str, thinking: str = "", calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """The answer's part of a line."""
        if not self.chat:
            return {"response": text, **({"thinking": thinking} if thinking else {})}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class JsonLines(ReplyWriter):
    """Writes JSON lines. A tool call is one object, so it waits until its arguments are
    complete."""

    def __init__(self, outbox: Outbox, model: str, shape: LineShape) -> None:
        self._outbox, self._model, self._shape = outbox, model, shape
        self._call: tuple[int, str, list[str]] | None = None
        self._outcome: Outcome | None = None

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        self._flush()
        if text or logprobs:
            self._line({**self._shape.body(text), **_logprobs(logprobs)})

    def reasoning(self, choice: int, text: str) -> None:
        self._line(self._shape.body("", thinking=text))

    def call_start(self, choice: int, index: int, name: str) -> None:
        self._flush()
        self._call = (index, name, [])

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        assert self._call is not None
        self._call[2].append(text)

    def finish(self, choice: int, outcome: Outcome) -> None:
        if outcome.half_call:
            self._call = None
        self._flush()
        self._outcome = outcome

    def end(self, usage: ReplyUsage, timings: Timings) -> None:
        assert self._outcome is not None
        self._line({**self._shape.body(""), **done(self._outcome, usage, timings)})

    def _flush(self) -> None:
        if self._call is not None:
            index, name, pieces = self._call
            self._call = None
            self._line(self._shape.body("", calls=[call(index, name, "".join(pieces))]))

    def _line(self, body: Mapping[str, Any]) -> None:
        line = {"model": self._model, "created_at": now(), **body}
        line.setdefault("done", False)
        self._outbox.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


def answer(collected: ReplyCollector, model: str, shape: LineShape) -> dict[str, Any]:
    """The whole answer, in one line."""
    choice = collected.choices[0]
    calls = [call(i, c.name, c.arguments) for i, c in enumerate(choice.calls)]
    body = {**shape.body(choice.text, choice.reasoning, calls), **_logprobs(choice.logprobs)}
    return {
        "model": model,
        "created_at": now(),
        **body,
        **done(choice.outcome, collected.usage, collected.timings),
    }


def loaded(model: str, shape: LineShape, reason: str = "load") -> dict[str, Any]:
    """The answer to a request that only loads or unloads (`reason`) its model."""
    return {
        "model": model,
        "created_at": now(),
        **shape.body(""),
        "done": True,
        "done_reason": reason,
    }


def call(index: int, name: str, arguments: str) -> dict[str, Any]:
    """A tool call with its arguments as an object."""
    function = {"index": index, "name": name, "arguments": arguments_object(arguments)}
    return {"id": new_id("call_"), "function": function}


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs`, where they were asked for."""
    if not tokens:
        return {}
    entries = []
    for token in tokens:
        entry = logprob_entry(token)
        entries.append(
            entry if token.top else {k: v for k, v in entry.items() if k != "top_logprobs"}
        )
    return {"logprobs": entries}


def done(outcome: Outcome, usage: ReplyUsage, timings: Timings) -> dict[str, Any]:
    """The fields of the last line; durations in nanoseconds."""
    total = timings.queued_s + timings.prefill_s + timings.decode_s
    return {
        "done": True,
        "done_reason": "length" if outcome.reason == "length" else "stop",
        "total_duration": int(total * 1e9),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": int(timings.prefill_s * 1e9),
        "eval_count": usage.completion_tokens,
        "eval_duration": int(timings.decode_s * 1e9),
    }


def frame_error(error: LocalLLMError) -> bytes:
    return json.dumps(ollama_envelope(error)).encode() + b"\n"


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
