"""Past responses, kept in memory for `previous_response_id` and for references to their items."""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.errors import NotFoundError, RequestError

_MAX_STORED, _MAX_STORED_CHARS = 256, 64 * 2**20
_KEPT = "responses are kept in memory until the server stops; send the whole conversation"


class PreviousResponseError(NotFoundError):
    """`previous_response_id` names a response that is not stored here (any more)."""

    code = "previous_response_not_found"
    default_hint = _KEPT


@dataclass(frozen=True, slots=True)
class _Kept:
    """One response, the items before it, those of its own request, and how long all are as JSON."""

    body: dict[str, Any]
    before: Sequence[dict[str, Any]]
    sent: Sequence[dict[str, Any]]
    chars: int


class Store:
    """Past responses, in memory only: each one's whole conversation, the oldest forgotten first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._items: dict[str, dict[str, Any]] = {}
        self._chars = 0

    def put(self, body: dict[str, Any], before: Sequence[Mapping[str, Any]], sent: Sequence[Mapping[str, Any]]) -> None:
        """Keep a finished response with the input items that led to it: those of earlier responses, then its own."""
        own: list[dict[str, Any]] = [{**item, "id": item.get("id") or f"msg_{secrets.token_hex(12)}"} for item in sent]
        earlier = list(map(dict, before))
        kept = _Kept(body, earlier, own, len(json.dumps([earlier, own, body["output"]])))
        self._kept[body["id"]] = kept
        for item in (*own, *body["output"]):
            self._items[item["id"]] = item
        self._chars += kept.chars
        while len(self._kept) > _MAX_STORED or (self._chars > _MAX_STORED_CHARS and self._kept):
            self._forget(next(iter(self._kept)))

    def items(self, response_id: str) -> list[dict[str, Any]]:
        """The conversation up to and including that response; raises PreviousResponseError."""
        kept = self._get(response_id)
        return [*kept.before, *kept.sent, *kept.body["output"]]

    def sent(self, response_id: str) -> Sequence[dict[str, Any]]:
        """The input items of that response, those before it included; raises PreviousResponseError."""
        kept = self._get(response_id)
        return [*kept.before, *kept.sent]

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
        kept = self._kept.pop(response_id)
        self._chars -= kept.chars
        for item in (*kept.sent, *kept.body["output"]):
            key = item["id"]
            if self._items.get(key) is item:
                del self._items[key]

    def _get(self, response_id: str) -> _Kept:
        if response_id not in self._kept:
            raise PreviousResponseError(
                f"no response {response_id[:80]!r} is stored here", param="previous_response_id"
            )
        return self._kept[response_id]
