"""Stored responses, in memory only, least recently used evicted first."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from localllm.errors import NotFoundError, RequestError
from localllm.server.dialects.fields import RequestBody
from localllm.server.http.asgi import new_id

# Entries, and characters as JSON.
_MAX_ENTRIES, _MAX_CHARS = 256, 64 * 2**20
_KEPT = "responses are kept in memory until the server stops; send the whole conversation"


# How the ids of items begin, by type.
_ID_HEADS = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco", "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}  # fmt: skip


def typed(item: Mapping[str, Any]) -> dict[str, Any]:
    """A sent item as it is kept and shown: with all that OpenAI's types of a stored one have, which a client may leave out."""
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


class PreviousResponseError(NotFoundError):
    """`previous_response_id` names a response that is not stored here (any more)."""

    code = "previous_response_not_found"
    default_hint = _KEPT


@dataclass(frozen=True, slots=True)
class _StoredResponse:
    """A response, the items before it, those of its own request, and the length of all as JSON."""

    body: dict[str, Any]
    before: Sequence[dict[str, Any]]
    sent: Sequence[dict[str, Any]]
    chars: int


class ResponseStore:
    """Past responses with their whole conversations."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _StoredResponse] = OrderedDict()
        self._items: dict[str, dict[str, Any]] = {}
        self._chars = 0

    def put(self, body: dict[str, Any], before: Sequence[Mapping[str, Any]], sent: Sequence[Mapping[str, Any]]) -> None:
        """Store a finished response with its input items: those of earlier responses, then its own."""
        own = list(map(typed, sent))
        earlier = list(map(dict, before))
        stored = _StoredResponse(body, earlier, own, len(json.dumps([earlier, own, body["output"]])))
        self._entries[body["id"]] = stored
        for item in (*own, *body["output"]):
            self._items[item["id"]] = item
        self._chars += stored.chars
        while len(self._entries) > _MAX_ENTRIES or (self._chars > _MAX_CHARS and self._entries):
            self._forget(next(iter(self._entries)))

    def items(self, response_id: str) -> list[dict[str, Any]]:
        """The conversation up to and including that response; raises PreviousResponseError."""
        stored = self._get(response_id)
        return [*stored.before, *stored.sent, *stored.body["output"]]

    def sent(self, response_id: str) -> Sequence[dict[str, Any]]:
        """The input items of that response, with those before it; raises PreviousResponseError."""
        stored = self._get(response_id)
        return [*stored.before, *stored.sent]

    def item(self, item_id: str, where: str) -> dict[str, Any]:
        """The item that `where` refers to; raises RequestError."""
        item = self._items.get(item_id)
        if item is None:
            raise RequestError(
                f"{where}: the item {item_id[:80]!r} is not stored here",
                hint="send the item itself, or previous_response_id; " + _KEPT,
                param=where,
            )
        return item

    def body(self, response_id: str) -> dict[str, Any]:
        """The response object; raises PreviousResponseError."""
        return self._get(response_id).body

    def drop(self, response_id: str) -> None:
        """Forget it; raises PreviousResponseError."""
        self._get(response_id)
        self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        stored = self._entries.pop(response_id)
        self._chars -= stored.chars
        for item in (*stored.sent, *stored.body["output"]):
            key = item["id"]
            if self._items.get(key) is item:
                del self._items[key]

    def _get(self, response_id: str) -> _StoredResponse:
        if response_id not in self._entries:
            raise PreviousResponseError(
                f"no response {response_id[:80]!r} is stored here", param="previous_response_id"
            )
        return self._entries[response_id]


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
    return {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": end < len(found)}
