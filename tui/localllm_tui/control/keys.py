"""The keys of the chat: their one table, from which the bindings, the hints in the frames and F1
all read."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from localllm.errors import UsageError

# The user's current activity, which decides the key hints.
KeyContext: TypeAlias = Literal[
    "writing", "editing", "answering", "choosing", "finding", "selecting", "found", "help",
    "filing", "asked", "commands", "models", "on disk", "approving", "approving a tool",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Key:
    """A key: `keys` as Textual names them and `label` as users do; `owner` is the part of the
    screen that handles it.

    `action`: an action of the owner ("": Textual has its own); `priority`: handled before the
    focused widget; `caught`: the owner handles it before TextArea writes it or moves the cursor.
    `help`: the text in F1 ("": not listed). `hints`: the texts in the frames, by context.
    """

    owner: str
    keys: str
    label: str
    action: str = ""
    help: str = ""
    priority: bool = False
    caught: bool = False
    hints: Mapping[KeyContext, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Its id in config.toml: turn.edit, chat.stop, turn.version-back; "" for a key that can't
        be remapped."""
        if not self.action or self.caught:
            return ""
        found = _ACTION.fullmatch(self.action)
        assert found is not None
        word = (found["what"] or found["name"]).replace("_", "-")
        number = found["number"]
        if not number:
            return f"{self.owner}.{word}"
        if word not in ("code", "pull"):
            number = {"-1": "back", "1": "on"}.get(number, number)
        return f"{self.owner}.{word}-{number}"

    @property
    def keys_now(self) -> str:
        """Its keys, after remapping."""
        return _remapped.get(self.id, self.keys)

    @property
    def label_now(self) -> str:
        if self.id in _remapped:
            return label_of(self.keys_now)
        return self.label


_ACTION = re.compile(
    r"(?:screen\.)?(?P<name>\w+)(?:\((?:'(?P<what>\w+)')?(?:, )?(?P<number>-?\d+)?\))?"
)
# The remapped keys of config.toml: ids, and keys as Textual names them.
_remapped: dict[str, str] = {}


def label_of(keys: str) -> str:
    """Keys as users know them: "ctrl+k,f9" is Ctrl+K, F9."""
    labels = []
    for key in keys.split(","):
        labels.append("+".join(part.capitalize() for part in key.split("+")))
    return ", ".join(labels)


def remap(table: Mapping[str, object], keys_of_all: Sequence[Key]) -> None:
    """Apply the table [chat_keys] of config.toml, whose names are `Key.id`s. Raises UsageError for
    an unknown name, for a value that is not text, and for a key with two actions in one place."""
    known = [*dict.fromkeys(key.id for key in keys_of_all if key.id)]
    for name, keys in table.items():
        if name not in known:
            closest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {closest[0]}?" if closest else "`localllm config keys` lists them"
            raise UsageError(f"[chat_keys] of config.toml has an unknown name: {name}", hint=hint)
        if not isinstance(keys, str) or not keys.strip():
            raise UsageError(
                f'{name} in [chat_keys] of config.toml must be keys such as "ctrl+k" or "f9,ctrl+y"'
            )
    _remapped.clear()
    for name, keys in table.items():
        _remapped[name] = str(keys).replace(" ", "").lower()
    used_keys: dict[tuple[str, str], str] = {}
    for entry in [key for key in KEYS if key.action]:
        for combination in entry.keys_now.split(","):
            other = used_keys.setdefault((entry.owner, combination), entry.id)
            if other != entry.id and {other, entry.id} & _remapped.keys():
                _remapped.clear()
                raise UsageError(
                    f"[chat_keys] of config.toml has {combination} do two things at once: "
                    f"{other} and {entry.id}"
                )


def remapped() -> Mapping[str, str]:
    """The remapped keys of config.toml."""
    return _remapped


APP = "app"
CHAT = "chat"
COMMAND = "command"
COMPOSER = "composer"
TURN = "turn"
PICKER = "picker"
HELP = "help"
FILES = "files"
MODELS = "models"
SLIDER = "slider"
APPROVAL = "approval"

