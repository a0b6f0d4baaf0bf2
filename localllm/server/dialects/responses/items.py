"""The body of POST /v1/responses, its translation to a chat request, and stored responses: in
memory only, least recently used evicted first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from localllm.conversation.messages import normalise
from localllm.engine.messages import Sampling
from localllm.errors import NotFoundError, RequestError
from localllm.server.dialects.fields import TRUNCATION, Limit, RequestBody, first_limit
from localllm.server.dialects.known import (
    FORM,
    PART,
    READS,
    REFUSED,
    OneOf,
    Refused,
    Shape,
    Unused,
    shape,
    shape_of,
)
from localllm.server.dialects.thinking import ReasonedFields, ReasoningFields
from localllm.server.dialects.toolbox import INPUT, Toolbox, flat_name
from localllm.server.generation.chat import ChatRequest
from localllm.server.generation.prompt import ResponseOptions
from localllm.server.http.asgi import new_id
from localllm.server.http.recent import RecentlyUsed

# Entries, and characters as JSON.
_MAX_ENTRIES, _MAX_CHARS = 256, 64 * 2**20
_KEPT = "responses are kept in memory until the server stops; send the whole conversation"


# How the ids of items begin, by type.
_ID_HEADS = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}  # fmt: skip


def typed(item: Mapping[str, Any]) -> dict[str, Any]:
    """A sent item as it is kept and shown: with all that OpenAI's types of a stored one have, which
    a client may leave out."""
    kind = item.get("type") or "message"
    whole: dict[str, Any] = {**item, "type": kind}
    whole["id"] = item.get("id") or new_id(_ID_HEADS.get(kind, "item") + "_")
    if kind == "reasoning":
        whole["summary"] = item.get("summary") or []
        return whole
    whole["status"] = item.get("status") or "completed"
    if kind == "message":
        answer = item.get("role") == "assistant"
        content = item.get("content")
        if not isinstance(content, list):
            content = [{"type": "output_text" if answer else "input_text", "text": content or ""}]
        whole["content"] = [_complete_part(part) for part in content]
    return whole


def _complete_part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "output_text":
        return {"annotations": [], "logprobs": [], **part}
    return {"detail": "auto", **part} if kind == "input_image" else part


class PreviousResponseError(NotFoundError, code="previous_response_not_found", default_hint=_KEPT):
    """`previous_response_id` names a response that is not stored here (any more)."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, the items it answers (those of earlier responses first, then from `own` on those of
    its request), and the length of all as JSON."""

    body: dict[str, Any]
    given: Sequence[dict[str, Any]]
    own: int
    chars: int


class ResponseStore:
    """Past responses with their whole conversations."""

    def __init__(self) -> None:
        self._entries: RecentlyUsed[str, StoredResponse] = RecentlyUsed(
            _MAX_ENTRIES, _MAX_CHARS, lambda stored: stored.chars
        )

    def put(
        self,
        body: dict[str, Any],
        before: Sequence[Mapping[str, Any]],
        sent: Sequence[Mapping[str, Any]],
    ) -> None:
        """Store a finished response with its input items: those of earlier responses, then its
        own."""
        given = [*map(dict, before), *map(typed, sent)]
        chars = len(json.dumps([given, body["output"]]))
        self._entries.put(body["id"], StoredResponse(body, given, len(before), chars))

    def item(self, item_id: str, where: str) -> dict[str, Any]:
        """The item that `where` refers to; raises RequestError."""
        for stored in reversed(self._entries.values()):
            items: list[dict[str, Any]] = [*stored.body["output"], *stored.given[stored.own :]]
            for item in items:
                if item["id"] == item_id:
                    return item
        raise RequestError(
            f"{where}: the item {item_id[:80]!r} is not stored here",
            hint="send the item itself, or previous_response_id; " + _KEPT,
            param=where,
        )

    def drop(self, response_id: str) -> None:
        """Forget it; raises PreviousResponseError."""
        self.get(response_id)
        self._entries.pop(response_id)

    def get(self, response_id: str) -> StoredResponse:
        """That response; raises PreviousResponseError."""
        stored = self._entries.get(response_id)
        if stored is None:
            raise PreviousResponseError(
                f"no response {response_id[:80]!r} is stored here", param="previous_response_id"
            )
        return stored


class PageFields(RequestBody):
    """Query parameters of a list."""

    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = Field(None, description="an item's id: the page begins behind it")


def page(listed: Sequence[Mapping[str, Any]], wanted: PageFields) -> dict[str, Any]:
    """The page of `listed` (in the order of the conversation) that `wanted` asks for."""
    found = list(listed) if wanted.order == "asc" else list(reversed(listed))
    begin = next((i + 1 for i, item in enumerate(found) if item["id"] == wanted.after), 0)
    end = begin + wanted.limit
    shown = found[begin:end]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {
        "object": "list",
        "data": shown,
        "first_id": first,
        "last_id": last,
        "has_more": end < len(found),
    }


_ITEM = shape(
    "type", "role", "id", "status", "call_id", "name", "namespace", "arguments", "input",
    content=PART, output=PART, summary=shape("text", type=OneOf(("summary_text",))),
    encrypted_content=Unused((None, "")),
    **{READS: (None, *_ID_HEADS, "item_reference").__contains__},
)  # fmt: skip


class ResponsesFields(ReasonedFields):
    """POST /v1/responses. What is no field may be shown in the response all the same."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())
    shapes: ClassVar[Shape] = {
        **ReasonedFields.shapes,
        "input": _ITEM,
        "reasoning": shape_of(ReasoningFields),
        "text": {"format": FORM, "verbosity": Unused((None, "medium"))},
        "n": REFUSED["n"],
        "background": Refused("responses run while the client waits", (None, False)),
        "prompt": Refused("stored prompts are not kept here"),
        "conversation": Refused("conversations are not kept here; send previous_response_id"),
        "context_management": Refused(
            "nothing is summarised here; send truncation: auto", (None, [])
        ),
        "prompt_cache_key": Unused(),
        "stream_options": {"include_obfuscation": Unused()},
        **dict.fromkeys(("client_metadata", "max_tool_calls")),
    }
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    store: bool | None = Field(
        None, description="keep the response for previous_response_id (default true)"
    )
    max_output_tokens: Limit | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=512)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = Field(None, description=TRUNCATION)
    include: list[str] | None = Field(
        None, description="message.output_text.logprobs; others change nothing here"
    )
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream_options: dict[str, Any] | None = None

    def answer_tokens(self) -> int | None:
        return first_limit(self.max_output_tokens)

    def alternatives(self) -> int | None:
        wanted = "message.output_text.logprobs" in (self.include or ())
        return 0 if wanted and self.top_logprobs is None else self.top_logprobs


