"""What the parts of the screen tell it: they know nothing of what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from textual.message import Message


@dataclass
class QuestionSubmitted(Message):
    """Enter was pressed; `text` may be a command."""

    text: str


@dataclass
class ScrollTranscript(Message):
    """The conversation is to be scrolled by `pages` screenfuls; negative is up."""

    pages: int


@dataclass
class TurnClicked(Message):
    """A turn is to be selected."""

    turn_id: int


@dataclass
class TurnAsked(Message):
    """A key for the selected turn: `what` is an action of command_actions.run_on_turn, with its
    `argument`."""

    turn_id: int
    what: str
    argument: int = 0


@dataclass
class TurnSelected(Message):
    """Another turn is selected."""


@dataclass
class SelectionEnded(Message):
    """No turn is selected any more: the keys go to the input again."""


@dataclass
class MoreTurnsWanted(Message):
    """Turns after the last one shown are wanted on screen; negative `step`: before the first."""

    step: int


@dataclass
class FilesWanted(Message):
    """An @ was typed where a word begins: a file is to be chosen."""


@dataclass
class FilesDropped(Message):
    """Files were dropped on the terminal, which typed their paths."""

    paths: list[Path]


@dataclass
class CopyWanted(Message):
    """`text` is to be copied; `what` it is in words."""

    text: str
    what: str


@dataclass
class MuchPasted(Message):
    """Too much text for the input was pasted."""

    text: str
