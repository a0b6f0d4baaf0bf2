"""The lines at the bottom of a terminal that change, and the scrollback above them, where each line
is written once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from prompt_toolkit.application import Application
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import ANSI, StyleAndTextTuples
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import ConditionalContainer, Dimension, HSplit, Layout, Window
from prompt_toolkit.layout.controls import BufferControl, FormattedTextControl
from prompt_toolkit.layout.screen import Screen
from prompt_toolkit.widgets import SearchToolbar

from localllm_tui.control.characters import after, before

# Rows of an answer whose block is not finished, of the menu, and of what is typed.
TAIL_ROWS = 8
MENU_ROWS = 8
INPUT_ROWS = 10
# Terminals that know DEC mode 2026 show what is written between these at once.
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
    """What is typed, the menu above the status line, and the tail of an answer. `write` puts lines
    above them for good."""

    def __init__(
        self,
        *,
        submit: Callable[[str], None],
        offers: Callable[[InlinePage], Sequence[Offer]],
        status: Callable[[], str],
        keys: KeyBindings,
        asked: Sequence[str] = (),
        reflows: bool = False,
        typed: str = "",
    ) -> None:
        """`asked` were asked before, newest last; `reflows`: the terminal breaks lines anew when it
        is made narrower."""
        self._submit = submit
        self._offers = offers
        self._status = status
        self._reflows = reflows
        self.tail = self._hint = ""
        self.menu: Sequence[Offer] = ()
        self.chosen = 0
        self.buffer = Buffer(
            history=InMemoryHistory(asked), multiline=True, on_text_changed=lambda _: self.offer()
        )
        self._searching = SearchToolbar(ignore_case=True)
        self._input = Window(
            BufferControl(
                self.buffer, search_buffer_control=self._searching.control, preview_search=True
            ),
            height=Dimension(min=1, max=INPUT_ROWS),
            wrap_lines=True,
            dont_extend_height=True,
            get_line_prefix=lambda line, wrapped: "> " if line == wrapped == 0 else "  ",
        )
        layout = HSplit(
            [
                self._when(
                    lambda: self.tail, lambda: ANSI("\n".join(self.tail.split("\n")[-TAIL_ROWS:]))
                ),
                self._input,
                self._searching,
                self._when(lambda: self.menu, self._menu_text),
                Window(FormattedTextControl(lambda: self._hint or status()), height=1),
            ]
        )
        self.app: Application[None] = Application(
            layout=Layout(layout, focused_element=self._input),
            key_bindings=self._with_own(keys),
            erase_when_done=True,
            min_redraw_interval=_FRAME_S,
            before_render=lambda app: app.output.write_raw(_TOGETHER),
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
        """Draw what changes anew."""
        self.app.invalidate()

    def hint(self, text: str) -> None:
        """Show `text` in place of the status until a key is pressed."""
        self._hint = text
        self.changed()

    def keep_terminal_over_sleep(self) -> None:
        """Give the terminal back at a SIGTSTP and take it again at a SIGCONT, also after a SIGSTOP,
        which nobody hears of."""
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
        """Ask for the menu anew."""
        self.menu = self._offers(self)
        self.chosen = 0
        self._hint = ""
        self.changed()

    def replace(self, text: str) -> None:
        """Have `text` as what is typed."""
        self.buffer.text = text
        self.buffer.cursor_position = len(text)

    # -- drawing -----------------------------------------------------------------------------------

    def _when(self, shown: Callable[[], object], text: Callable[[], Any]) -> ConditionalContainer:
        window = Window(FormattedTextControl(text), dont_extend_height=True, wrap_lines=False)
        return ConditionalContainer(window, Condition(lambda: bool(shown())))

    def _menu_text(self) -> StyleAndTextTuples:
        first = max(0, min(self.chosen - MENU_ROWS // 2, len(self.menu) - MENU_ROWS))
        rows: StyleAndTextTuples = []
        for n, offer in enumerate(self.menu[first : first + MENU_ROWS], first):
            mark = "reverse" if n == self.chosen else ""
            rows.append((mark, ("\n" if rows else "") + f"  {offer.label:<24} {offer.about} "))
        return rows

    def _shown(self, app: Application[None]) -> None:
        app.output.write_raw(_SHOWN)
        app.output.flush()
        screen = app.renderer.last_rendered_screen
        if screen is not None:
            self._drawn = (screen, self.columns)
        else:
            self._drawn = None

    def _erase_all(self, leave_alternate_screen: bool = True) -> None:
        """As the renderer does, and the rows that a terminal made more of as it became narrower."""
        if self._drawn is not None and self._reflows:
            (screen, drawn_at) = self._drawn
            columns = self.columns
            if columns < drawn_at:
                at = screen.get_cursor_position(self._input)
                rows = (
                    sum(-(-_cells(screen, y) // columns) or 1 for y in range(at.y))
                    + at.x // columns
                )
                self.app.output.cursor_up(rows - at.y)
        self._drawn = None
        self._erase(leave_alternate_screen)

    # -- keys --------------------------------------------------------------------------------------

    def _with_own(self, keys: KeyBindings) -> KeyBindings:
        offered = Condition(lambda: bool(self.menu))
        typing = Condition(lambda: self.app.layout.current_control is self._input.content)
        buffer = self.buffer

        def length(to: Callable[[str, int], int]) -> int:
            """How many code points the character before or after the cursor has."""
            at = int(buffer.cursor_position)
            return abs(to(buffer.text, at) - at)

        own: list[tuple[tuple[str, ...], Callable[[KeyPressEvent], object]]] = [
            (("enter",), self._enter),
            (("c-j",), lambda _: buffer.insert_text("\n")),
            (("escape", "enter"), lambda _: buffer.insert_text("\n")),
            (("backspace",), lambda _: buffer.delete_before_cursor(length(before))),
            (("delete",), lambda _: buffer.delete(length(after))),
            (("left",), partial(self._go, before)),
            (("right",), partial(self._go, after)),
            (("c-z",), lambda _: buffer.undo()),
            (("c-y",), lambda _: buffer.redo()),
            (("c-g",), lambda _: buffer.open_in_editor() and None),
        ]
        for names, act in own:
            keys.add(*names, filter=typing)(act)
        keys.add("tab", filter=typing & offered)(lambda _: self.menu[self.chosen].fill())
        for key, step in (("up", -1), ("down", 1)):
            keys.add(key, filter=typing & offered)(partial(self._move, step))
        return keys

    def _enter(self, _: KeyPressEvent) -> None:
        if self.menu:
            self.menu[self.chosen].run()
        else:
            self._submit(self.buffer.text)

    def _move(self, step: int, _: KeyPressEvent) -> None:
        self.chosen = (self.chosen + step) % len(self.menu)
        self.changed()

    def _go(self, to: Callable[[str, int], int], _: KeyPressEvent) -> None:
        self.buffer.cursor_position = to(self.buffer.text, self.buffer.cursor_position)


def _cells(screen: Screen, y: int) -> int:
    """How far the row was written."""
    return max(
        (x + max(1, char.width) for x, char in screen.data_buffer[y].items() if char.char.strip()),
        default=0,
    )
