"""Writes a chat answer in OpenAI's format: chat.completion and its chunks."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from localllm.engine.messages import Timings, TokenLogprob
from localllm.server.dialects.wire import compacted_comment, logprob_entry, quote, timings_body
from localllm.server.generation.collector import CollectedChoice, ReplyCollector, new_call_id
from localllm.server.generation.job import Outcome, ReplyUsage, ReplyWriter
from localllm.server.http.streaming import Outbox


class ChatChunks(ReplyWriter):
    """The Writer of chat.completion.chunk events. Each token costs two string joins and one JSON string."""

    def __init__(self, outbox: Outbox, model: str, *, n: int, include_usage: bool, compacted: str = "") -> None:
        self._outbox, self._n, self._include_usage, self._compacted = outbox, n, include_usage, compacted
        self.id = new_completion_id()
        usage = ',"usage":null' if include_usage else ""
        self._head = (
            f'data: {{"id":"{self.id}","object":"chat.completion.chunk","created":{int(time.time())},'
            f'"model":{quote(model)},"system_fingerprint":null'
        )
        self._tail = f"}}]{usage}}}\n\n"
        self._openings = [f'{self._head},"choices":[{{"index":{i},"delta":{{' for i in range(n)]
        self._closing = f'}},"logprobs":null,"finish_reason":null{self._tail}'

    def start(self) -> None:
        if self._compacted:
            self._outbox.write(compacted_comment(self._compacted))
        for i in range(self._n):
            self._send(i, '"role":"assistant","content":""')

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        if not logprobs:
            self._outbox.write(f'{self._openings[choice]}"content":{quote(text)}{self._closing}'.encode())
            return
        said = json.dumps({"content": [logprob_entry(p) for p in logprobs], "refusal": None})
        self._outbox.write(
            f'{self._openings[choice]}"content":{quote(text)}}},"logprobs":{said},"finish_reason":null{self._tail}'.encode()
        )

    def reasoning(self, choice: int, text: str) -> None:
        self._send(choice, f'"reasoning_content":{quote(text)}')

    def call_start(self, choice: int, index: int, name: str) -> None:
        function = f'{{"name":{quote(name)},"arguments":""}}'
        call = f'{{"index":{index},"id":"{new_call_id()}","type":"function","function":{function}}}'
        self._send(choice, f'"tool_calls":[{call}]')

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        self._send(choice, f'"tool_calls":[{{"index":{index},"function":{{"arguments":{quote(text)}}}}}]')

    def finish(self, choice: int, outcome: Outcome) -> None:
        self._outbox.write(
            f'{self._openings[choice]}}},"logprobs":null,"finish_reason":"{outcome.reason}"{self._tail}'.encode()
        )

    def end(self, usage: ReplyUsage, timings: Timings) -> None:
        if self._include_usage:
            said = json.dumps({"choices": [], "usage": usage_body(usage), "timings": timings_body(usage, timings)})
            self._outbox.write(f"{self._head},{said[1:]}\n\n".encode())
        self._outbox.write(f": cache {usage.cache_note}\n\ndata: [DONE]\n\n".encode())

    def _send(self, choice: int, delta: str) -> None:
        self._outbox.write(f"{self._openings[choice]}{delta}{self._closing}".encode())


def whole(collected: ReplyCollector, model: str) -> dict[str, Any]:
    return {
        "id": new_completion_id(),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": None,
        "choices": [_choice(i, c) for i, c in enumerate(collected.choices)],
        "usage": usage_body(collected.usage),
        "timings": timings_body(collected.usage, collected.timings),
    }


def _choice(index: int, choice: CollectedChoice) -> dict[str, Any]:
    assert choice.outcome is not None
    message: dict[str, Any] = {"role": "assistant", "content": choice.text or (None if choice.calls else "")}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in choice.calls
        ]
    logprobs = {"content": [logprob_entry(p) for p in choice.logprobs], "refusal": None} if choice.logprobs else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.outcome.reason}


def usage_body(usage: ReplyUsage) -> dict[str, Any]:
    """OpenAI's usage object; accepted and rejected predictions are our drafts."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_draft_tokens,
            "rejected_prediction_tokens": usage.rejected_draft_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
        },
    }


def new_completion_id() -> str:
    return "chatcmpl-" + secrets.token_hex(12)
