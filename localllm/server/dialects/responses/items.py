"""The body of POST /v1/responses, its translation to a chat request, and the store of responses.
The store is in memory only and evicts the least recently used response first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar

from pydantic import ConfigDict, Field

from localllm.errors import NotFoundError, RequestError
from localllm.server.dialects.fields import Alternatives, Limit, SentTools, Truncation
from localllm.server.dialects.known import (
    FORM,
    PART,
    READS,
    REFUSED,
    Refused,
    Shape,
    Unused,
    indifferent,
    one_of,
    shape,
    shape_of,
)
from localllm.server.dialects.thinking import ReasonedFields, ReasoningFields
from localllm.server.dialects.toolbox import INPUT, flat_name
from localllm.server.dialects.wire import TelemetryFields
from localllm.server.http.asgi import new_id
from localllm.server.http.recent import RecentlyUsed

# Limits of the store: entries, and bytes of memory.
_MAX_ENTRIES = 256
_MAX_BYTES = 64 * 2**20
# Memory of a value besides the characters of its JSON, about.
_VALUE_BYTES = 64
_STORAGE_HINT = (
    "responses are stored in memory and are lost when the server stops; send "
    "the complete conversation"
)
# Beginning of item ids, by type.
_ID_HEADS = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
}
# Types of items that hold a compacted conversation; the second is Codex's former name. They are
# read in compaction.py.
COMPACTIONS = ("compaction", "compaction_summary")
# Type of the item that asks for a compaction.
TRIGGER = "compaction_trigger"


def typed(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sent item as it is stored and shown. Fields that OpenAI's types of stored items
    require, and that clients may leave out, are added."""
    kind = item.get("type") or "message"
    stored_item: dict[str, Any] = {"id": new_id(_ID_HEADS.get(kind, "item") + "_")}
    if kind == "reasoning":
        stored_item["summary"] = []
    elif kind not in COMPACTIONS:
        stored_item["status"] = "completed"
    stored_item |= {name: value for name, value in item.items() if value is not None}
    stored_item["type"] = kind
    if kind == "message":
        content = item.get("content") or ""
        if not isinstance(content, list):
            by_model = item.get("role") == "assistant"
            content = [{"type": "output_text" if by_model else "input_text", "text": content}]
        stored_item["content"] = [_typed_part(part) for part in content]
    return stored_item


