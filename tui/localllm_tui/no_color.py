"""A screen without any colour, for those who set NO_COLOR: Textual alone would turn the colours into greys."""

from __future__ import annotations

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter


class NoColors(LineFilter):
    """Leaves of each style what is no colour: bold, dim, underline, reverse."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(text, style and style.without_color, control) for text, style, control in segments]


# Where a colour alone says something, reverse says it then.
CSS = """
TextArea:nocolor .text-area--cursor { text-style: reverse; }
TextArea:nocolor .text-area--selection { text-style: reverse; }
Input:nocolor > .input--cursor { text-style: reverse; }
OptionList:nocolor > .option-list--option-highlighted { text-style: reverse; }
Screen:nocolor .screen--selection { text-style: reverse; }
"""
