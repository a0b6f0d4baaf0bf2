"""The common look of the apps: readable colours, thin scrollbars, lines without control
characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from textual.app import App
from textual.driver import Driver
from textual.filter import LineFilter

from localllm_tui import paste_input, terminal_writer
from localllm_tui.widgets.contrast import readable_tokens
from localllm_tui.widgets.line_filters import CSS as NO_COLOR_CSS
from localllm_tui.widgets.line_filters import NoColors, NoControls

T = TypeVar("T")

# Each line keeps what a filter made of it, by the filter. With new filters for each frame, a key
# would filter all lines of the screen again.
_NO_CONTROLS, _NO_COLORS = NoControls(), NoColors()


class LookApp(App[T]):
    """Adds the text colours `$hint` and `$accent-text`, which are readable in each theme, to the
    variables of them."""

    CSS = (
        """
    VerticalScroll, OptionList, TextArea, GlassPanel { scrollbar-size-vertical: 1; }
    Input { border: round $foreground 40%; background: transparent; }
    Input:focus { border: round $accent-text; }
    Input.-textual-compact { border: none; height: 1; padding: 0; }
    Input > .input--placeholder { color: $hint; }
    OptionList > .option-list--option-highlighted { text-style: bold; }
    OptionList:ansi > .option-list--option-highlighted { background: $accent; color: ansi_black; }
    CommandPalette > Vertical { background: $surface; max-width: 110; }
    CommandPalette #--input, CommandPalette #--input.--list-visible { border: round $accent-text; }
    CommandPalette CommandInput, CommandPalette CommandInput:focus { border: none; height: 1; }
    CommandPalette SearchIcon { color: $accent-text; margin-top: 0; }
    CommandPalette CommandList { border-bottom: none; }
    CommandPalette CommandList > .option-list--option { text-style: none; }
    CommandPalette > .command-palette--help-text { color: auto 70%; text-style: none; }
    CommandPalette:ansi #--input, CommandPalette:ansi #--input.--list-visible {
        border: round ansi_bright_black;
    }
    CommandPalette:ansi CommandList { border-top: blank ansi_default; border-bottom: none; }
    CommandPalette:ansi > .command-palette--help-text { color: ansi_default; }
    CommandPalette:ansi SearchIcon { color: ansi_default; }
    """
        + NO_COLOR_CSS
    )

    def get_driver_class(self) -> type[Driver]:
        driver = super().get_driver_class()
        paste_input.install(driver)
        terminal_writer.install(driver)
        return driver

    def get_css_variables(self) -> dict[str, str]:
        variables = super().get_css_variables()
        self.theme_variables = {**variables, **readable_tokens(variables)}
        return self.theme_variables

    def get_line_filters(self) -> Sequence[LineFilter]:
        filters: list[LineFilter] = [*super().get_line_filters(), _NO_CONTROLS]
        if self.no_color:
            filters.append(_NO_COLORS)
        return filters

    def fitting_theme(self, *, light: bool) -> str:
        """Return the theme for a light or dark background; the terminal's own colours if it has
        only 16."""
        if self.console.color_system in ("standard", "windows"):
            return "ansi-light" if light else "ansi-dark"
        return "textual-light" if light else "textual-dark"
