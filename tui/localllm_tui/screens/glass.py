"""The glass panel on a screen of its own, where the terminal is too narrow to show it beside the conversation."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from localllm_tui.bindings import bindings_of
from localllm_tui.control.keys import GLASS, Moment, hints
from localllm_tui.control.physics import PANEL_WIDTH, Physics, Seen, panel_lines

_LOOK_S = 0.25


class GlassScreen(ModalScreen[None]):
    """Asks `read` for the figures again and again while it is open."""

    DEFAULT_CSS = f"""
    GlassScreen {{ align: center middle; }}
    GlassScreen > VerticalScroll {{
        width: {PANEL_WIDTH + 8}; max-width: 100%; height: auto; max-height: 100%;
        border: round $accent; padding: 0 2; background: $surface;
    }}
    GlassScreen Static {{ text-wrap: nowrap; }}
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings_of(GLASS)

    def __init__(self, read: Callable[[], tuple[Physics | None, Seen | None]]) -> None:
        super().__init__()
        self._read = read

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_subtitle = hints(Moment.HELP)
            yield Static("", markup=False)

    def on_mount(self) -> None:
        self._draw()
        self.set_interval(_LOOK_S, self._draw)

    def action_close(self) -> None:
        self.dismiss(None)

    def _draw(self) -> None:
        self.query_one(Static).update("\n".join(panel_lines(*self._read())))
