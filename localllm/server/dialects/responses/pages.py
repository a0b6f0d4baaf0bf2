"""Lists of stored items, a page at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from localllm.server.dialects.fields import Body


class PageFields(Body):
    """What the address of a list may say."""

    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = Field(None, description="an item's id: the page begins behind it")


def page(listed: Sequence[Mapping[str, Any]], wanted: PageFields) -> dict[str, Any]:
    """The part of `listed`, which is in the order of the conversation, that `wanted` asks for."""
    found = list(listed) if wanted.order == "asc" else list(reversed(listed))
    begin = next((i + 1 for i, item in enumerate(found) if item["id"] == wanted.after), 0)
    end = begin + wanted.limit
    return listing(found[begin:end], has_more=end < len(found))


def listing(shown: Sequence[Mapping[str, Any]], *, has_more: bool = False) -> dict[str, Any]:
    """OpenAI's list object of `shown`."""
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": has_more}
