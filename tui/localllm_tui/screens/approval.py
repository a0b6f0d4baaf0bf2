"""Asks whether a tool may run: with its arguments as they are, and with no as what any other key means."""

from __future__ import annotations

import json
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from localllm_tui.bindings import bindings_of
from localllm_tui.control.client import ToolCall
from localllm_tui.control.interfaces import ToolSpec
from localllm_tui.control.keys import APPROVAL, Moment, hints
from localllm_tui.control.terminal import printable


class Approval(ModalScreen[bool]):
    """Dismisses with True for a yes alone."""

    DEFAULT_CSS = """
    Approval { align: center bottom; }
    Approval > VerticalScroll {
        width: 96%; max-width: 110; height: auto; max-height: 70%;
        border: heavy $warning; padding: 0 1; background: $surface;
    }
    Approval Static { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings_of(APPROVAL)

    def __init__(self, call: ToolCall, spec: ToolSpec) -> None:
        super().__init__()
        self._call, self._spec = call, spec

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = "the model asks for a tool"
            box.border_subtitle = hints(Moment.APPROVING)
            about = " ".join(self._spec.description.split())
            said = f"{self._spec.host}: {self._spec.name}" + (f" – {about}" if about else "")
            yield Static(printable(said), markup=False)
            yield Static(printable(arguments_text(self._call.arguments)), markup=False)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()

    def action_yes(self) -> None:
        self.dismiss(True)

    def action_no(self) -> None:
        self.dismiss(False)


def arguments_text(arguments: str) -> str:
    """A call's arguments, one to a line where they are an object; shown whole, so that a yes is to all of it."""
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return json.dumps(found, indent=2, ensure_ascii=False)
