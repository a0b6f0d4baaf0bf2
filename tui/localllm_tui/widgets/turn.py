"""What questions and answers on screen have in common: whose they are, which version they show, and being selected."""

from __future__ import annotations

from textual import events
from textual.containers import Vertical
from textual.css.query import NoMatches
from textual.widgets import Static

from localllm_tui.messages import TurnClicked


def headline(who: str, place: tuple[int, int]) -> str:
    """The line above a turn; `place` is which version of how many."""
    at, of = place
    return f"{who}  ◂ {at}/{of} ▸" if of > 1 else who


class TurnView(Vertical):
    """A turn. `turn_id` is its message's id; 0 while it has none."""

    DEFAULT_CSS = """
    TurnView { margin-top: 1; padding-left: 1; height: auto; }
    TurnView > .who { text-style: bold; }
    TurnView > .note { text-style: dim; }
    TurnView.-selected > .who { text-style: bold reverse; width: auto; }
    TurnView.-selected { background: $foreground 8%; }
    """

    def __init__(self, who: str, turn_id: int = 0, place: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        self.who = who
        self.turn_id = turn_id
        self.place = place

    @property
    def text(self) -> str:
        """What is said."""
        raise NotImplementedError

    def _headline(self) -> Static:
        return Static(headline(self.who, self.place), classes="who", markup=False)

    def show_place(self, turn_id: int, place: tuple[int, int]) -> None:
        """Say which version this is."""
        self.turn_id, self.place = turn_id, place
        try:
            self.query_one(".who", Static).update(headline(self.who, place))
        except NoMatches:
            pass  # not composed yet: it will be

    def on_click(self, event: events.Click) -> None:
        if self.turn_id and event.chain == 2:  # a single click begins a selection of text
            event.stop()
            self.post_message(TurnClicked(self.turn_id))
