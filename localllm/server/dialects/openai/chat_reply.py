"""POST /v1/chat/completions: OpenAI's request to an Ask, and the reply back, whole or as chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.conversation.messages import normalise
from localllm.conversation.tools.prompt import checked, choice_of
from localllm.engine.messages import Sampling, Timings, TokenLogprob
from localllm.errors import LocalLLMError, RequestError
from localllm.server.dialects.fields import ChatFields
from localllm.server.generation import prompting
from localllm.server.generation.conversing import Ask
from localllm.server.generation.folding import Fold, FoldedChoice, new_call_id
from localllm.server.generation.generate import Outcome, Spent
from localllm.server.http.streaming import Outbox

# The one fast text-to-JSON function of the standard library, without a keyword argument's overhead per call.
_quote = json.encoder.encode_basestring_ascii


def ask_of(fields: ChatFields, default: Sampling) -> Ask:
    """What `fields` asks for. Raises RequestError for what is wrong whatever the model."""
    tools = checked(fields.tools)
    return Ask(
        messages=normalise(fields.messages),
        sampling=fields.sampling(default),
        tools=tools,
        choice=choice_of(fields.tool_choice, tools),
        parallel=fields.parallel_tool_calls is not False,
        grammar=output_constraint(fields),
        effort=fields.reasoning_effort,
        template_kwargs=fields.chat_template_kwargs,
        max_tokens=fields.answer_tokens(),
        stop=fields.stops(),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=fields.alternatives(),
        cache_prompt=fields.cache_prompt is not False,
        time_limit_s=fields.time_limit_s(),
        n=fields.n or 1,
        conversation=fields.prompt_cache_key or "",
        prediction=fields.predicted(),
        compaction=fields.truncation == "auto",
    )


def output_constraint(fields: ChatFields) -> tuple[str, str] | None:
    """The one constraint on the answer's form; raises RequestError when several are given."""
    found = {
        "response_format": prompting.constraint(fields.response_format),
        "grammar": ("gbnf", fields.grammar) if fields.grammar else None,
        "json_schema": ("json_schema", json.dumps(fields.json_schema)) if fields.json_schema is not None else None,
    }
    given = [name for name, value in found.items() if value is not None]
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} can't be combined: send one", param=given[1])
    return found[given[0]] if given else None


class Chunks:
    """The Writer of chat.completion.chunk events. Each token costs two string joins and one JSON string."""

    def __init__(self, outbox: Outbox, model: str, *, n: int, include_usage: bool, compacted: str = "") -> None:
        self._outbox, self._n, self._include_usage, self._compacted = outbox, n, include_usage, compacted
        self.id = new_completion_id()
        usage = ',"usage":null' if include_usage else ""
        self._head = (
            f'data: {{"id":"{self.id}","object":"chat.completion.chunk","created":{int(time.time())},'
            f'"model":{_quote(model)},"system_fingerprint":null'
        )
        self._tail = f"}}]{usage}}}\n\n"
        self._openings = [f'{self._head},"choices":[{{"index":{i},"delta":{{' for i in range(n)]
        self._closing = f'}},"logprobs":null,"finish_reason":null{self._tail}'

    def start(self) -> None:
        """The role, once per choice; before it, what was left out of the conversation."""
        if self._compacted:
            self._outbox.write(compacted_comment(self._compacted))
        for i in range(self._n):
            self._send(i, '"role":"assistant","content":""')

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        """A content delta."""
        if not logprobs:
            self._outbox.write(f'{self._openings[choice]}"content":{_quote(text)}{self._closing}'.encode())
            return
        said = json.dumps({"content": [logprob_entry(p) for p in logprobs], "refusal": None})
        self._outbox.write(
            f'{self._openings[choice]}"content":{_quote(text)}}},"logprobs":{said},"finish_reason":null{self._tail}'.encode()
        )

    def reasoning(self, choice: int, text: str) -> None:
        """A reasoning delta."""
        self._send(choice, f'"reasoning_content":{_quote(text)}')

    def call_start(self, choice: int, index: int, name: str) -> None:
        """The id and name of a tool call, once."""
        function = f'{{"name":{_quote(name)},"arguments":""}}'
        call = f'{{"index":{index},"id":"{new_call_id()}","type":"function","function":{function}}}'
        self._send(choice, f'"tool_calls":[{call}]')

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        """A fragment of arguments."""
        self._send(choice, f'"tool_calls":[{{"index":{index},"function":{{"arguments":{_quote(text)}}}}}]')

    def finish(self, choice: int, outcome: Outcome) -> None:
        """The finish reason of a choice."""
        self._outbox.write(
            f'{self._openings[choice]}}},"logprobs":null,"finish_reason":"{outcome.reason}"{self._tail}'.encode()
        )

    def end(self, usage: Spent, timings: Timings) -> None:
        """Usage where asked for, what the cache did, and the end mark."""
        if self._include_usage:
            said = json.dumps({"choices": [], "usage": usage_body(usage), "timings": timings_body(usage, timings)})
            self._outbox.write(f"{self._head},{said[1:]}\n\n".encode())
        note = cache_note(usage)
        self._outbox.write(f": cache {note}\n\ndata: [DONE]\n\n".encode())

    def _send(self, choice: int, delta: str) -> None:
        self._outbox.write(f"{self._openings[choice]}{delta}{self._closing}".encode())


