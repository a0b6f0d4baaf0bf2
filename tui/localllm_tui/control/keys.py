"""The keys of the chat: their one table, from which the bindings, the hints in the frames and /help all read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Moment(Enum):
    """What the person is doing, which decides what keys are hinted at."""

    WRITING = "writing"
    EDITING = "editing"
    ANSWERING = "answering"
    CHOOSING = "choosing"


@dataclass(frozen=True, slots=True)
class Key:
    """`keys` as the toolkit names them and `label` as people do; `owner` is the part of the screen they belong to.

    `action` is that part's to do ("" where the toolkit does it by itself); `priority`: before the part in focus has its
    say; `caught`: where the toolkit would write the key, or move the cursor. `help` is for /help ("" stays out of it).
    `hints`: what the key does in the frames' words, by moment.
    """

    owner: str
    keys: str
    label: str
    action: str = ""
    help: str = ""
    priority: bool = False
    caught: bool = False
    hints: Mapping[Moment, str] = field(default_factory=dict)


APP, COMPOSER, PICKER = "app", "composer", "picker"

KEYS = (
    Key(
        COMPOSER, "enter", "Enter", "send", "send", caught=True,
        hints={Moment.WRITING: "sends", Moment.EDITING: "asks it in a new conversation"},
    ),
    Key(
        COMPOSER, "ctrl+j,shift+enter,alt+enter,ctrl+enter", "Ctrl+J, Shift+Enter", "newline",
        "new line (Shift+Enter where the terminal tells it apart)", hints={Moment.WRITING: "new line"},
    ),
    Key(
        APP, "escape", "Esc", "stop", "stop the answer and keep its text",
        hints={Moment.ANSWERING: "stops", Moment.EDITING: "leaves it"},
    ),
    Key(
        APP, "ctrl+c", "Ctrl+C", "interrupt", "copy the selected text; else stop the answer; twice: quit", priority=True
    ),
    Key(
        APP, "ctrl+d,ctrl+q", "Ctrl+D, Ctrl+Q", "quit", "quit; what was typed is kept for next time", priority=True
    ),
    Key(COMPOSER, "up", "Up, Down", "earlier", "in an empty input: earlier questions", caught=True),
    Key(COMPOSER, "down", "Down", "later", caught=True),
    Key(COMPOSER, "pageup", "PageUp, PageDown", "scroll_transcript(-1)", "scroll the conversation"),
    Key(COMPOSER, "pagedown", "PageDown", "scroll_transcript(1)"),
    Key(APP, "ctrl+t", "Ctrl+T", "thinking", "show or hide the model's thinking", priority=True),
    Key(COMPOSER, "tab", "Tab", "complete", "complete a command", caught=True),
    Key(APP, "ctrl+p", "Ctrl+P", help="command palette, themes too"),
    Key(PICKER, "enter", "Enter", hints={Moment.CHOOSING: "opens"}),
    Key(PICKER, "ctrl+x", "Ctrl+X", "remove", priority=True, hints={Moment.CHOOSING: "removes"}),
    Key(PICKER, "escape", "Esc", "close", hints={Moment.CHOOSING: "closes"}),
)  # fmt: skip


def hints(moment: Moment) -> str:
    """What the keys do at `moment`, in a line for a frame."""
    return " · ".join(f"{k.label.partition(',')[0]} {k.hints[moment]}" for k in KEYS if moment in k.hints)
