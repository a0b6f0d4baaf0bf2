"""Past responses, kept in memory for `previous_response_id`."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.errors import NotFoundError

_MAX_STORED, _MAX_STORED_CHARS = 256, 64 * 2**20


class PreviousResponseError(NotFoundError):
    """`previous_response_id` names a response that is not stored here (any more)."""

    code = "previous_response_not_found"
    default_hint = "responses are kept in memory until the server stops; send the whole conversation"


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
