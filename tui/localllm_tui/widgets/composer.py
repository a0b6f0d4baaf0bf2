"""The input at the bottom: many lines, Enter sends, slash commands complete, earlier questions come
back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from rich.text import Text
from textual import events
from textual.document._document import Location
from textual.geometry import Offset
from textual.widgets import OptionList, TextArea
from textual.widgets.option_list import Option

from localllm_tui.bindings import HasKeys
from localllm_tui.control.attachments import dropped_files
from localllm_tui.control.characters import after, before
from localllm_tui.control.commands import Command, offered, parse
from localllm_tui.control.keys import COMPOSER, KEYS
from localllm_tui.messages import FilesWanted, PastedToAttach, QuestionSubmitted
from localllm_tui.widgets.inputs import done_at_once

# A longer paste would make each key slow: it is attached as a file.
MUCH_CHARS = 300_000

# Of colours and the like in what was copied elsewhere; line ends and tabs stay.
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

# The actions of the keys that are taken before TextArea does.
_CAUGHT = {key.keys: key.action for key in KEYS if key.owner == COMPOSER and key.caught}

_NAME_CELLS = 22


class SlashMenu(OptionList, can_focus=False):
    """The menu of commands, hidden while it is empty. The input keeps the keys and asks for the
    highlighted command."""

    DEFAULT_CSS = """
    SlashMenu {
        height: auto; max-height: 8; margin: 0 2; padding: 0; border: none; display: none;
        background: $surface; text-wrap: nowrap; text-overflow: ellipsis;
        &:focus { border: none; }
    }
    """

    _offered: Sequence[Command] = ()

    def offer(self, typed: str) -> Command | None:
        """Offer the commands that fit this text; returns the highlighted one, None if no command
        fits."""
        found = offered(typed)
        if found != self._offered:
            self._offered = found
            self.display = bool(found)
            rows = (f"{command.usage:<{_NAME_CELLS}} {command.help}" for command in found)
            self.set_options([Option(Text(row, no_wrap=True, overflow="ellipsis")) for row in rows])
            self.highlighted = 0 if found else None
        if self.highlighted is not None:
            return found[self.highlighted]
        return None


class Composer(HasKeys, TextArea, keys=COMPOSER):
    """A TextArea that grows with its text up to eight rows. Posts QuestionSubmitted; never clears
    itself."""

    DEFAULT_CSS = """
    Composer {
        height: auto; min-height: 3; max-height: 10;
        border: round $foreground 40%; padding: 0 1;
        border-title-color: $hint; border-subtitle-color: $hint;
        background: transparent;
        &:focus { border: round $accent-text; }
        & .text-area--cursor-line { background: transparent; }
    }
    """

    def __init__(self, menu: SlashMenu) -> None:
        super().__init__(
            id="composer", soft_wrap=True, show_line_numbers=False, tab_behavior="focus"
        )
        self.menu = menu
        self.earlier_questions: list[str] = []
        self._shown_earlier = 0

    async def _on_key(self, event: events.Key) -> None:
        if self._handle(_CAUGHT.get(event.key, "")):
            event.stop()
            event.prevent_default()
        elif not await done_at_once(self, event):
            await super()._on_key(event)

    def _handle(self, action: str) -> bool:
        """Do the action of a key; False leaves the key to TextArea."""
        match action:
            case "send":
                return self._send()
            case "complete":
                return self._complete()
            case "earlier":
                return self._browse(-1)
            case "later":
                return self._browse(1)
            case "files":
                return self._at()
        return False

    async def _on_paste(self, event: events.Paste) -> None:
        if len(event.text) > MUCH_CHARS or dropped_files(event.text):
            event.stop()
            event.prevent_default()
            self.post_message(PastedToAttach(event.text))
        # Else TextArea's own handler comes next and writes it.
        event.text = _CONTROLS.sub("", event.text)

    def _at(self) -> bool:
        """An @ at the beginning of a word opens the file list, and is typed all the same."""
        row, column = self.cursor_location
        before = self.document.get_line(row)[:column]
        if not before or before[-1].isspace():
            self.post_message(FilesWanted())
        return False

    async def keys_handled(self) -> None:
        """Wait until what was typed before is in the text: a key that the screen takes overtakes
        those on their way here."""
        done = asyncio.Event()
        if self.is_running and self.call_later(done.set):
            await done.wait()

    def replace_text(self, text: str) -> None:
        self.text = text
        self.move_cursor(self.document.end)

    def scroll_cursor_visible(self, center: bool = False, animate: bool = False) -> Offset:
        """As TextArea does; but an undo calls it while the cursor is still beyond the end of the
        text."""
        if self.cursor_location > self.document.end:
            self.move_cursor(self.document.end)
        return super().scroll_cursor_visible(center, animate)

    def get_cursor_left_location(self) -> Location:
        """A whole character to the left, as people see them: Backspace and the arrows ask here."""
        row, column = self.cursor_location
        line = self.document.get_line(row)
        if column:
            return (row, before(line, column))
        return super().get_cursor_left_location()

    def get_cursor_right_location(self) -> Location:
        row, column = self.cursor_location
        line = self.document.get_line(row)
        if column < len(line):
            return (row, after(line, column))
        return super().get_cursor_right_location()

    def action_newline(self) -> None:
        self.insert("\n")

    @property
    def _chosen(self) -> Command | None:
        """The command that the menu highlights for the current text: keys may arrive before the
        menu's update."""
        return self.menu.offer(self.text)

    def _send(self) -> bool:
        chosen = self._chosen
        if chosen is not None and parse(self.text) != (chosen.name, ""):
            if chosen.needs_argument:
                self.replace_text(chosen.completed)
                return True
            self.replace_text(f"/{chosen.name}")
        self.post_message(QuestionSubmitted(self.text))
        return True

    def _complete(self) -> bool:
        chosen = self._chosen
        if chosen is not None:
            self.replace_text(chosen.completed)
        return True  # else Tab would move the focus

    def _browse(self, step: int) -> bool:
        """Bring back an earlier question, unless something else is being written."""
        if self._chosen is not None:
            if step < 0:
                self.menu.action_cursor_up()
            else:
                self.menu.action_cursor_down()
            return True
        if self._shown_earlier and self.text != self.earlier_questions[-self._shown_earlier]:
            self._shown_earlier = 0
        if not self.earlier_questions or (self.text and not self._shown_earlier):
            return False
        wanted = self._shown_earlier - step
        if wanted < 0 or wanted > len(self.earlier_questions):
            return bool(self._shown_earlier)
        self._shown_earlier = wanted
        self.replace_text(self.earlier_questions[-wanted] if wanted else "")
        return True
