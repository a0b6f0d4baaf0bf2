"""The page of the first run, in the empty conversation: it goes with the first question, as the welcome does."""

from __future__ import annotations

from collections.abc import Sequence

from textual.widgets import Static

from localllm_tui.control.terminal import printable


class FirstRun(Static):
    """Shows these lines."""

    DEFAULT_CSS = """
    FirstRun { margin: 1 1 0 1; padding: 0 1; border-left: heavy $accent; }
    """

    def __init__(self, said: Sequence[str]) -> None:
        super().__init__(printable("\n".join(said)), id="first-run", markup=False)
