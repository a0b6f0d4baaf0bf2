"""Where the characters that people see begin and end: an emoji of seven code points is one of them, so is a flag."""

from __future__ import annotations

from textual.widgets import Input

# A line may be long; nothing that is seen as one character is.
_LOOK_CHARS = 128


def before(text: str, at: int) -> int:
    """Where the character that ends at `at` (or has `at` within it) begins; 0 at the beginning."""
    if at < 2 or text[at - 2 : at].isascii():
        return max(0, at - 1)
    start = max(0, at - _LOOK_CHARS)
    return max((begin for begin, _ in _characters(text, start) if begin < at), default=0)


def after(text: str, at: int) -> int:
    """Where the character that begins at `at` ends; the end of the text there."""
    if text[at : at + 2].isascii():
        return min(len(text), at + 1)
    return next((end for _, end in _characters(text, at)), len(text))


def _characters(text: str, start: int) -> list[tuple[int, int]]:
    import regex  # who types ASCII needs no tables of Unicode

    return [found.span() for found in regex.finditer(r"\X", text, pos=start, endpos=start + 2 * _LOOK_CHARS)]


class WholeInput(Input):
    """An Input whose arrows and Backspace take whole characters."""

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
