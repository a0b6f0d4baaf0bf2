"""The glass panel beside the conversation: it folds away by itself where the terminal is too narrow for both."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from localllm_tui.control.physics import PANEL_WIDTH, AnswerSpeed, ModelPhysics, panel_lines

# Narrower, the panel would leave the conversation less than 60 columns.
LEAST_COLUMNS = 100


def glass_text(lines: list[str]) -> Content:
    """The panel's lines: its heads bold, its bars in the theme's accent."""
    text = Content("\n".join(lines)).highlight_regex(r"(?m)^[A-Z]{4,}[A-Z ]*", style="bold")
    return text.highlight_regex("[▁-▏]+", style="$accent-text")


class GlassPanel(Static):
    """Shows what `show` was last told; hidden until asked for."""

    DEFAULT_CSS = f"""
    GlassPanel {{
        dock: right; width: {PANEL_WIDTH + 6}; height: 1fr; padding: 1 2; display: none;
        border-left: solid $panel; overflow-y: auto; text-wrap: nowrap;
    }}
    GlassPanel.wanted {{ display: block; }}
    GlassPanel.wanted.narrow {{ display: none; }}
    """

    def __init__(self) -> None:
        super().__init__("", id="glass", markup=False)
        self.physics: ModelPhysics | None = None
        self.speed: AnswerSpeed | None = None
        self.loading_words = ""

    @property
    def wanted(self) -> bool:
        return self.has_class("wanted")

    def toggle(self) -> bool:
        """Ask for it, or no longer; True where it is asked for now."""
        self.toggle_class("wanted")
        self._draw()
        return self.wanted

    def fold(self, *, narrow: bool) -> None:
        """Make room for the conversation where the terminal is `narrow`."""
        self.set_class(narrow, "narrow")

    def show(self, physics: ModelPhysics | None, speed: AnswerSpeed | None, loading: str = "") -> None:
        if (physics, speed, loading) != (self.physics, self.speed, self.loading_words):
            self.physics, self.speed, self.loading_words = physics, speed, loading
            self._draw()

    def _draw(self) -> None:
        if self.wanted:
            lines = panel_lines(self.physics, self.speed, loading=self.loading_words)
            self.update(glass_text(lines))
