"""Inputs that handle keys in the order in which they are typed, Backspace and arrows too."""

from __future__ import annotations

from textual import events
from textual.widget import Widget
from textual.widgets import Input, OptionList


async def done_at_once(widget: Widget, event: events.Key) -> bool:
    """Run the widget's own action of a key at once. Returns False if the key has no such action.

    Textual runs it after the event has bubbled up to the app, so characters typed meanwhile come
    first. On a slow machine, "ab", Backspace, "c" then removed the c.
    """
    if event.is_printable:
        return False
    bound = widget.screen.active_bindings.get(event.key)
    if bound is None or bound.node is not widget or not bound.enabled:
        return False
    if bound.binding.action.startswith(("scroll_", "screen.")):
        return False  # scrolling does not change the text or its cursor, so the screen handles it
    event.stop()
    event.prevent_default()
    await widget.run_action(bound.binding.action)
    return True


# Keys that move the cursor in a list while the search field above it has the focus.
_MOVES = {
    "up": OptionList.action_cursor_up,
    "down": OptionList.action_cursor_down,
    "pageup": OptionList.action_page_up,
    "pagedown": OptionList.action_page_down,
    "ctrl+r": OptionList.action_cursor_down,
}


class SearchInput(Input):
    """One line of input above a list of its screen, in which the arrows move."""

    async def _on_key(self, event: events.Key) -> None:
        if event.key in _MOVES:
            event.stop()
            event.prevent_default()
            _MOVES[event.key](self.screen.query_one(OptionList))
        elif not await done_at_once(self, event):
            await super()._on_key(event)
