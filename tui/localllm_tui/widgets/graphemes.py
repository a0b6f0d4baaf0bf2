"""One line of input whose arrows and Backspace take whole characters, as people see them."""

from __future__ import annotations

from textual.widgets import Input

from localllm_tui.control.characters import after, before


class WholeInput(Input):
    def action_cursor_left(self, select: bool = False) -> None:
        self._move(before(self.value, self.selection.end), select, -1)

    def action_cursor_right(self, select: bool = False) -> None:
        self._move(after(self.value, self.selection.end), select, 1)

    def _move(self, to: int, select: bool, step: int) -> None:
        if select:
            self.selection = type(self.selection)(self.selection.start, to)
        elif self.selection.is_empty:
            self.cursor_position = to
        else:
            self.cursor_position = (min if step < 0 else max)(*self.selection)

    def action_delete_left(self) -> None:
        if self.selection.is_empty:
            self.delete(before(self.value, self.cursor_position), self.cursor_position)
        else:
            self.delete_selection()

    def action_delete_right(self) -> None:
        if self.selection.is_empty:
            self.delete(self.cursor_position, after(self.value, self.cursor_position))
        else:
            self.delete_selection()
