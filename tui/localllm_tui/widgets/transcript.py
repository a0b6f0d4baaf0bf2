"""The conversation on screen: a turn of it, and the scrolling list that follows its end while that
grows."""

from __future__ import annotations

import re

from textual import events
from textual.containers import Vertical, VerticalScroll
from textual.widgets import Static

from localllm_tui.bindings import HasKeys
from localllm_tui.control.keys import TURN
from localllm_tui.control.terminal import one_line
from localllm_tui.messages import (
    MoreTurnsWanted,
    TextGrew,
    TurnSelected,
)
from localllm_tui.widgets.contrast import SELECTED
from localllm_tui.widgets.text import GrowingText


class TurnView(Vertical):
    """A turn. `turn_id`: the id of its message, or 0. `place`: its version number and the number of
    versions."""

    DEFAULT_CSS = f"""
    TurnView {{ margin-top: 1; padding-left: 1; height: auto; }}
    TurnView > .who {{ text-style: bold; }}
    TurnView > .note {{ color: $hint; }}
    TurnView.-selected > .who {{ text-style: bold reverse; width: auto; }}
    TurnView.-selected {{ background: $foreground {SELECTED:.0%}; }}
    """

    def __init__(self, who: str, turn_id: int = 0, place: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        self.who = one_line(who)
        self.turn_id = turn_id
        self.place = place

    @property
    def headline(self) -> str:
        at, of = self.place
        if of > 1:
            return f"{self.who}  ◂ {at}/{of} ▸"
        return self.who

    def show_place(self, turn_id: int, place: tuple[int, int]) -> None:
        self.turn_id = turn_id
        self.place = place
        for line in self.query(".who").results(Static):  # empty before it is composed
            line.update(self.headline)

    def on_mount(self) -> None:
        if isinstance(self.parent, Transcript) and self.parent.searched is not None:
            self.call_after_refresh(self.mark, self.parent.searched)

    def mark(self, searched: re.Pattern[str] | None, now: int = -1) -> list[int]:
        """Mark the hits of the search, and emphasize the row `now` of this view; returns its rows
        with hits."""
        rows = []
        for text in self.query(GrowingText):
            top = text.region.y - self.region.y
            found = text.mark(searched, now - top if now >= 0 else -1)
            if text.region.height:
                rows += [top + y for y in found]
        return rows

    @property
    def complete(self) -> bool:
        """True if it has visible texts, and all are laid out."""
        texts = [text for text in self.query(GrowingText) if text.region.height]
        return bool(texts) and all(text.rows.complete for text in texts)

    def on_click(self, event: events.Click) -> None:
        # a single click starts a text selection
        if self.turn_id and event.chain == 2 and isinstance(self.parent, Transcript):
            event.stop()
            self.parent.select(self)


class Transcript(HasKeys, VerticalScroll, keys=TURN, can_focus=False):
    """Scrolls; stays at its end while new text arrives, until the user scrolls up. The input passes
    scroll keys on and keeps the focus, except while a turn is selected."""

    DEFAULT_CSS = """
    Transcript { height: 1fr; padding: 0 1; }
    Transcript > * { height: auto; }
    """

    following = True
    thinking = "folded"  # how thinking is shown at first: "shown", "folded" or "off"
    searched: re.Pattern[str] | None = None
    _anchored_here = _wanted_more = False
    _found_at = 0  # index of the current hit among those of the selected turn
    _entering = 0  # the step to a hit in a turn whose text is not laid out yet

    # -- the turn that is selected -----------------------------------------------------------------

    @property
    def _turns(self) -> list[TurnView]:
        return [child for child in self.children if isinstance(child, TurnView)]

    @property
    def views(self) -> list[TurnView]:
        """The turns on screen that have a place in the conversation."""
        return [view for view in self._turns if view.turn_id]

    @property
    def selected(self) -> TurnView | None:
        return next((view for view in self._turns if view.has_class("-selected")), None)

    def select(self, view: TurnView | None) -> None:
        """Select a turn, which gets the keys; None: back to the input."""
        self._entering = 0
        for other in self._turns:
            other.set_class(other is view, "-selected")
        self.can_focus = view is not None
        if view is not None:
            self.focus()
            self.release()
            self.call_after_refresh(self.scroll_to_widget, view, animate=False)
        self.post_message(TurnSelected())

    def action_select(self, step: int) -> None:
        """Go to the turn before or after; after the last one is the input."""
        views = self.views
        selected = self.selected
        if selected not in views:
            self.select(views[-1] if views else None)
            return
        at = views.index(selected) + step
        if at < 0:
            self.post_message(MoreTurnsWanted(-1))
        else:
            self.select(views[at] if at < len(views) else None)

    # -- what was searched for ---------------------------------------------------------------------

    def search(self, words: str) -> None:
        """Mark each of these words in every turn; "" removes the marks."""
        self.searched = None
        self._entering = 0
        if words.strip():
            parts = "|".join(re.escape(word) for word in words.split())
            self.searched = re.compile(parts, re.IGNORECASE)
        for view in self._turns:
            view.mark(self.searched)

    def show_found(self, step: int, *, entering: bool = False) -> bool:
        """Go to the next row with a hit in the selected turn (`step` -1: the previous one).

        `entering`: go to the first or last hit of the turn. Returns False if there is no such row.
        """
        view = self.selected
        if view is None or self.searched is None:
            return False
        rows = view.mark(self.searched)
        at = self._found_at + step
        if entering:
            at = 0 if step > 0 else len(rows) - 1
            if not view.complete and (step < 0 or not rows):
                self._entering = step
                return False
        if not 0 <= at < len(rows):
            return False
        self._found_at = at
        view.mark(self.searched, rows[at])
        self.scroll_to(y=view.virtual_region.y + rows[at] - self.size.height // 3, animate=False)
        return True

    def action_unselect(self) -> None:
        self.select(None)

    # -- scrolling ---------------------------------------------------------------------------------

    def release(self) -> None:
        """Stop following the end."""
        self.anchor(False)
        self.following = self._anchored_here = False

    def follow(self, *, always: bool = False) -> None:
        """Stay at the end as it moves, if the user is (or `always`) there."""
        if always:
            self.following = True
            self._anchored_here = False
        if not self._anchored_here:
            self.call_after_refresh(self._anchor_when_full)

    def restart(self) -> None:
        """The content was replaced: begin at its top, and follow it once it is longer than the
        screen."""
        self.anchor(False)
        self.follow(always=True)

    def watch_virtual_size(self) -> None:
        """The content has a new height: anchor it once it is taller than the screen."""
        if self.following and not self._anchored_here:
            self.call_after_refresh(self._anchor_when_full)
        if self._entering:
            self.call_after_refresh(self._enter_again)

    def on_text_grew(self, event: TextGrew) -> None:
        """Keep what is on screen in its place while a text above it grows."""
        if not self.following and event.text.region.bottom <= self.region.y:
            self.call_after_refresh(self.scroll_relative, y=event.rows, animate=False)
        self._enter_again()

    def _enter_again(self) -> None:
        """Try again to go to a hit, after more text was laid out."""
        if self._entering:
            step = self._entering
            self._entering = 0
            self.show_found(step, entering=True)

    def _anchor_when_full(self) -> None:
        # Textual would push content shorter than the screen down to its end.
        if self.max_scroll_y > 0 and not self._anchored_here:
            self._anchored_here = True
            self.anchor()

    def _want_more(self, step: int) -> None:
        """Ask for more turns at either end; once for all keys and wheel steps until they are on
        screen."""
        at_end = self.scroll_y >= self.max_scroll_y
        if step < 0:
            at_end = self.scroll_y <= 0
        if at_end and not self._wanted_more:
            self._wanted_more = True
            self.post_message(MoreTurnsWanted(step))

    def more_shown(self) -> None:
        """Note that the requested turns are on screen."""
        self._wanted_more = False

    @property
    def more_below(self) -> bool:
        """True if there is text below the visible part."""
        return self.max_scroll_y - self.scroll_y >= 1

    def page(self, pages: int) -> None:
        """Scroll by screenfuls; at either end, more is wanted."""
        self._want_more(pages)
        before = self.scroll_target_y
        self.scroll_relative(y=pages * max(1, self.size.height - 2), animate=False)
        self.following = pages > 0 and before + self.size.height >= self.max_scroll_y - 1

    def on_mouse_scroll_up(self, _: events.MouseScrollUp) -> None:
        self.following = False
        self._want_more(-1)

    def on_mouse_scroll_down(self, _: events.MouseScrollDown) -> None:
        self._want_more(1)
        self.following = self.scroll_target_y >= self.max_scroll_y - 3
