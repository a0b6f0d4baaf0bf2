"""Text from models, tools and files is shown, never interpreted: frames without markup, lines
without control characters; NO_COLOR."""

from __future__ import annotations

from functools import lru_cache

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.content import Content
from textual.filter import LineFilter

from localllm_tui.control.terminal import printable
from localllm_tui.widgets.contrast import contrast


class NoControls(LineFilter):
    """Removes control characters from every line on its way to the terminal, whichever widget drew
    it."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        # nearly always true, and much faster than a search
        if all(text.isprintable() for text, _, _ in segments):
            return segments
        return [Segment(printable(text), style, control) for text, style, control in segments]


def frame_title(text: str) -> Content:
    """The title of a frame or fold, without the markup that Textual would look for in a plain
    string."""
    return Content(printable(text))


class NoColors(LineFilter):
    """Removes colours from each style; bold, dim, underline and reverse remain. Text on another
    background, such as a cursor of a list or a selection, is reversed, because only a colour marks
    it."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            Segment(text, style and _uncoloured(style, background), control)
            for text, style, control in segments
        ]


# Minimum contrast of a cursor with the background. Panels and shades of code have less.
_MIN_CONTRAST = 2.0


@lru_cache(maxsize=1024)
def _uncoloured(style: Style, background: Color) -> Style:
    ground = style.bgcolor
    if style.reverse or ground is None or ground.is_default:
        return style.without_color
    if contrast(Color.from_rich_color(ground), background) < _MIN_CONTRAST:
        return style.without_color
    return style.without_color + Style(reverse=True)


# Cursors that are only a shade or a text colour. NoColors reverses those with another background.
CSS = """
TextArea:nocolor .text-area--cursor { text-style: reverse; }
TextArea:nocolor .text-area--selection { text-style: reverse; }
Input:nocolor > .input--cursor { text-style: reverse; }
OptionList:nocolor > .option-list--option-highlighted { background: $foreground; color: $background; }
Slider:nocolor:focus { background: $foreground; color: $background; }
Screen:nocolor .screen--selection { text-style: reverse; }
"""
