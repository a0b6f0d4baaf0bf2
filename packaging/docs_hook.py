"""A hook of the site: links to files that are not pages become plain text."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+(?!guide/)(?![\w-]+\.md)[^)]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links to files outside docs/, such as `[text](../tests/x.py)`, by their text. Pages in
    docs/guide link only to pages."""
    return markdown if page.file.src_uri.startswith("guide/") else _OUTSIDE.sub(r"\1", markdown)
