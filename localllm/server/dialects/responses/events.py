"""POST /v1/responses: OpenAI's item-based dialect (Codex speaks nothing else), with a small store of past responses."""

from __future__ import annotations

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from localllm.conversation.messages import normalise
from localllm.conversation.tools.prompt import checked, choice_of
from localllm.engine.messages import Sampling, Timings, TokenLogprob
from localllm.errors import LocalLLMError, NotFoundError, RequestError, UnsupportedError
from localllm.server.dialects.fields import TRUNCATION, Count, _Body
from localllm.server.dialects.openai.chat_reply import compacted_comment
from localllm.server.generation import prompting
from localllm.server.generation.conversing import Ask
from localllm.server.generation.folding import Fold, new_call_id
from localllm.server.generation.generate import Outcome, Spent
from localllm.server.http.streaming import Outbox

_quote = json.encoder.encode_basestring_ascii
_MAX_STORED, _MAX_STORED_CHARS = 256, 64 * 2**20
# Known to OpenAI's API and without effect on an answer here.
HINTS = frozenset(
    {
        "metadata", "user", "service_tier", "safety_identifier", "prompt_cache_retention", "include", "max_tool_calls",
        "stream_options", "client_metadata",
    }
)  # fmt: skip


class PreviousResponseError(NotFoundError):
    """`previous_response_id` names a response that is not stored here (any more)."""

    code = "previous_response_not_found"
    default_hint = "responses are kept in memory until the server stops; send the whole conversation"


class ResponsesFields(_Body):
    """POST /v1/responses."""

    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    store: bool | None = Field(None, description="keep the response for previous_response_id (default true)")
    max_output_tokens: Count | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    tools: list[dict[str, Any]] | None = Field(None, max_length=512)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = Field(None, description=TRUNCATION)
    context_management: Annotated[list[Any], Field(max_length=0)] | None = Field(
        None, description="nothing is summarised here; send truncation: auto"
    )
    background: Literal[False] | None = Field(None, description="responses run while the client waits")
    prompt: None = Field(None, description="stored prompts are not kept here")
    conversation: None = Field(None, description="conversation objects are not kept here")
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    prompt_cache_key: str | None = Field(None, max_length=1024)


class Store:
    """Past responses, in memory only: each one's whole conversation, the oldest forgotten first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[list[dict[str, Any]], dict[str, Any], int]] = OrderedDict()
        self._chars = 0

    def put(self, body: dict[str, Any], items: Sequence[Mapping[str, Any]]) -> None:
        """Keep a finished response with the input items that led to it."""
        whole = [*map(dict, items), *body["output"]]
        size = len(json.dumps(whole))
        self._kept[body["id"]] = (whole, body, size)
        self._chars += size
        while len(self._kept) > _MAX_STORED or (self._chars > _MAX_STORED_CHARS and self._kept):
            self._chars -= self._kept.popitem(last=False)[1][2]

    def items(self, response_id: str) -> list[dict[str, Any]]:
        """The conversation up to and including that response; raises PreviousResponseError."""
        return self._get(response_id)[0]

    def body(self, response_id: str) -> dict[str, Any]:
        """The response object; raises PreviousResponseError."""
        return self._get(response_id)[1]

    def drop(self, response_id: str) -> None:
        """Forget it; raises PreviousResponseError."""
        self._chars -= self._get(response_id)[2]
        del self._kept[response_id]

    def _get(self, response_id: str) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
        if response_id not in self._kept:
            raise PreviousResponseError(
                f"no response {response_id[:80]!r} is stored here", param="previous_response_id"
            )
        return self._kept[response_id]


def ask_of(fields: ResponsesFields, default: Sampling, items: Sequence[Any]) -> tuple[Ask, list[str]]:
    """The Ask for the conversation `items`, and the names of tools and items that were skipped."""
    skipped: list[str] = []
    messages = _messages(items, skipped)
    if fields.instructions:
        messages.insert(0, {"role": "system", "content": fields.instructions})
    if not any(m["role"] != "system" for m in messages):
        messages.append({"role": "user", "content": ""})  # Codex probes with an empty input
    tools = _tools(fields.tools or [], skipped)
    sent = fields.tool_choice
    if isinstance(sent, dict) and sent.get("type") not in ("function", None):
        raise UnsupportedError(f"tool_choice.type {str(sent.get('type'))[:40]!r} is not supported", param="tool_choice")
    formatted = (fields.text or {}).get("format")
    if (fields.text or {}).get("verbosity") not in (None, "medium"):
        raise UnsupportedError("text.verbosity: no model here has this control; say it in the prompt", param="text")
    if "message.output_text.logprobs" in ((fields.model_extra or {}).get("include") or ()):
        raise UnsupportedError("include: log-probabilities come with /v1/chat/completions only", param="include")
    effort = (fields.reasoning or {}).get("effort")
    if effort not in (None, "none", "minimal", "low", "medium", "high", "xhigh"):
        raise RequestError("reasoning.effort is not a known effort", param="reasoning")
    choice = choice_of(sent if tools or sent not in ("auto", "none") else None, tools)
    grammar = prompting.constraint(formatted)
    ask = Ask(
        messages=normalise(messages),
        sampling=Sampling(
            temperature=default.temperature if fields.temperature is None else fields.temperature,
            top_k=default.top_k,
            top_p=default.top_p if fields.top_p is None else fields.top_p,
            min_p=default.min_p,
            typical_p=default.typical_p,
            repeat_penalty=default.repeat_penalty,
            repeat_last_n=default.repeat_last_n,
            seed=None if fields.seed in (None, -1) else int(fields.seed or 0) & (2**63 - 1),
        ),
        tools=tools,
        choice=choice,
        parallel=fields.parallel_tool_calls is not False,
        grammar=grammar,
        effort=effort,
        max_tokens=fields.max_output_tokens,
        conversation=fields.prompt_cache_key or "",
        compaction=fields.truncation == "auto",
    )
    return ask, skipped


def input_items(fields: ResponsesFields, store: Store) -> list[Any]:
    """The conversation: what `previous_response_id` names, then this request's input."""
    before: list[Any] = list(store.items(fields.previous_response_id)) if fields.previous_response_id else []
    if isinstance(fields.input, str):
        return [*before, {"type": "message", "role": "user", "content": fields.input}]
    return [*before, *(fields.input or [])]


