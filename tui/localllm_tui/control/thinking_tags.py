"""Thinking that a server sends in the answer's text, between <think> tags."""

from __future__ import annotations

_OPEN = "<think>"
_CLOSE = "</think>"
# Characters before an opening tag. A longer beginning is text, since each piece is looked at again.
_MAX_BLANKS = 100


class ThinkingTags:
    """Divides the pieces of an answer into thinking and text. Only tags at the beginning count."""

    def __init__(self) -> None:
        self._kept = ""  # text that may be the beginning of a tag
        self._state = "begin"  # then "thinking", then "after" up to the first letter, then "text"

    def feed(self, piece: str) -> tuple[str, str]:
        """The thinking and the text of this piece."""
        if self._state == "text":
            return "", piece
        thinking = ""
        text = self._kept + piece
        self._kept = ""
        if self._state == "begin":
            text = self._after_open_tag(text)
        if self._state == "thinking":
            thinking, text = self._thought(text)
        if self._state == "after":
            text = text.lstrip()
            if text:
                self._state = "text"
        return thinking, text

    def end(self) -> tuple[str, str]:
        """The rest."""
        pending = self._kept
        self._kept = ""
        if self._state == "thinking":
            return pending, ""
        return "", pending

    def _after_open_tag(self, text: str) -> str:
        """The text after an opening tag, or all of it if it does not begin with one."""
        begin = text.lstrip()
        if begin.startswith(_OPEN):
            self._state = "thinking"
            return begin.removeprefix(_OPEN).lstrip()
        if _OPEN.startswith(begin) and len(text) <= _MAX_BLANKS:
            self._kept = text
            return ""
        self._state = "text"
        return text

    def _thought(self, text: str) -> tuple[str, str]:
        thinking, close, rest = text.partition(_CLOSE)
        if close:
            self._state = "after"
            return thinking.rstrip(), rest
        whole = len(thinking)
        for n in range(min(len(_CLOSE) - 1, whole), 0, -1):
            if _CLOSE.startswith(thinking[whole - n :]):
                self._kept = thinking[whole - n :]
                return thinking[: whole - n], ""
        return thinking, ""
