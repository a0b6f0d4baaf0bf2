"""The table of keys as Textual wants it."""

from __future__ import annotations

from textual.binding import Binding, BindingType

from localllm_tui.control.keys import KEYS


def bindings_of(owner: str) -> list[BindingType]:
    """The bindings of one part of the screen. None is shown: the frames have their own hints."""
    return [
        Binding(key.keys, key.action, key.help, show=False, priority=key.priority)
        for key in KEYS
        if key.owner == owner and key.action and not key.caught
    ]


def caught_by(owner: str) -> dict[str, str]:
    """The actions of the keys that one part of the screen must take before Textual's own widget does."""
    return {name: key.action for key in KEYS if key.owner == owner and key.caught for name in key.keys.split(",")}