def chat_request(
    fields: ResponsesFields, default: Sampling, items: Sequence[Any], toolbox: Toolbox
) -> tuple[ChatRequest, list[str]]:
    """The chat request of `items`, and the names of tools and items that were skipped."""
    skipped = list(toolbox.skipped)
    messages = _messages(items, skipped)
    if fields.instructions:
        messages.insert(0, {"role": "system", "content": fields.instructions})
    if not any(m["role"] != "system" for m in messages):
        messages.append({"role": "user", "content": ""})  # Codex probes with an empty input
    tools, choice = toolbox.chosen(fields.tool_choice)
    options = ResponseOptions(
        tools=tools,
        choice=choice,
        parallel=fields.parallel_tool_calls is not False,
        grammar=fields.constraint((fields.text or {}).get("format")),
        **fields.reasoning_options(),
    )
    generation = fields.generation(default)
    return ChatRequest(
        normalise(messages, skipped), generation, options, compaction=fields.truncation == "auto"
    ), skipped


def input_items(fields: ResponsesFields, store: ResponseStore) -> tuple[list[Any], list[Any]]:
    """The items before this request (of `previous_response_id`), and its own input, with references
    to stored items resolved."""
    before: list[Any] = []
    if fields.previous_response_id:
        stored = store.get(fields.previous_response_id)
        before = [*stored.given, *stored.body["output"]]
    elif fields.input is None:
        raise RequestError(
            "input is missing: send a text, items or a previous_response_id", param="input"
        )
    if isinstance(fields.input, str):
        return before, [{"type": "message", "role": "user", "content": fields.input}]
    return before, [
        _stored(item, f"input[{i}]", store) for i, item in enumerate(fields.input or [])
    ]


def _stored(item: Any, where: str, store: ResponseStore) -> Any:
    if not isinstance(item, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    reference = item.get("type") == "item_reference" or set(item) == {"id"}
    return store.item(str(item.get("id")), where) if reference else item


def _messages(items: Sequence[Any], skipped: list[str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    reasoning_text = ""
    for item in items:
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            message = {"role": item.get("role"), "content": item.get("content")}
            if reasoning_text and item.get("role") == "assistant":
                message["reasoning_content"] = reasoning_text
            reasoning_text = ""
            messages.append(message)
        elif kind in ("function_call", "custom_tool_call"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(_call(item, kind))
            if reasoning_text:
                messages[-1]["reasoning_content"] = reasoning_text
                reasoning_text = ""
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": item.get("call_id"),
                    "content": _output(item.get("output")),
                }
            )
        elif kind == "reasoning":
            reasoning_text = _reasoning(item)
        else:
            skipped.append(f"input.{kind}")
    return messages


def _call(item: Mapping[str, Any], kind: str) -> dict[str, Any]:
    arguments = item.get("arguments") if kind == "function_call" else {INPUT: item.get("input")}
    name = flat_name(item.get("name"), item.get("namespace"))
    return {"id": item.get("call_id"), "function": {"name": name, "arguments": arguments}}


def _reasoning(item: Mapping[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    return "\n".join(str(p.get("text", "")) for p in parts if isinstance(p, Mapping))


def _output(output: Any) -> Any:
    return output if isinstance(output, (str, list)) or output is None else json.dumps(output)
