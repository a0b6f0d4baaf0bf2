"""The other parts of the transcript: questions, notes of the chat itself, errors, the page of the
first run."""

from __future__ import annotations

import re
import textwrap

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

from localllm.conversation.history import StoredMessage
from localllm_tui.control.attachments import typed_in
from localllm_tui.control.model_list import FirstRun
from localllm_tui.control.session import Session
from localllm_tui.control.terminal import one_line, printable
from localllm_tui.messages import MoreTurnsWanted
from localllm_tui.widgets.answer import AnswerView
from localllm_tui.widgets.text import GrowingText
from localllm_tui.widgets.transcript import TurnView


class QuestionView(TurnView):
    DEFAULT_CSS = """
    QuestionView { border-left: heavy $accent-text; }
    """

    def __init__(
        self, turn: StoredMessage, *, place: tuple[int, int] = (1, 1), left_out: bool = False
    ) -> None:
        """A stored question: its typed text, and the names of its files. `left_out`: it failed, and
        is not sent to the model."""
        super().__init__("You", turn.id, place)
        self._text = typed_in(turn)
        self.left_out = left_out
        self.attached = turn.meta.get("attached", ())

    def compose(self) -> ComposeResult:
        yield Static(self.headline, classes="who", markup=False)
        if self.attached:
            yield Static(
                "attached: " + one_line(", ".join(self.attached)), classes="files", markup=False
            )
        if self._text:
            yield GrowingText(printable(self._text), plain=True)
        if self.left_out:
            yield Static("not answered, so the model does not get it", classes="note", markup=False)


class HiddenTurns(Static):
    """A line in place of the turns before the first one shown (`step` -1), or after the last."""

    DEFAULT_CSS = """
    HiddenTurns { padding: 0 2; color: $hint; margin-top: 1; }
    """

    def __init__(self, hidden: int, step: int) -> None:
        text = f"▾ {hidden:,} later turns: PageDown at the end shows more"
        if step < 0:
            text = f"▴ {hidden:,} earlier turns: PageUp at the top shows more"
        super().__init__(text, markup=False)
        self.step = step

    def on_click(self) -> None:
        self.post_message(MoreTurnsWanted(self.step))


class ChatNote(Vertical):
    """A message of the chat itself, as Markdown or plain text; not part of the conversation."""

    DEFAULT_CSS = """
    ChatNote { margin-top: 1; padding-left: 2; max-width: 104; }
    ChatNote > Static { color: $hint; }
    """

    def __init__(self, text: str, *, markdown: bool = False) -> None:
        if markdown:
            super().__init__(GrowingText(text))
        else:
            super().__init__(Static(printable(text), markup=False))
        self.text = text


_COMMAND = re.compile("`([^`\n]+)`")  # in a hint; a box shows it without the marks


class ErrorNote(Vertical):
    """An error, its hint, and the next steps."""

    DEFAULT_CSS = """
    ErrorNote { max-width: 104; margin-top: 1; padding-left: 1; border-left: double $error; }
    ErrorNote > Static:first-child { text-style: bold; }
    """

    def __init__(self, message: str, hint: str = "", next_steps: str = "") -> None:
        lines = [f"Error: {message}"]
        if hint:
            lines.append(f"Hint: {_COMMAND.sub(_without_marks, hint)}")
        if next_steps:
            lines.append(next_steps)
        super().__init__(*(Static(printable(line), markup=False) for line in lines))


def _without_marks(command: re.Match[str]) -> str:
    return command[1]


def view_of(session: Session, turn: StoredMessage, sent: set[int]) -> QuestionView | AnswerView:
    """A turn of the branch that is shown; `sent` are the ids of those the model gets."""
    place = session.place(turn)
    if turn.role == "assistant":
        return AnswerView(turn, session.model, place)
    left_out = turn.id not in sent and turn is not session.turns[-1]
    return QuestionView(turn, place=place, left_out=left_out)


UNANSWERED = (
    "This question has no answer yet: /retry asks it again, /edit changes it, /drop removes it"
)


_POLL_S = 0.2
_KEY_LINE = re.compile(r"  F\d+  ")


class FirstRunPage(Static):
    """Shows what the first run offers, and what has become of it since."""

    DEFAULT_CSS = """
    FirstRunPage { max-width: 104; margin: 1 1 0 1; padding: 0 1; border-left: heavy $accent-text; }
    """

    def __init__(self, first_run: FirstRun) -> None:
        super().__init__("", id="first-run", markup=False)
        self._first_run = first_run

    def on_mount(self) -> None:
        self._look()
        self.set_interval(_POLL_S, self._look)

    def _look(self) -> None:
        width = self.size.width
        text = "\n".join(_hung(printable(line), width) for line in self._first_run.lines())
        if text != self.content:
            self.update(text)

    def on_resize(self) -> None:
        self._look()


def _hung(line: str, width: int) -> str:
    """A line wrapped at `width`. What follows after a key begins below its text."""
    key = _KEY_LINE.match(line)
    if key is None or not width:
        return line
    indent = " " * key.end()
    return textwrap.fill(line, max(width, 2 * key.end()), subsequent_indent=indent)
