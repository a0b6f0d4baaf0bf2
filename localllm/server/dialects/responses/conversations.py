"""Conversations that the server keeps for its clients (OpenAI's Conversations API)."""

from __future__ import annotations

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from localllm.errors import NotFoundError
from localllm.server.dialects.fields import Body

_MAX_KEPT, _MAX_KEPT_CHARS = 256, 64 * 2**20
Items = Annotated[list[dict[str, Any]], Field(max_length=512)]


class ConversationNotFoundError(NotFoundError):
    """No such conversation, or item of it, is kept here (any more)."""

    code = "conversation_not_found"
    default_hint = "conversations are kept in memory until the server stops; create one, or send the whole input"


class ConversationFields(Body):
    """POST /v1/conversations."""

    items: Items = Field(default_factory=list)
    metadata: dict[str, Any] = Field(default_factory=dict)


class MetadataFields(Body):
    """POST /v1/conversations/{id}."""

    metadata: dict[str, Any]


class ItemsFields(Body):
    """POST /v1/conversations/{id}/items."""

    items: Items


class Conversations:
    """Conversations in memory, the one longest unused forgotten first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = OrderedDict()
        self._chars: dict[str, int] = {}

    def create(self, sent: ConversationFields) -> dict[str, Any]:
        """A new one; returns its object."""
        name = "conv_" + secrets.token_hex(12)
        body = {"id": name, "object": "conversation", "created_at": int(time.time()), "metadata": sent.metadata}
        self._kept[name] = (body, [])
        self._chars[name] = 0
        self.add(name, sent.items)
        return body

    def body(self, conversation_id: str) -> dict[str, Any]:
        """Its object; raises ConversationNotFoundError."""
        return self._get(conversation_id)[0]

    def items(self, conversation_id: str) -> list[dict[str, Any]]:
        """Its items so far; raises ConversationNotFoundError."""
        return list(self._get(conversation_id)[1])

    def add(self, conversation_id: str, items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Put `items` at its end, each with an id; returns them so. Raises ConversationNotFoundError."""
        added = [{**item, "id": item.get("id") or f"msg_{secrets.token_hex(12)}"} for item in items]
        self._get(conversation_id)[1].extend(added)
        self._chars[conversation_id] += len(json.dumps(added))
        while len(self._kept) > _MAX_KEPT or (sum(self._chars.values()) > _MAX_KEPT_CHARS and self._kept):
            self.drop(next(iter(self._kept)))
        return added

    def drop(self, conversation_id: str) -> None:
        """Forget it; raises ConversationNotFoundError."""
        self._get(conversation_id)
        del self._kept[conversation_id], self._chars[conversation_id]

    def item(self, conversation_id: str, item_id: str) -> dict[str, Any]:
        """One of its items; raises ConversationNotFoundError."""
        found = next((i for i in self._get(conversation_id)[1] if i["id"] == item_id), None)
        if found is None:
            raise ConversationNotFoundError(f"this conversation has no item {item_id[:80]!r}", param="item_id")
        return found

    def drop_item(self, conversation_id: str, item_id: str) -> dict[str, Any]:
        """Take out one item; returns the conversation's object. Raises ConversationNotFoundError."""
        found = self.item(conversation_id, item_id)
        body, items = self._kept[conversation_id]
        items.remove(found)
        return body

    def _get(self, conversation_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        if conversation_id not in self._kept:
            raise ConversationNotFoundError(
                f"no conversation {conversation_id[:80]!r} is kept here", param="conversation"
            )
        self._kept.move_to_end(conversation_id)
        return self._kept[conversation_id]
