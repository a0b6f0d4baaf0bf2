"""Images that go with a question: Markdown images of their data in its text, parts of the message for the server."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any

_STARTS = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF87a", "gif"), (b"GIF89a", "gif"))
_MARKED = re.compile(r"!\[([^\]\n]*)\]\((data:image/[a-z]+;base64,[A-Za-z0-9+/=]+)\)\n*")


def data_url(data: bytes) -> str:
    """A file's content as an address, where it begins as an image does that servers read; else ""."""
    kind = next((kind for start, kind in _STARTS if data.startswith(start)), "")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "webp"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}" if kind else ""


def is_image(text: str) -> bool:
    """Whether an attached file's text is an image's address."""
    return text.startswith("data:image/")


def in_markdown(name: str, url: str) -> str:
    """An attached image in a question's text."""
    return f"![{re.sub(r'[^-_.0-9A-Za-z ]', '_', name)}]({url})"


def urls_in(markdown: str) -> list[str]:
    """The addresses of the images in a question's text."""
    return [found.group(2) for found in _MARKED.finditer(markdown)]


def as_sent(messages: Sequence[Mapping[str, Any]], *, items: bool = False) -> list[Mapping[str, Any]]:
    """`messages` with the images in questions as parts, as /v1/chat/completions reads them (`items`: /v1/responses)."""
    return [_in_parts(m, items=items) for m in messages]


def _in_parts(message: Mapping[str, Any], *, items: bool) -> Mapping[str, Any]:
    content = message.get("content")
    if message.get("role") != "user" or not isinstance(content, str) or not _MARKED.search(content):
        return message
    parts: list[dict[str, Any]] = []
    at = 0
    for found in _MARKED.finditer(content):
        before = content[at : found.start()].strip("\n")
        parts += [_text(before, items=items)] if before else []
        if items:
            parts.append({"type": "input_image", "image_url": found.group(2)})
        else:
            parts.append({"type": "image_url", "image_url": {"url": found.group(2)}})
        at = found.end()
    rest = content[at:]
    return {**message, "content": [*parts, *([_text(rest, items=items)] if rest else [])]}


def _text(text: str, *, items: bool) -> dict[str, Any]:
    return {"type": "input_text" if items else "text", "text": text}
