"""A tool's call in an answer: folded to a line, with its arguments and what it said inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from textual.widget import Widget
from textual.widgets import Collapsible, Static

from localllm_tui.control.client import ToolCall, ToolRan
from localllm_tui.control.formatting import elide
from localllm_tui.control.terminal import printable
from localllm_tui.widgets.foreign import label


class ToolFold(Collapsible):
    """A call and what came of it."""

    DEFAULT_CSS = """
    ToolFold { border: none; padding: 0; margin: 0; background: transparent; height: auto; }
    ToolFold Contents { padding: 0 0 0 2; height: auto; }
    """

    def __init__(self, ran: ToolRan) -> None:
        said = f"{len(ran.result):,} characters" if ran.allowed else "did not run"
        call = " ".join(printable(f"{ran.call.name} {ran.call.arguments}").split())
        inside = Static(printable(f"{ran.call.arguments}\n→ {ran.result}"), markup=False)
        # Collapsible asks for a string, and takes what needs no parsing: there is no escape that Textual always undoes.
        title = label(f"tool: {elide(call, 60)} · {said}")
        super().__init__(inside, title=title, collapsed=True)  # type: ignore[arg-type]

    def on_mount(self) -> None:
        for part in self.walk_children(Widget):
            part.can_focus = False  # a click folds; the keys stay with the input


def tool_ran(told: Mapping[str, Any]) -> ToolRan:
    """From what is kept with an answer."""
    call = ToolCall("", str(told.get("name", "")), str(told.get("arguments", "")))
    return ToolRan(call, str(told.get("result", "")), bool(told.get("allowed")))
