"""The commands that what is typed may become, above the input: arrows choose, Tab fills, Enter
runs."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from localllm_tui.control.commands import Command, offered

_NAME_CELLS = 22


class SlashMenu(OptionList, can_focus=False):
    """Hidden while there is nothing to offer. The keys stay with the input, which asks for what is
    `chosen`."""

    DEFAULT_CSS = """
    SlashMenu {
        height: auto; max-height: 8; margin: 0 2; padding: 0; border: none; display: none;
        background: $surface; text-wrap: nowrap; text-overflow: ellipsis;
        &:focus { border: none; }
    }
    """

    def __init__(self) -> None:
        super().__init__(id="slash")
        self._offered: list[Command] = []

    @property
    def chosen(self) -> Command | None:
        """The highlighted command; None while the menu is hidden."""
        return (
            self._offered[self.highlighted]
            if self._offered and self.highlighted is not None
            else None
        )

    def offer(self, typed: str) -> None:
        found = offered(typed)
        if found == self._offered:
            return
        self._offered = found
        self.display = bool(found)
        self.set_options([Option(_row(command)) for command in found])
        self.highlighted = 0 if found else None

    def move(self, step: int) -> None:
        if step < 0:
            self.action_cursor_up()
        else:
            self.action_cursor_down()


def _row(command: Command) -> Text:
    return Text(f"{command.usage:<{_NAME_CELLS}} {command.help}", no_wrap=True, overflow="ellipsis")
