"""One line of input whose arrows and Backspace take whole characters, as people see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual import events
from textual.widget import Widget
from textual.widgets import Input

from localllm_tui.control.characters import after, before

# Of what Textual's widgets have, only their first base is taken over.
if TYPE_CHECKING:
    _Base = Widget
else:
    _Base = object


class KeysInOrder(_Base):
    """Does at once what its keys are bound to. Textual asks for that when the key has come up to
    the app, and what is typed meanwhile overtakes it: of "ab", Backspace, "c" on a slow machine the
    c was removed."""

    async def _on_key(self, event: events.Key) -> None:
        bound = None if event.is_printable else self.screen.active_bindings.get(event.key)
        if (
            bound is not None
            and bound.node is self
            and bound.enabled
            and self.edits(bound.binding.action)
        ):
            event.stop()
            event.prevent_default()
            await self.run_action(bound.binding.action)
        else:
            await super()._on_key(event)

    def edits(self, action: str) -> bool:
        """Whether that is done to the text or its cursor now; what is not is the screen's, as it
        always was."""
        return not action.startswith(("scroll_", "screen."))


class WholeInput(KeysInOrder, Input):
    def edits(self, action: str) -> bool:
        ends = {"cursor_left": 0, "cursor_right": len(self.value)}
        return super().edits(action) and ends.get(action) != self.cursor_position

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
