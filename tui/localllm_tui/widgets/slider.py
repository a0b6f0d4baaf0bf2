"""A choice among a few values in one line, moved with the arrows or a click: a scale, or a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from textual.message import Message
from textual.widgets import Static

from localllm_tui.bindings import HasKeys
from localllm_tui.control.formatting import elide
from localllm_tui.control.keys import SLIDER

T = TypeVar("T")
_LABEL = 12
_MIN_TRACK = 4


class Slider(HasKeys, Static, Generic[T], keys=SLIDER):
    """A choice of one value. Posts Moved when the value changes. `key` moves it from any widget of
    its screen and is shown after its label; a `scale` goes from little to much, other values have
    no order."""

    DEFAULT_CSS = """
    Slider { height: 1; width: 1fr; }
    Slider:focus { text-style: bold; color: $accent-text; }
    """
    can_focus = True

    class Moved(Message):
        """Another value was chosen."""

    def __init__(
        self,
        label: str,
        key: str,
        values: Sequence[T],
        words: Callable[[T], str],
        *,
        value: T,
        name: str,
        scale: bool = True,
    ) -> None:
        super().__init__("", id=name, markup=False)
        self.label = f"{label} {key}"
        self.values = list(values)
        self.words = words
        self.scale = scale
        self._at = self.values.index(value)

    @property
    def value(self) -> T:
        return self.values[self._at]

    def choose(self, value: T) -> None:
        """Choose a value. A value that is not in the list is added."""
        if value not in self.values:
            self.values.append(value)
        self._to(self.values.index(value))

    def action_move(self, step: int) -> None:
        self._to(max(0, min(len(self.values) - 1, self._at + step)))

    def action_next(self) -> None:
        """Choose the next value; after the last the first."""
        self._to((self._at + 1) % len(self.values))

    def _to(self, at: int) -> None:
        if at != self._at:
            self._at = at
            self._draw()
            self.post_message(self.Moved())

    def on_resize(self) -> None:
        self._draw()

    def on_click(self) -> None:
        self.focus()
        self.action_next()

    def _track(self) -> int:
        words_width = max(len(self.words(v)) for v in self.values)
        return max(_MIN_TRACK, min(24, self.size.width - _LABEL - 2 - min(words_width, 18)))

    def _draw(self) -> None:
        drawn = f"‹ {self.words(self.value)} ›"
        if self.scale:
            track = self._track()
            knob = round(self._at / max(1, len(self.values) - 1) * (track - 1))
            line = "━" * knob + "●" + "─" * (track - knob - 1)
            drawn = f"{line} {self.words(self.value)}"
        track_width = max(4, self.size.width - _LABEL)
        self.update(f"{self.label:<{_LABEL}}{elide(drawn, track_width)}")
