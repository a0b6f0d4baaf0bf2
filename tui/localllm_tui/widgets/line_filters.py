"""Text from models, tools and files is shown, never obeyed: frames without markup, lines without control characters; NO_COLOR."""

from __future__ import annotations

from rich.segment import Segment
from rich.text import Text
from textual.color import Color
from textual.content import Content
from textual.filter import LineFilter

from localllm_tui.control.terminal import printable


class NoControls(LineFilter):
    """Removes control characters from every line on its way to the terminal, whichever widget drew it."""

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


class NoColors(LineFilter):
    """Removes colours from each style; bold, dim, underline and reverse stay."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(text, style and style.without_color, control) for text, style, control in segments]


# Where a colour alone marks something, reverse marks it instead.
CSS = """
TextArea:nocolor .text-area--cursor { text-style: reverse; }
TextArea:nocolor .text-area--selection { text-style: reverse; }
Input:nocolor > .input--cursor { text-style: reverse; }
OptionList:nocolor > .option-list--option-highlighted { text-style: reverse; }
Screen:nocolor .screen--selection { text-style: reverse; }
"""
