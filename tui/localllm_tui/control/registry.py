"""Everything a person can do, in sections: what F1 shows, and /help where there is no screen."""

from __future__ import annotations

from dataclasses import dataclass

from localllm_tui.control.commands import COMMANDS
from localllm_tui.control.keys import APP, CHAT, COMPOSER, KEYS, MODELS, SLIDER, TURN


@dataclass(frozen=True, slots=True)
class Entry:
    """`how` it is asked for, and `what` it does."""

    how: str
    what: str


@dataclass(frozen=True, slots=True)
class Section:
    """Entries that belong together."""

    title: str
    entries: tuple[Entry, ...]


def sections() -> tuple[Section, ...]:
    """All keys and commands."""
    return (
        _keys("In the input", COMPOSER),
        _keys("Anywhere in the chat", CHAT, APP),
        _keys("With a turn selected", TURN),
        _keys("Among the models", MODELS, SLIDER),
        commands(),
    )


def commands(*, plain: bool = False) -> Section:
    """The slash commands; `plain`: those that work without a screen."""
    return Section("Commands", tuple(Entry(c.usage, c.help) for c in COMMANDS if c.plain or not plain))


def _keys(title: str, *owners: str) -> Section:
    keys = [Entry(k.label_now, k.help) for owner in owners for k in KEYS if k.owner == owner and k.help]
    if CHAT in owners:
        keys += [Entry(c.label_now, c.help) for c in COMMANDS if c.label_now]
    return Section(title, tuple(keys))


def as_text(section: Section) -> str:
    """A section as lines, aligned."""
    width = max(len(e.how) for e in section.entries)
    return "\n".join([section.title, *(f"  {e.how.ljust(width)}  {e.what}" for e in section.entries)])