def _typed_part(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    match part.get("type"):
        case "output_text":
            return {"annotations": [], "logprobs": [], **part}
        case "input_image":
            return {"detail": "auto", **part}
    return part


class PreviousResponseError(
    NotFoundError, code="previous_response_not_found", default_hint=_STORAGE_HINT
):
    """`previous_response_id` names a response that is not stored here, or is no longer stored."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, the items that it answers (those of earlier responses first), and the memory that
    both take, estimated from their JSON."""

    body: dict[str, Any]
    input_items: Sequence[dict[str, Any]]
    size_bytes: int


class ResponseStore:
    """Past responses with their complete conversations."""

    def __init__(self) -> None:
        self._entries: RecentlyUsed[str, StoredResponse] = RecentlyUsed(
            _MAX_ENTRIES, _MAX_BYTES, attrgetter("size_bytes")
        )

    def put(self, body: dict[str, Any], items: Sequence[Mapping[str, Any]]) -> None:
        """Store a finished response with the items that it answers."""
        given = [typed(item) for item in items]
        text = json.dumps([given, body])
        size_bytes = len(text) + _VALUE_BYTES * sum(map(text.count, "[{,"))
        self._entries.put(body["id"], StoredResponse(body, given, size_bytes))

    def items(self, ids: Set[str]) -> dict[str, dict[str, Any]]:
        """Return the stored items with these ids, by id."""
        found: dict[str, dict[str, Any]] = {}
        for stored in self._entries.values():
            for item in chain(stored.input_items, stored.body["output"]):
                if isinstance(item["id"], str) and item["id"] in ids:
                    found[item["id"]] = item
        return found

    def drop(self, response_id: str) -> None:
        """Remove a response. Raises PreviousResponseError."""
        self.get(response_id)
        self._entries.pop(response_id)

    def get(self, response_id: str) -> StoredResponse:
        """Return a response. Raises PreviousResponseError."""
        stored = self._entries.get(response_id)
        if stored is None:
            raise PreviousResponseError(
                f"this server does not store the response {response_id[:80]!r}",
                param="previous_response_id",
            )
        return stored


# The only value of `include` with an effect.
_LOGPROBS = "message.output_text.logprobs"
_ITEM = shape(
    "type", "role", "id", "call_id", "name", "namespace", "arguments", "input",
    status=indifferent("in_progress", "completed", "incomplete"),
    content=PART, output=PART, summary=shape("text", type=one_of("summary_text")),
    encrypted_content=Unused(off=(None, "")),
)  # fmt: skip
# A tuple, because a client may send a type that is a list, which no set can look up.
_READ = tuple(kind for kind in (None, *_ID_HEADS, "item_reference") if kind not in COMPACTIONS)
_ITEM[READS] = _READ.__contains__


_REFUSED: Shape = {
    "n": REFUSED["n"],
    "background": Refused("background responses are not supported", (None, False)),
    "prompt": Refused("stored prompts are not supported"),
    "conversation": Refused("stored conversations are not supported; send previous_response_id"),
    "context_management": Refused(
        "the server compacts only on request; send a compaction_trigger, or truncation: auto",
        (None, []),
    ),
}


class ResponsesFields(ReasonedFields, TelemetryFields):
    """POST /v1/responses. The response object may also show values that are not fields here."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())
    shapes: ClassVar[Shape] = {
        **ReasonedFields.shapes,
        **_REFUSED,
        "input": _ITEM,
        "reasoning": shape_of(ReasoningFields),
        "text": {"format": FORM, "verbosity": Unused(off=(None, "medium"))},
        "prompt_cache_key": Unused(),
        "stream_options": {"include_obfuscation": Unused()},
        "client_metadata": None,
        "max_tool_calls": None,
    }
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    store: bool | None = Field(
        None, description="store the response for previous_response_id (default: true)"
    )
    max_output_tokens: Limit | None = None
    tools: SentTools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    truncation: Truncation = None
    include: list[str] | None = Field(
        None, description="message.output_text.logprobs; other values have no effect"
    )
    top_logprobs: Alternatives | None = None
    stream_options: dict[str, Any] | None = None

    def constraint_field(self) -> str:
        has_format = self.text is not None and self.text.get("format") is not None
        return "text.format" if has_format else super().constraint_field()

    def not_included(self) -> list[str]:
        """Return the names of `include` values without effect."""
        return [f"include.{value}" for value in self.include or () if value != _LOGPROBS]

    def alternatives(self) -> int | None:
        """Return the number of alternatives per token to report. None means no
        log-probabilities."""
        wanted = _LOGPROBS in (self.include or ())
        if wanted and self.top_logprobs is None:
            return 0
        return self.top_logprobs


def input_items(fields: ResponsesFields, store: ResponseStore) -> list[Any]:
    """Return the items to answer: those of `previous_response_id`, then the request's own.
    References to stored items are resolved. Raises RequestError."""
    before: list[Any] = []
    if fields.previous_response_id:
        stored = store.get(fields.previous_response_id)
        before = [*stored.input_items, *stored.body["output"]]
    elif fields.input is None:
        raise RequestError(
            "input is missing: send a text, items or a previous_response_id", param="input"
        )
    if isinstance(fields.input, str):
        return [*before, {"type": "message", "role": "user", "content": fields.input}]
    sent = fields.input or []
    stored_items = store.items(set(filter(None, map(_reference, sent))))
    return [*before, *(_resolved(item, f"input[{i}]", stored_items) for i, item in enumerate(sent))]


def _reference(item: Any) -> str | None:
    """Return the id of the stored item that `item` refers to, or None."""
    if isinstance(item, Mapping) and (item.get("type") == "item_reference" or set(item) == {"id"}):
        return str(item.get("id"))
    return None


def _resolved(item: Any, where: str, stored_items: dict[str, dict[str, Any]]) -> Any:
    """Return the item itself. It is taken out of `stored_items`, because several references to a
    long item would take any amount of memory. Raises RequestError."""
    if not isinstance(item, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    item_id = _reference(item)
    if item_id is None:
        return item
    if item_id not in stored_items:
        raise RequestError(
            f"{where}: this server does not store the item {item_id[:80]!r}, or another reference "
            "stands for it",
            hint="send the item itself, or previous_response_id; " + _STORAGE_HINT,
            param=where,
        )
    return stored_items.pop(item_id)


def messages_of(items: Sequence[Any], skipped: list[str]) -> list[dict[str, Any]]:
    """Return the conversation in `items`. The names of items that do not belong to a conversation
    are added to `skipped`."""
    messages: list[dict[str, Any]] = []
    reasoning_text = ""
    for item in items:
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "reasoning":
            reasoning_text = _reasoning(item)
            continue
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind in ("function_call", "custom_tool_call"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(_call(item, kind))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.append(_output(item))
        else:
            skipped.append(f"input.{kind}")
            continue
        if reasoning_text and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = reasoning_text
        reasoning_text = ""
    return messages


def _call(item: Mapping[str, Any], kind: str) -> dict[str, Any]:
    arguments = item.get("arguments")
    if kind == "custom_tool_call":
        arguments = {INPUT: item.get("input")}
    name = flat_name(item.get("name"), item.get("namespace"))
    return {"id": item.get("call_id"), "function": {"name": name, "arguments": arguments}}


def _output(item: Mapping[str, Any]) -> dict[str, Any]:
    content = item.get("output")
    if content is not None and not isinstance(content, str | list):
        content = json.dumps(content)
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}


def _reasoning(item: Mapping[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    return "\n".join(str(p.get("text", "")) for p in parts if isinstance(p, Mapping))
