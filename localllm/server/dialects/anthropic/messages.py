"""POST /v1/messages and count_tokens: Anthropic's dialect, as Claude Code and its SDKs speak it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from localllm.conversation.messages import flatten, normalise
from localllm.conversation.tools.prompt import checked, choice_of
from localllm.engine.messages import Sampling, Timings, TokenLogprob
from localllm.errors import LocalLLMError, RequestError, UnsupportedError
from localllm.server.dialects.fields import Count, StopText, _Body
from localllm.server.generation.conversing import Ask
from localllm.server.generation.folding import Fold
from localllm.server.generation.generate import Outcome, Progress, Spent
from localllm.server.http.errors import to_anthropic
from localllm.server.http.streaming import Outbox

_quote = json.encoder.encode_basestring_ascii
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Known to Anthropic's API and without effect on an answer here.
HINTS = frozenset({"metadata", "service_tier", "betas", "speed"})
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}


class MessagesFields(_Body):
    """POST /v1/messages."""

    messages: list[dict[str, Any]]
    max_tokens: Count | None = None
    system: str | list[Any] | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=32)] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1)
    tools: list[dict[str, Any]] | None = Field(None, max_length=512)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = Field(None, description="`effort`, and `format` with a JSON schema")
    output_format: dict[str, Any] | None = Field(None, description="the older name of output_config.format")
    container: None = Field(None, description="no container runs here")
    mcp_servers: list[Any] | None = Field(None, max_length=0, description="not connected to from here")


def ask_of(fields: MessagesFields, default: Sampling) -> tuple[Ask, list[str]]:
    """The Ask, and the names of tools that were skipped because only Anthropic's servers can run them."""
    messages: list[dict[str, Any]] = []
    if fields.system:
        # One block per line group: the agent's own instructions stay apart from what it adds.
        messages.append({"role": "system", "content": flatten(fields.system, "system")})
    for i, message in enumerate(fields.messages):
        messages += _turns(message, f"messages[{i}]")
    if not fields.messages:
        raise RequestError("messages is empty: send at least one", param="messages")
    tools, skipped = _tools(fields.tools or [])
    choice, parallel = _choice(fields.tool_choice)
    thinking = (fields.thinking or {}).get("type")
    if thinking not in (None, "enabled", "disabled", "adaptive"):
        raise RequestError("thinking.type must be enabled, adaptive or disabled", param="thinking")
    if (fields.thinking or {}).get("budget_tokens") is not None:
        skipped.append("thinking.budget_tokens")
    effort = (fields.output_config or {}).get("effort")
    if effort is not None and effort not in _EFFORTS:
        raise RequestError(f"output_config.effort must be one of {', '.join(_EFFORTS)}", param="output_config")
    sampling = Sampling(
        temperature=default.temperature if fields.temperature is None else fields.temperature,
        top_k=default.top_k if fields.top_k is None else fields.top_k,
        top_p=default.top_p if fields.top_p is None else fields.top_p,
        min_p=default.min_p,
        typical_p=default.typical_p,
        repeat_penalty=default.repeat_penalty,
        repeat_last_n=default.repeat_last_n,
    )
    ask = Ask(
        messages=normalise(messages),
        sampling=sampling,
        tools=tools,
        choice=choice_of(choice, tools),
        parallel=parallel,
        grammar=_form(fields),
        effort="none" if thinking == "disabled" else _EFFORTS[effort] if effort else "high" if thinking else None,
        max_tokens=fields.max_tokens,
        stop=tuple(s for s in fields.stop_sequences or [] if s),
    )
    return ask, skipped


def _form(fields: MessagesFields) -> tuple[str, str] | None:
    """The JSON schema the answer must match, if one is asked for."""
    wanted = (fields.output_config or {}).get("format") or fields.output_format
    if wanted is None:
        return None
    if (
        not isinstance(wanted, Mapping)
        or wanted.get("type") != "json_schema"
        or not isinstance(wanted.get("schema"), Mapping)
    ):
        raise RequestError("output_config.format must be {type: json_schema, schema: {…}}", param="output_config")
    return ("json_schema", json.dumps(wanted["schema"]))


