"""Messages from the parts of the screen to the screen."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message


@dataclass
class QuestionSubmitted(Message):
    """Enter was pressed; `text` may be a command."""

    text: str


@dataclass
class TurnSelected(Message):
    """The selection changed to another turn, or was cleared."""


@dataclass
class MoreTurnsWanted(Message):
    """Turns after the last one shown are wanted on screen; negative `step`: before the first."""

    step: int


@dataclass
class FilesWanted(Message):
    """An @ was typed at the beginning of a word: a file is to be chosen."""


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