def _messages(items: Sequence[Any], skipped: list[str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    thought = ""
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if not isinstance(item, Mapping):
            raise RequestError(f"{where} must be an object", param=where)
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            message = {"role": item.get("role"), "content": item.get("content")}
            if thought and item.get("role") == "assistant":
                message["reasoning_content"] = thought
            thought = ""
            messages.append(message)
        elif kind in ("function_call", "custom_tool_call"):
            arguments = item.get("arguments") if kind == "function_call" else {"input": item.get("input")}
            call = {"id": item.get("call_id"), "function": {"name": item.get("name"), "arguments": arguments}}
            last = messages[-1] if messages else None
            if last is not None and last["role"] == "assistant":
                last.setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            if thought:
                messages[-1]["reasoning_content"] = thought
                thought = ""
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": _output(item.get("output"))}
            )
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            thought = "\n".join(str(p.get("text", "")) for p in parts if isinstance(p, Mapping))
        elif kind == "item_reference":
            raise UnsupportedError(f"{where}: items are not stored by id; send previous_response_id", param=where)
        else:
            skipped.append(f"input.{kind}")
    return messages


def _output(output: Any) -> Any:
    return output if isinstance(output, (str, list)) or output is None else json.dumps(output)


def _tools(sent: list[dict[str, Any]], skipped: list[str]) -> list[dict[str, Any]]:
    kept = []
    for tool in sent:
        if tool.get("type", "function") != "function":
            skipped.append(f"tools.{tool.get('type')}")  # only OpenAI's servers can run it
            continue
        function = tool.get("function") if isinstance(tool.get("function"), Mapping) else tool
        kept.append({"type": "function", "function": function})
    return checked(kept)


class Response:
    """One response object as it grows; the Writer of its events, and the body of the whole reply. `keep` gets the
    finished body."""

    def __init__(
        self,
        fields: ResponsesFields,
        model: str,
        outbox: Outbox | None,
        keep: Callable[[dict[str, Any]], None] | None = None,
        compacted: str = "",
    ) -> None:
        self._outbox = outbox
        self._compacted = compacted
        self._keep = keep
        self._sequence = 0
        self._open: dict[str, Any] | None = None
        self._pieces: list[str] = []
        self.body: dict[str, Any] = {
            "id": "resp_" + secrets.token_hex(12),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "model": model,
            "output": [],
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": fields.previous_response_id,
            "reasoning": {"effort": (fields.reasoning or {}).get("effort"), "summary": None},
            "store": fields.store is not False,
            "temperature": fields.temperature,
            "text": fields.text or {"format": {"type": "text"}},
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools or [],
            "top_p": fields.top_p,
            "truncation": fields.truncation or "disabled",
            "usage": None,
            "metadata": (fields.model_extra or {}).get("metadata") or {},
        }

    def start(self) -> None:
        """The response exists; before it, what was left out of the conversation."""
        if self._outbox is not None and self._compacted:
            self._outbox.write(compacted_comment(self._compacted))
        self._event("response.created", {"response": self.body})
        self._event("response.in_progress", {"response": self.body})

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        """An output_text delta."""
        if text:
            self._enter("message")
            self._delta("response.output_text.delta", text, ',"content_index":0,"logprobs":[]')

    def reasoning(self, choice: int, text: str) -> None:
        """A reasoning delta."""
        self._enter("reasoning")
        self._delta("response.reasoning_text.delta", text, ',"content_index":0')

    def call_start(self, choice: int, index: int, name: str) -> None:
        """A function_call item."""
        self._leave()
        self._begin({"type": "function_call", "id": _item_id("fc"), "call_id": new_call_id(), "name": name,
                     "arguments": "", "status": "in_progress"})  # fmt: skip

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        """A fragment of its arguments."""
        self._delta("response.function_call_arguments.delta", text, "")

    def finish(self, choice: int, outcome: Outcome) -> None:
        """Close the last item."""
        self._leave()
        if outcome.reason == "length":
            self.body["status"] = "incomplete"
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.body["status"] = "completed"

    def end(self, usage: Spent, timings: Timings) -> None:
        """The finished response."""
        self.body["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        if self._keep is not None:
            self._keep(self.body)
        self._event(f"response.{self.body['status']}", {"response": self.body})

    def frame_error(self, error: LocalLLMError) -> bytes:
        """`response.failed`, the end of a stream that did not go well."""
        self.body["status"] = "failed"
        self.body["error"] = {"code": error.code, "message": error.message}
        return self._frame("response.failed", {"response": self.body})

    def _enter(self, kind: str) -> None:
        if self._open is not None and self._open["type"] == kind:
            return
        self._leave()
        if kind == "message":
            self._begin({"type": "message", "id": _item_id("msg"), "status": "in_progress", "role": "assistant",
                         "content": []})  # fmt: skip
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            self._begin({"type": "reasoning", "id": _item_id("rs"), "status": "in_progress", "summary": [],
                         "content": []})  # fmt: skip
            part = {"type": "reasoning_text", "text": ""}
        self._event("response.content_part.added", {**self._place(), "content_index": 0, "part": part})

    def _begin(self, item: dict[str, Any]) -> None:
        self._open, self._pieces = item, []
        self._event("response.output_item.added", {"output_index": len(self.body["output"]), "item": item})

    def _leave(self) -> None:
        item = self._open
        if item is None:
            return
        text = "".join(self._pieces)
        place = self._place()
        item["status"] = "completed"
        if item["type"] == "function_call":
            item["arguments"] = text
            self._event("response.function_call_arguments.done", {**place, "arguments": text, "name": item["name"]})
        elif item["type"] == "message":
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
            item["content"] = [part]
            self._event("response.output_text.done", {**place, "content_index": 0, "text": text, "logprobs": []})
            self._event("response.content_part.done", {**place, "content_index": 0, "part": part})
        else:
            part = {"type": "reasoning_text", "text": text}
            item["content"] = [part]
            self._event("response.reasoning_text.done", {**place, "content_index": 0, "text": text})
            self._event("response.content_part.done", {**place, "content_index": 0, "part": part})
        self._event("response.output_item.done", {"output_index": place["output_index"], "item": item})
        self.body["output"].append(item)
        self._open = None

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.body["output"])}

    def _delta(self, event: str, text: str, more: str) -> None:
        self._pieces.append(text)
        if self._outbox is None:
            return
        assert self._open is not None
        self._outbox.write(
            f'event: {event}\ndata: {{"type":"{event}","sequence_number":{self._sequence},'
            f'"item_id":"{self._open["id"]}","output_index":{len(self.body["output"])}{more},'
            f'"delta":{_quote(text)}}}\n\n'.encode()
        )
        self._sequence += 1

    def _event(self, event: str, fields: Mapping[str, Any]) -> None:
        if self._outbox is not None:
            self._outbox.write(self._frame(event, fields))

    def _frame(self, event: str, fields: Mapping[str, Any]) -> bytes:
        said = json.dumps({"type": event, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return f"event: {event}\ndata: {said}\n\n".encode()


def replay(fold: Fold, response: Response) -> dict[str, Any]:
    """The whole response object from a folded reply: the stream's own writer, played once more."""
    choice = fold.choices[0]
    assert choice.outcome is not None
    if choice.reasoning:
        response.reasoning(0, choice.reasoning)
    if choice.text:
        response.text(0, choice.text, ())
    for index, call in enumerate(choice.calls):
        response.call_start(0, index, call.name)
        response.call_arguments(0, index, call.arguments)
    response.finish(0, choice.outcome)
    response.end(fold.usage, fold.timings)
    return response.body


def _item_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
