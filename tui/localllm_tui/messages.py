"""Messages from the parts of the screen to the screen."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message
from textual.widget import Widget


@dataclass
class QuestionSubmitted(Message):
    """Enter was pressed; `text` may be a command."""

    text: str


@dataclass
class TurnSelected(Message):
    """Sent when another turn is selected, or the selection is cleared."""


@dataclass
class MoreTurnsWanted(Message):
    """Turns after the last one shown are wanted on screen; negative `step`: before the first."""

    step: int


@dataclass
class FilesListed(Message):
    """The list of files under the message has changed."""


@dataclass
class FileChosen(Message):
    """A file or folder of that list was chosen: its name below the folder of the chat."""

    name: str


@dataclass
class PastedToAttach(Message):
    """Too much text for the input was pasted, or the paths of files, as a terminal types them that
    were dropped on it."""

    text: str


@dataclass
class CopyWanted(Message):
    """`text` is to be copied; `what` it is in words."""

    text: str
    what: str


@dataclass
class TextGrew(Message):
    """More of a long text is laid out: `text` has `rows` more rows."""

    text: Widget
    rows: int