_WRITING = (
    Key(
        COMPOSER, "enter", "Enter", "send", "send", caught=True,
        hints={"writing": "sends", "commands": "runs", "filing": "attaches",
        "editing": "asks again; the old version is kept"},
    ),
    Key(
        COMPOSER, "ctrl+j,shift+enter,alt+enter,ctrl+enter", "Ctrl+J, Shift+Enter", "newline",
        "new line (Shift+Enter if the terminal reports it)",
        hints={"writing": "new line"},
    ),
    Key(COMPOSER, "up", "↑↓", "earlier", "in an empty input: earlier questions", caught=True,
    hints={"commands": "chooses", "filing": "chooses"}),
    Key(COMPOSER, "down", "Down", "later", caught=True),
)  # fmt: skip
_INPUT = (
    Key(COMPOSER, "ctrl+z", "Ctrl+Z, Ctrl+Y",
    help="undo and redo of typing and pasting"),
    Key(COMPOSER, "pageup", "PageUp, PageDown", "screen.scroll_transcript(-1)", "scroll the conversation"),
    Key(COMPOSER, "pagedown", "PageDown", "screen.scroll_transcript(1)"),
    Key(COMPOSER, "tab", "Tab", "complete", "complete a command", caught=True,
    hints={"commands": "completes"}),
    Key(COMPOSER, "at", "@", help="at the beginning of a word: a file to attach"),
    Key(COMPOSER, "escape", "Esc", "close_list", caught=True, hints={"filing": "closes"}),
)  # fmt: skip
_CHAT = (
    Key(
        CHAT, "escape", "Esc", "stop", "stop the answer and keep its text",
        hints={"answering": "stops", "editing": "leaves it"},
    ),
    Key(CHAT, "ctrl+t", "Ctrl+T", "thinking", "show or hide the model's thinking", priority=True),
    Key(
        CHAT, "ctrl+up,f2", "F2, Ctrl+Up", "select",
        "select a turn, to change, retry, copy or remove it", priority=True,
        hints={"writing": "turns"},
    ),
)  # fmt: skip
_FIRST_RUN = (
    Key(CHAT, "f5", "F5, F6, F7", "pull(1)",
    "on the first run: pull one of the listed models, then go on with it", priority=True),
    Key(CHAT, "f6", "F6", "pull(2)", priority=True),
    Key(CHAT, "f7", "F7", "pull(3)", priority=True),
)  # fmt: skip
_APP = (
    Key(
        APP, "ctrl+c", "Ctrl+C", "interrupt",
        "copy the selected text; else clear what is typed; else stop the answer; twice: quit",
        priority=True
    ),
    Key(APP, "ctrl+d", "Ctrl+D", "end_of_input", "in an empty input: quit", priority=True),
    Key(APP, "ctrl+q", "Ctrl+Q", "quit", "quit; the draft is kept for next time",
    priority=True),
    Key(APP, "ctrl+p", "Ctrl+P", help="command palette, themes too"),
)  # fmt: skip
_SELECTING = (
    Key(
        TURN, "up", "Up, Down", "select(-1)", "the previous turn, the next turn"
    ),
    Key(TURN, "down", "Down", "select(1)"),
    Key(
        TURN, "n", "N", "screen.turn('found', 1)", "after Ctrl+F: the next hit; Shift+N: the previous one",
        hints={"found": "next"},
    ),
    Key(TURN, "N", "Shift+N", "screen.turn('found', -1)", hints={"found": "the one before"}),
)  # fmt: skip
_ANSWERS = (
    Key(
        TURN, "e,enter", "E", "screen.turn('edit')", "change it; the old version is kept",
        hints={"selecting": "edit"}
    ),
    Key(TURN, "r", "R", "screen.turn('again')", "another answer", hints={"selecting": "again"}),
    Key(TURN, "g", "G", "screen.turn('more')", "continue a stopped answer"),
    Key(TURN, "c", "C", "screen.turn('copy')", "copy it",
    hints={"selecting": "copy", "found": "copy"}),
)  # fmt: skip
_COPYING = (
    Key(TURN, "1", "1 to 9", "screen.turn('code', 1)", "copy its code block with that number"),
    *(Key(TURN, str(n), str(n), f"screen.turn('code', {n})") for n in range(2, 10)),
    Key(
        TURN, "b", "B", "screen.turn('branch')", "a separate conversation up to here",
        hints={"selecting": "branch"}
    ),
    Key(
        TURN, "d,delete", "D", "screen.turn('remove')", "twice: remove it and the turns after it",
        hints={"selecting": "delete"},
    ),
)  # fmt: skip
_VERSIONS = (
    Key(
        TURN, "left", "←→", "screen.turn('version', -1)", "its other versions",
        hints={"selecting": "version"}
    ),
    Key(TURN, "right", "Right", "screen.turn('version', 1)"),
    Key(TURN, "t", "T", "screen.turn('thinking')", "show or hide its thinking and tool results"),
    Key(TURN, "escape,q,i", "Esc", "unselect",
    hints={"selecting": "back", "found": "back"}),
)  # fmt: skip
_APPROVING = (
    Key(APPROVAL, "y", "Y", "yes", hints={"approving": "runs it", "approving a tool": "once"}),
    Key(APPROVAL, "a", "A", "always", hints={"approving a tool": "in this chat"}),
    Key(APPROVAL, "n,escape,q", "N", "no",
    hints={"approving": "does not", "approving a tool": "no"}),
)  # fmt: skip
_PLANNING = (
    Key(MODELS, "enter", "Enter",
    hints={"models": "pulls, uses", "on disk": "uses"}),
    Key(
        MODELS, "left_square_bracket,left", "←→", "step('context', -1)",
        "a shorter, a longer context",
        hints={"models": "context"},
    ),
    Key(MODELS, "right_square_bracket,right", "Right", "step('context', 1)"),
    Key(MODELS, "p", "P", "next('purpose')", "the next purpose (Tab goes to every slider)"),
    Key(MODELS, "t", "T", "next('wait')", "the longest wait for an answer"),
)  # fmt: skip
_MACHINE = (
    Key(MODELS, "g", "G", "next('memory')", "plan with another memory size"),
    Key(MODELS, "m", "M", "ask('machine')", "another machine, by its name",
    hints={"models": "machine"}),
    Key(MODELS, "w", "W", "why", "the arithmetic of a plan", hints={"models": "why"}),
    Key(
        MODELS, "d", "D", "disk", "the installed models and their owners",
        hints={"models": "disk", "on disk": "plans"},
    ),
)  # fmt: skip
_MODELS = (
    Key(MODELS, "f,slash", "F", "ask('filter')", "show only models with these words",
    hints={"models": "filter"}),
    Key(MODELS, "o", "O", "sort", "sort by best, speed or memory",
    hints={"models": "sort"}),
    Key(MODELS, "s", "S", "stop", "stop a download; pulling again continues it"),
    Key(
        MODELS, "delete,ctrl+x", "Delete", "remove", "in the list of installed models, twice: remove a model's files",
        hints={"on disk": "removes"},
    ),
    Key(MODELS, "escape,q", "Esc", "close",
    hints={"models": "back", "on disk": "back"}),
)  # fmt: skip
_SLIDERS = (
    Key(SLIDER, "left", "Left, Right", "move(-1)", "move a slider"),
    Key(SLIDER, "right", "Right", "move(1)"),
)  # fmt: skip
_PANELS = (
    Key(HELP, "escape,q,f1,enter", "Esc", "close", hints={"help": "closes"}),
    Key(FILES, "enter", "Enter",
    hints={"asked": "brings it back"}),
    Key(FILES, "up", "↑↓", hints={"asked": "newer, older"}),
    Key(FILES, "escape", "Esc", "close",
    hints={"asked": "closes"}),
)  # fmt: skip
_PICKING = (
    Key(PICKER, "enter", "Enter",
    hints={"choosing": "opens", "finding": "goes there"}),
    Key(PICKER, "up", "↑↓", hints={"finding": "the one before, after"}),
    Key(PICKER, "ctrl+x", "Ctrl+X", "remove", priority=True,
    hints={"choosing": "removes"}),
    Key(PICKER, "escape", "Esc", "close",
    hints={"choosing": "closes", "finding": "closes"}),
)  # fmt: skip
KEYS = (
    *_WRITING,
    *_INPUT,
    *_CHAT,
    *_FIRST_RUN,
    *_APP,
    *_SELECTING,
    *_ANSWERS,
    *_COPYING,
    *_VERSIONS,
    *_APPROVING,
    *_PLANNING,
    *_MACHINE,
    *_MODELS,
    *_SLIDERS,
    *_PANELS,
    *_PICKING,
)


def hints(context: KeyContext, *, without: str = "") -> str:
    """The key hints of a context, in a line for a frame; `without` the key of that id."""
    shown = []
    for key in KEYS:
        if context in key.hints and (not without or key.id != without):
            label = key.label_now.partition(",")[0]
            shown.append(f"{label} {key.hints[context]}")
    return " · ".join(shown)
