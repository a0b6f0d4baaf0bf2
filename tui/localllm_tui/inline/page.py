"""The changing lines at the bottom of a terminal, and the scrollback above them, where each line is
written once."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prompt_toolkit.application import Application
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import ANSI, AnyFormattedText, StyleAndTextTuples
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import (
    AnyContainer,
    ConditionalContainer,
    Dimension,
    HSplit,
    Layout,
    Window,
)
from prompt_toolkit.layout.controls import BufferControl, FormattedTextControl
from prompt_toolkit.layout.screen import Screen
from prompt_toolkit.widgets import SearchToolbar

from localllm_tui.control.characters import after, before

# Maximum rows of an unfinished block of an answer, of the menu, and of the input.
TAIL_ROWS = 8
MENU_ROWS = 8
INPUT_ROWS = 10
# Terminals with DEC mode 2026 show the output between these two codes as one update.
_TOGETHER = "\x1b[?2026h"
_SHOWN = "\x1b[?2026l"
_FRAME_S = 1 / 15


@dataclass(frozen=True, slots=True)
class Offer:
    """A row of the menu: `fill` takes the place of what is typed by Tab, `run` is what Enter
    does."""

    label: str
    about: str
    fill: Callable[[], None]
    run: Callable[[], None]


class InlinePage:
    """The input, the menu above the status line, and the unfinished end of an answer. `write` adds
    lines to the scrollback above them."""

    def __init__(
        self,
        *,
        submit: Callable[[str], None],
        offers: Callable[[InlinePage], Sequence[Offer]],
        status: Callable[[], str],
        keys: KeyBindings,
        questions: Sequence[str],
        reflows: bool,
        typed: str,
    ) -> None:
        """`questions`: earlier questions, newest last; `reflows`: the terminal wraps lines again when
        it becomes narrower."""
        self._submit = submit
        self._offers = offers
        self._status = status
        self._reflows = reflows
        self.tail = self._hint = ""
        self.menu: Sequence[Offer] = ()
        self.chosen = 0
        self.buffer = Buffer(
            history=InMemoryHistory(questions), multiline=True, on_text_changed=self._text_changed
        )
        self._searching = SearchToolbar(ignore_case=True)
        self._input = Window(
            BufferControl(
                self.buffer, search_buffer_control=self._searching.control, preview_search=True
            ),
            height=Dimension(min=1, max=INPUT_ROWS),
            wrap_lines=True,
            dont_extend_height=True,
            get_line_prefix=_line_prefix,
        )
        status_line = Window(FormattedTextControl(self._status_text), height=1)
        layout = HSplit(
            [
                _shown_if(self._has_tail, self._tail_text),
                self._input,
                self._searching,
                _shown_if(self._has_menu, self._menu_text),
                status_line,
            ]
        )
        self.app: Application[None] = Application(
            layout=Layout(layout, focused_element=self._input),
            key_bindings=self._with_own(keys),
            erase_when_done=True,
            min_redraw_interval=_FRAME_S,
            before_render=_begin_frame,
            after_render=self._shown,
        )
        self.buffer.insert_text(typed)
        self._drawn: tuple[Screen, int] | None = None
        self._erase = self.app.renderer.erase
        self.app.renderer.erase = self._erase_all

    @property
    def columns(self) -> int:
        return int(self.app.output.get_size().columns)

    def write(self, text: str) -> None:
        """Put lines (with the terminal's own codes for their looks) above what changes; they are
        never written again."""
        if not text:
            return
        out = self.app.output
        if self.app.is_running:
            out.write_raw(_TOGETHER)
            self.app.renderer.erase(leave_alternate_screen=False)
        out.write_raw(text.removesuffix("\n").replace("\n", "\r\n") + "\r\n")
        out.flush()
        if self.app.is_running:
            self.changed()

    def changed(self) -> None:
        """Redraw the changed parts."""
        self.app.invalidate()

    def hint(self, text: str) -> None:
        """Show `text` in place of the status until a key is pressed."""
        self._hint = text
        self.changed()

    def keep_terminal_over_sleep(self) -> None:
        """Release the terminal at a SIGTSTP and take it again at a SIGCONT, also after a SIGSTOP,
        which a program can't handle."""
        try:
            import termios

            fd = self.app.input.fileno()
            raw = termios.tcgetattr(fd)
        except (ImportError, OSError, ValueError, NotImplementedError):
            return
        loop = asyncio.get_running_loop()
        app = self.app

        def sleep() -> None:
            app.renderer.erase(leave_alternate_screen=False)
            with app.input.cooked_mode():
                os.kill(os.getpid(), signal.SIGSTOP)

        def wake() -> None:
            termios.tcsetattr(fd, termios.TCSANOW, raw)
            self._drawn = None
            app.output.write_raw("\r")  # the shell, or a key that it echoed, moved the cursor
            app.output.erase_down()
            app.renderer.reset()
            app.invalidate()

        loop.add_signal_handler(signal.SIGTSTP, sleep)
        loop.add_signal_handler(signal.SIGCONT, wake)

    def offer(self) -> None:
        """Rebuild the menu."""
        self.menu = self._offers(self)
        self.chosen = 0
        self._hint = ""
        self.changed()

    def replace(self, text: str) -> None:
        """Have `text` as what is typed."""
        self.buffer.text = text
        self.buffer.cursor_position = len(text)

    # -- drawing -----------------------------------------------------------------------------------

    def _text_changed(self, _: Buffer) -> None:
        self.offer()

    def _status_text(self) -> str:
        return self._hint or self._status()

    def _has_tail(self) -> bool:
        return bool(self.tail)

    def _tail_text(self) -> ANSI:
        return ANSI("\n".join(self.tail.split("\n")[-TAIL_ROWS:]))

    def _has_menu(self) -> bool:
        return bool(self.menu)

    def _menu_text(self) -> StyleAndTextTuples:
        first = max(0, min(self.chosen - MENU_ROWS // 2, len(self.menu) - MENU_ROWS))
        rows: StyleAndTextTuples = []
        for n, offer in enumerate(self.menu[first : first + MENU_ROWS], first):
            if rows:
                rows.append(("", "\n"))
            style = "reverse" if n == self.chosen else ""
            rows.append((style, f"  {offer.label:<24} {offer.about} "))
        return rows

    def _shown(self, app: Application[None]) -> None:
        app.output.write_raw(_SHOWN)
        app.output.flush()
        screen = app.renderer.last_rendered_screen
        self._drawn = (screen, self.columns) if screen is not None else None

    def _erase_all(self, leave_alternate_screen: bool = True) -> None:
        """Erase as the renderer does, and the rows that the terminal added when it became
        narrower."""
        if self._drawn is not None and self._reflows:
            screen, drawn_at = self._drawn
            if self.columns < drawn_at:
                self._move_up_to_first_row(screen, self.columns)
        self._drawn = None
        self._erase(leave_alternate_screen)

    def _move_up_to_first_row(self, screen: Screen, columns: int) -> None:
        at = screen.get_cursor_position(self._input)
        rows = at.x // columns
        for y in range(at.y):
            rows += max(1, math.ceil(_cells(screen, y) / columns))
        self.app.output.cursor_up(rows - at.y)

    # -- keys --------------------------------------------------------------------------------------

    def _with_own(self, keys: KeyBindings) -> KeyBindings:
        typing = Condition(self._is_typing)
        choosing = typing & Condition(self._has_menu)
        keys.add("enter", filter=typing)(self._enter)
        keys.add("c-j", filter=typing)(self._newline)
        keys.add("escape", "enter", filter=typing)(self._newline)
        keys.add("backspace", filter=typing)(self._delete_before)
        keys.add("delete", filter=typing)(self._delete_after)
        keys.add("left", filter=typing)(self._left)
        keys.add("right", filter=typing)(self._right)
        keys.add("c-z", filter=typing)(self._undo)
        keys.add("c-y", filter=typing)(self._redo)
        keys.add("c-g", filter=typing)(self._open_editor)
        keys.add("tab", filter=choosing)(self._fill)
        keys.add("up", filter=choosing)(self._choose_previous)
        keys.add("down", filter=choosing)(self._choose_next)
        return keys

    def _is_typing(self) -> bool:
        return self.app.layout.current_control is self._input.content

    def _enter(self, _: KeyPressEvent) -> None:
        if self.menu:
            self.menu[self.chosen].run()
        else:
            self._submit(self.buffer.text)

    def _newline(self, _: KeyPressEvent) -> None:
        self.buffer.insert_text("\n")

    def _delete_before(self, _: KeyPressEvent) -> None:
        at = self.buffer.cursor_position
        self.buffer.delete_before_cursor(at - before(self.buffer.text, at))

    def _delete_after(self, _: KeyPressEvent) -> None:
        at = self.buffer.cursor_position
        self.buffer.delete(after(self.buffer.text, at) - at)

    def _left(self, _: KeyPressEvent) -> None:
        self.buffer.cursor_position = before(self.buffer.text, self.buffer.cursor_position)

    def _right(self, _: KeyPressEvent) -> None:
        self.buffer.cursor_position = after(self.buffer.text, self.buffer.cursor_position)

    def _undo(self, _: KeyPressEvent) -> None:
        self.buffer.undo()

    def _redo(self, _: KeyPressEvent) -> None:
        self.buffer.redo()

    def _open_editor(self, _: KeyPressEvent) -> None:
        self.buffer.open_in_editor()

    def _fill(self, _: KeyPressEvent) -> None:
        self.menu[self.chosen].fill()

    def _choose_previous(self, _: KeyPressEvent) -> None:
        self._choose((self.chosen - 1) % len(self.menu))

    def _choose_next(self, _: KeyPressEvent) -> None:
        self._choose((self.chosen + 1) % len(self.menu))

    def _choose(self, n: int) -> None:
        self.chosen = n
        self.changed()


def _line_prefix(line: int, wrapped: int) -> str:
    if line == wrapped == 0:
        return "> "
    return "  "


def _begin_frame(app: Application[None]) -> None:
    app.output.write_raw(_TOGETHER)


def _shown_if(shown: Callable[[], bool], text: Callable[[], AnyFormattedText]) -> AnyContainer:
    """A window with this text, there only if it is to be `shown`."""
    window = Window(FormattedTextControl(text), dont_extend_height=True, wrap_lines=False)
    return ConditionalContainer(window, Condition(shown))


def _cells(screen: Screen, y: int) -> int:
    """Returns the number of cells of a row up to its last character."""
    cells = 0
    for x, char in screen.data_buffer[y].items():
        if char.char.strip():
            cells = max(cells, x + max(1, char.width))
    return cells
