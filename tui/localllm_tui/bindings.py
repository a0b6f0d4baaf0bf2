"""The tables of keys and commands as Textual wants them."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.binding import Binding, BindingType

from localllm_tui.control.commands import ALL_KEYS
from localllm_tui.control.keys import CHAT, COMMAND, Key


def bindings_of(owner: str) -> list[BindingType]:
    """The bindings of one part of the screen. None is shown by Textual: the frames carry the
    hints."""
    owners = (CHAT, COMMAND) if owner == CHAT else (owner,)
    return [
        _binding(key) for key in ALL_KEYS if key.owner in owners and key.action and not key.caught
    ]


def _binding(key: Key) -> Binding:
    return Binding(
        key.keys, key.action, key.help, show=False, priority=key.priority, id=key.id or None
    )


class HasKeys:
    """A part of the screen that has the keys of one owner, named in the head of its class."""

    BINDINGS: ClassVar[list[BindingType]]

    def __init_subclass__(cls, *, keys: str = "", **more: Any) -> None:
        if keys:
            cls.BINDINGS = bindings_of(keys)
        super().__init_subclass__(**more)