def _turns(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """One Anthropic message as OpenAI ones: tool results become messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where}.role must be user or assistant", param=f"{where}.role")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for i, block in enumerate(content):
        spot = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(block)
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            said = flatten(block.get("content"), f"{spot}.content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said})
        elif kind == "thinking":
            reasoning.append(str(block.get("thinking") or ""))
        elif kind in ("redacted_thinking", "server_tool_use", "web_search_tool_result"):
            continue
        elif kind in ("image", "document"):
            raise UnsupportedError(f"{spot}: this model reads text only, not {kind}s", param=spot)
        else:
            raise UnsupportedError(f"{spot}.type {str(kind)[:40]!r} is not supported", param=spot)
    if not texts and results:
        return results
    plain: dict[str, Any] = {"role": role, "content": texts}
    if calls:
        plain["tool_calls"] = calls
    if reasoning:
        plain["reasoning_content"] = "\n".join(reasoning)
    return [*results, plain]


def _tools(sent: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    kept, skipped = [], []
    for tool in sent:
        if tool.get("type", "custom") != "custom":
            skipped.append(f"tools.{tool.get('name', tool['type'])}")
            continue
        function = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool.get("input_schema"),
        }
        kept.append({"type": "function", "function": function})
    return checked(kept), skipped


def _choice(sent: dict[str, Any] | None) -> tuple[Any, bool]:
    if sent is None:
        return None, True
    parallel = sent.get("disable_parallel_tool_use") is not True
    kind = sent.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": sent.get("name")}}, parallel
    if kind in ("auto", "any", "none"):
        return kind, parallel
    raise RequestError("tool_choice.type must be auto, any, tool or none", param="tool_choice")


class Events:
    """The Writer of Anthropic's events. The start waits for the first content, when the prompt's size is known."""

    def __init__(self, outbox: Outbox, model: str, progress: Progress) -> None:
        self._outbox, self._model, self._progress = outbox, model, progress
        self._block = -1
        self._kind = ""
        self._begun = False
        self._outcome: Outcome | None = None

    def start(self) -> None:
        """Wait for the prefill to be counted."""

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        """A text delta."""
        if not text:
            return
        self._open("text", '{"type":"text","text":""}')
        self._delta(f'{{"type":"text_delta","text":{_quote(text)}}}')

    def reasoning(self, choice: int, text: str) -> None:
        """A thinking delta."""
        self._open("thinking", '{"type":"thinking","thinking":"","signature":""}')
        self._delta(f'{{"type":"thinking_delta","thinking":{_quote(text)}}}')

    def call_start(self, choice: int, index: int, name: str) -> None:
        """A tool_use block."""
        body = f'{{"type":"tool_use","id":"{new_tool_id()}","name":{_quote(name)},"input":{{}}}}'
        self._open(f"call{index}", body)

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        """A fragment of its input."""
        self._delta(f'{{"type":"input_json_delta","partial_json":{_quote(text)}}}')

    def finish(self, choice: int, outcome: Outcome) -> None:
        """Close the last block."""
        self._begin()
        self._close()
        self._outcome = outcome

    def end(self, usage: Spent, timings: Timings) -> None:
        """Why it stopped, the usage, and the end."""
        assert self._outcome is not None
        reason, sequence = stop_reason(self._outcome)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        self._send("message_delta", json.dumps({"delta": delta, "usage": usage_body(usage)})[1:-1])
        self._send("message_stop", "")

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        counted = Spent(prompt_tokens=self._progress.total, cached_tokens=self._progress.cached)
        message: dict[str, Any] = {
            "id": new_id(), "type": "message", "role": "assistant", "model": self._model, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": usage_body(counted),
        }  # fmt: skip
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
            # Clients send it back with the thinking; it means nothing here.
            self._delta('{"type":"signature_delta","signature":"localllm"}')
        if self._kind:
            self._send("content_block_stop", f'"index":{self._block}')
        self._kind = ""

    def _send(self, event: str, fields: str) -> None:
        more = f",{fields}" if fields else ""
        self._outbox.write(f'event: {event}\ndata: {{"type":"{event}"{more}}}\n\n'.encode())


def ping(progress: Progress) -> bytes:
    """Anthropic's keep-alive, with the progress as a comment."""
    return f': {progress}\n\nevent: ping\ndata: {{"type": "ping"}}\n\n'.encode()


def frame_error(error: LocalLLMError) -> bytes:
    """An error inside a stream."""
    return b"event: error\ndata: " + json.dumps(to_anthropic(error)).encode() + b"\n\n"


def whole(fold: Fold, model: str) -> dict[str, Any]:
    """The message object."""
    choice = fold.choices[0]
    assert choice.outcome is not None
    content: list[dict[str, Any]] = []
    if choice.reasoning:
        content.append({"type": "thinking", "thinking": choice.reasoning, "signature": "localllm"})
    if choice.text:
        content.append({"type": "text", "text": choice.text})
    for call in choice.calls:
        content.append({"type": "tool_use", "id": new_tool_id(), "name": call.name, "input": _object(call.arguments)})
    reason, sequence = stop_reason(choice.outcome)
    return {
        "id": new_id(), "type": "message", "role": "assistant", "model": model, "content": content,
        "stop_reason": reason, "stop_sequence": sequence, "usage": usage_body(fold.usage),
    }  # fmt: skip


def stop_reason(outcome: Outcome) -> tuple[str, str | None]:
    """Anthropic's stop_reason and stop_sequence."""
    if outcome.stop is not None and outcome.reason == "stop":
        return "stop_sequence", outcome.stop
    return _STOP_REASONS[outcome.reason], None


def usage_body(usage: Spent) -> dict[str, Any]:
    """Anthropic counts cached tokens apart from the fresh ones."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {"_unparsed": arguments}


def new_id() -> str:
    """An id for one message."""
    return "msg_" + secrets.token_hex(12)


def new_tool_id() -> str:
    """An id for one tool use."""
    return "toolu_" + secrets.token_hex(12)
