"""Text of others (a model's, a tool's, a file's name) on its way to the terminal: it is shown, and never obeyed."""

from __future__ import annotations

from rich.segment import Segment
from rich.text import Text
from textual.color import Color
from textual.content import Content
from textual.filter import LineFilter

from localllm_tui.control.terminal import printable


class NoControls(LineFilter):
    """The last gate before the terminal: whichever widget forgot, no control character passes."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        if all(text.isprintable() for text, _, _ in segments):  # nearly always, and much faster than to look for them
            return segments
        return [Segment(printable(text), style, control) for text, style, control in segments]


def title(text: str) -> Text:
    """A frame's title without the markup that Textual would look for in a plain string."""
    return Text(printable(text))


def label(text: str) -> Content:
    """The same for a fold's title."""
    return Content(printable(text))