def frame_error(error: LocalLLMError) -> bytes:
    """An error inside a stream, and its end."""
    return b"data: " + json.dumps(error.to_openai()).encode() + b"\n\ndata: [DONE]\n\n"


def whole(fold: Fold, model: str) -> dict[str, Any]:
    """The chat.completion object."""
    return {
        "id": new_completion_id(),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": None,
        "choices": [_choice(i, c) for i, c in enumerate(fold.choices)],
        "usage": usage_body(fold.usage),
        "timings": timings_body(fold.usage, fold.timings),
    }


def _choice(index: int, choice: FoldedChoice) -> dict[str, Any]:
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


def logprob_entry(p: TokenLogprob) -> dict[str, Any]:
    """One token's entry of `logprobs.content`."""
    return {
        "token": p.text,
        "logprob": p.logprob,
        "bytes": list(p.text.encode()),
        "top_logprobs": [{"token": t, "logprob": lp, "bytes": list(t.encode())} for t, _, lp in p.top],
    }


def usage_body(usage: Spent) -> dict[str, Any]:
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


def timings_body(usage: Spent, timings: Timings) -> dict[str, Any]:
    """Times in milliseconds and speeds in tokens per second, under llama.cpp's names."""
    fresh = usage.prompt_tokens - usage.cached_tokens
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": fresh,
        "prompt_ms": timings.prefill_s * 1e3,
        "prompt_per_second": fresh / timings.prefill_s if timings.prefill_s > 0 else 0.0,
        "predicted_n": usage.completion_tokens,
        "predicted_ms": timings.decode_s * 1e3,
        # The first token comes out of the prefill: the decode time holds the others.
        "predicted_per_second": max(0, usage.completion_tokens - 1) / timings.decode_s if timings.decode_s > 0 else 0.0,
    }


def cache_note(usage: Spent) -> str:
    """What the prefix cache did, in one line of ASCII."""
    said = f"{usage.cached_tokens}/{usage.prompt_tokens} tokens"
    if usage.cache_miss:
        said += f"; {usage.cache_miss}"
    return "".join(c if " " <= c <= "~" else "?" for c in said)[:500]


def compacted_comment(compacted: str) -> bytes:
    """What `x-localllm-compacted` says, as a comment: the headers may have left before it was known."""
    return f": compacted {compacted}\n\n".encode()


def ignored_header(names: Sequence[str]) -> Mapping[str, str]:
    """`x-localllm-ignored`, when there is something to name."""
    if not names:
        return {}
    listed = ",".join("".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "?" for c in n)[:64] for n in names)
    return {"x-localllm-ignored": listed[:1024]}


def new_completion_id() -> str:
    """An id for one reply."""
    return "chatcmpl-" + secrets.token_hex(12)
