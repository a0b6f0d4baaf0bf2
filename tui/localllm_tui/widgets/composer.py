"""The input at the bottom: several lines, Enter sends, completion of slash commands, earlier
questions come back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

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
from localllm_tui.control.terminal import typed_text
from localllm_tui.messages import FileChosen, PastedToAttach, QuestionSubmitted
from localllm_tui.widgets.file_menu import FileMenu, letters_after_at
from localllm_tui.widgets.inputs import done_at_once

# A longer paste would slow down each key, so it is attached as a file.
LONG_CHARS = 300_000

# A longer paste is shown as a token, which is sent as its text.
FOLDED_LINES = 40

_TOKEN = re.compile(r"\[paste \d+: [\d,]+ lines, Tab opens it\]")

# Actions of the keys that are handled before TextArea.
_CAUGHT = {key.keys: key.action for key in KEYS if key.owner == COMPOSER and key.caught}

_NAME_CELLS = 22


class SlashMenu(OptionList, can_focus=False):
    """The menu of commands, hidden while it is empty. The input handles the keys and reads the
    highlighted command."""

    DEFAULT_CSS = """
    SlashMenu {
        height: auto; max-height: 8; padding: 0 2; border: none; display: none;
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
            longest = max((len(command.usage) for command in found), default=0)
            cells = min(_NAME_CELLS, longest + 1)
            rows = (f"{command.usage:<{cells}} {command.help}" for command in found)
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

    def __init__(self, menu: SlashMenu, files: FileMenu) -> None:
        super().__init__(
            id="composer", soft_wrap=True, show_line_numbers=False, tab_behavior="focus"
        )
        self.menu = menu
        self.files = files
        self.earlier_questions: list[str] = []
        self._shown_earlier = 0
        self._pastes: dict[str, str] = {}  # the text of each token

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
            case "close_list":
                return self.files.close()
        return False

    async def _on_paste(self, event: events.Paste) -> None:
        text = typed_text(event.text)
        if len(text) > LONG_CHARS or dropped_files(text):
            event.stop()
            event.prevent_default()
            self.post_message(PastedToAttach(text))
        # Otherwise TextArea's own handler runs next and inserts it.
        event.text = self._folded(text)

    def _folded(self, pasted: str) -> str:
        """A token in place of a long paste."""
        n_lines = len(pasted.splitlines())
        if n_lines <= FOLDED_LINES:
            return pasted
        token = f"[paste {len(self._pastes) + 1}: {n_lines:,} lines, Tab opens it]"
        self._pastes[token] = "\n".join(pasted.splitlines())
        return token

    @property
    def written(self) -> str:
        """The text with each token replaced by its paste."""
        return _TOKEN.sub(self._text_of, self.text)

    def _text_of(self, token: re.Match[str]) -> str:
        return self._pastes.get(token[0], token[0])

    def _token_before(self, line: str, column: int) -> str:
        """The token that ends at this place of a line; "" without one."""
        start = line.rfind("[paste ", 0, column)
        if start >= 0 and line[start:column] in self._pastes:
            return line[start:column]
        return ""

    def _open_paste(self) -> None:
        """Replace the token before the cursor by its text."""
        row, column = self.cursor_location
        token = self._token_before(self.document.get_line(row), column)
        if token:
            start = (row, column - len(token))
            self.replace(self._pastes[token], start, (row, column), maintain_selection_offset=False)

    @property
    def chosen_file(self) -> str | None:
        """The name that the list of files highlights; None without a list."""
        row, column = self.cursor_location
        return self.files.offer(letters_after_at(self.document.get_line(row)[:column]))

    def _take_file(self, name: str) -> None:
        """Write the name after the @, and attach the file."""
        refusal = self.files.refusal(name)
        if refusal:
            self.notify(refusal, severity="warning", markup=False)
            return
        row, column = self.cursor_location
        letters = letters_after_at(self.document.get_line(row)[:column]) or ""
        start = (row, column - len(letters))
        written = f"{Path(name).name} "
        self.replace(written, start, (row, column), maintain_selection_offset=False)
        self.post_message(FileChosen(name))

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
        token = self._token_before(line, column)
        if token:
            return (row, column - len(token))
        if column:
            return (row, before(line, column))
        return super().get_cursor_left_location()

    def get_cursor_right_location(self) -> Location:
        row, column = self.cursor_location
        line = self.document.get_line(row)
        token = _TOKEN.match(line, column)
        if token is not None and token[0] in self._pastes:
            return (row, token.end())
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
        file = self.chosen_file
        if file is not None:
            self._take_file(file)
            return True
        chosen = self._chosen
        if chosen is not None and parse(self.text) != (chosen.name, ""):
            if chosen.needs_argument:
                self.replace_text(chosen.completed)
                return True
            self.replace_text(f"/{chosen.name}")
        self.post_message(QuestionSubmitted(self.written))
        return True

    def _complete(self) -> bool:
        chosen = self._chosen
        file = self.chosen_file
        if file is not None:
            self._take_file(file)
        elif chosen is not None:
            self.replace_text(chosen.completed)
        else:
            self._open_paste()
        return True  # otherwise Tab would move the focus

    def _browse(self, step: int) -> bool:
        """Bring back an earlier question, unless something else is being written."""
        menu: OptionList | None = None
        if self.chosen_file is not None:
            menu = self.files
        elif self._chosen is not None:
            menu = self.menu
        if menu is not None:
            if step < 0:
                menu.action_cursor_up()
            else:
                menu.action_cursor_down()
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
