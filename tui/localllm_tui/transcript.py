"""The conversation on screen: questions, answers that stream as Markdown, notes and errors."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Collapsible, Markdown, Static

from localllm.conversation.history import StoredMessage
from localllm_tui.control.session import typed_in
from localllm_tui.control.terminal import printable
from localllm_tui.control.wording import note_under

# Twenty times a second reads as continuous. But laying out and drawing a long answer takes time that the model wants
# too: a frame waits until all the work of this thread since the last one is at most this share of the time passed,
# or two seconds are over (a list of hundreds of items is laid out anew each time).
DRAW_EVERY_S = 0.05
DRAW_SHARE = 0.1
DRAW_AT_LEAST_EVERY_S = 2.0


class Transcript(VerticalScroll):
    """Scrolls; stays at its end while new text arrives, until the user scrolls up."""

    DEFAULT_CSS = """
    Transcript { height: 1fr; padding: 0 1; scrollbar-size-vertical: 1; }
    Transcript > * { height: auto; }
    """

    # Textual 4 keeps an anchored widget at its end within the layout; before it, this class does so afterwards.
    _ANCHORS = hasattr(Widget, "release_anchor")
    following = True
    _anchored_here = False

    def on_mount(self) -> None:
        # Reading is done with the keys the input passes on: focus stays in the input.
        self.can_focus = False

    def follow(self, *, always: bool = False) -> None:
        """Stay at the end as it moves, if the user is (or `always`) there."""
        if always:
            self.following = True
            self._anchored_here = False
        if not self._ANCHORS:
            if self.following:
                self.call_after_refresh(self._to_end)
        elif not self._anchored_here:
            self.call_after_refresh(self._anchor_when_full)

    def restart(self) -> None:
        """The content was replaced: begin at its top, and follow it once it is longer than the screen."""
        if self._ANCHORS:
            self.anchor(False)
        self.follow(always=True)

    def _anchor_when_full(self) -> None:
        # Textual would push content shorter than the screen down to its end.
        if self.max_scroll_y > 0 and not self._anchored_here:
            self._anchored_here = True
            self.anchor()

    def page(self, pages: int) -> None:
        """Scroll by screenfuls."""
        before = self.scroll_target_y
        self.scroll_relative(y=pages * max(1, self.size.height - 2), animate=False)
        self.following = pages > 0 and before + self.size.height >= self.max_scroll_y - 1

    def _to_end(self) -> None:
        if self.following:
            self.scroll_end(animate=False)

    def on_mouse_scroll_up(self, _: events.MouseScrollUp) -> None:
        self.following = False

    def on_mouse_scroll_down(self, _: events.MouseScrollDown) -> None:
        self.following = self.scroll_target_y >= self.max_scroll_y - 3


class Question(Vertical):
    """What the user said."""

    DEFAULT_CSS = """
    Question { margin-top: 1; padding-left: 1; border-left: heavy $accent; }
    Question > .who { text-style: bold; }
    """

    @classmethod
    def of(cls, turn: StoredMessage) -> Question:
        """A stored question: what was typed, and the names of the files."""
        return cls(typed_in(turn), list(turn.meta.get("attached", ())))

    def __init__(self, text: str, attached: list[str] | None = None) -> None:
        super().__init__()
        self.text = text
        self.attached = attached or []

    def compose(self) -> ComposeResult:
        yield Static("You", classes="who", markup=False)
        if self.attached:
            yield Static("attached: " + printable(", ".join(self.attached)), classes="files", markup=False)
        if self.text:
            yield Static(printable(self.text), markup=False)


class AnswerView(Vertical):
    """An answer: the thinking (folded), the Markdown text, and a line under it. Streams by `feed`, ends by `settle`."""

    DEFAULT_CSS = """
    AnswerView { margin-top: 1; padding-left: 1; border-left: solid $foreground 40%; }
    AnswerView > .who { text-style: bold; }
    AnswerView > Markdown { height: auto; padding: 0; margin: 0; background: transparent; }
    AnswerView MarkdownHeader { margin: 1 0; content-align: left middle; }
    AnswerView MarkdownFence { margin: 0 0 1 0; overflow: hidden hidden; }
    AnswerView MarkdownFence > Label { width: 1fr; padding: 0 2; }
    AnswerView MarkdownBlockQuote { margin: 0 0 1 0; }
    AnswerView Markdown > .-first { margin-top: 0; }
    AnswerView Markdown > .-last { margin-bottom: 0; }
    AnswerView > .note, AnswerView > .progress { text-style: dim; }
    AnswerView > Collapsible { border: none; padding: 0; margin: 0; background: transparent; }
    AnswerView > Collapsible Contents { padding: 0 0 0 2; }
    AnswerView .thinking { text-style: dim italic; }
    """

    @classmethod
    def of(cls, turn: StoredMessage, model: str) -> AnswerView:
        """A stored answer; `model` gave it where the turn does not say."""
        who = str(turn.meta.get("model") or model)
        return cls(who, turn.content, turn.reasoning or "", note_under(turn))

    def __init__(self, who: str, text: str = "", reasoning: str = "", note: str = "") -> None:
        super().__init__()
        self.who = who
        self._shown = printable(text)
        self._pending = ""
        self._reasoning = printable(reasoning)
        self._reasoning_new = False
        self._note = note
        self._lock = asyncio.Lock()
        self._timer: Timer | None = None
        self._drawn = (0.0, float("-inf"))  # CPU seconds of this thread, and the time, at the last frame

    def compose(self) -> ComposeResult:
        yield Static(self.who, classes="who", markup=False)
        yield Static("", classes="progress", markup=False)
        with Collapsible(title="Thinking", collapsed=True):
            yield Static(self._reasoning, classes="thinking", markup=False)
        yield Markdown(self._shown)
        yield Static(self._note, classes="note", markup=False)

    def on_mount(self) -> None:
        self._set_reasoning_title(done=True)
        fold = self.query_one(Collapsible)
        fold.display = bool(self._reasoning)
        for part in fold.walk_children(Widget):
            part.can_focus = False  # a click folds; the keys stay with the input
        if self._shown:
            self.call_after_refresh(self._mark_ends)
        self.query_one(".progress").display = False
        self.query_one(".note").display = bool(self._note)

    @property
    def text(self) -> str:
        """The answer as shown, what is not drawn yet included."""
        return self._shown + self._pending

    def progress(self, what: str) -> None:
        """Say what happens before the first text; "" when it is over."""
        line = self.query_one(".progress", Static)
        line.display = bool(what)
        line.update(what)

    def start(self) -> None:
        """Expect a stream."""
        self._timer = self.set_interval(DRAW_EVERY_S, self._draw)

    def feed(self, text: str = "", reasoning: str = "") -> None:
        """Take a piece; it is drawn with the next frame."""
        self._pending += printable(text)
        if reasoning:
            self._reasoning += printable(reasoning)
            self._reasoning_new = True

    async def settle(self, note: str = "") -> None:
        """The stream is over: draw the rest and show `note` under the answer."""
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
        self.progress("")
        await self._draw(last=True)
        self.note(note)

    def note(self, note: str) -> None:
        """Show `note` under the answer, or nothing."""
        line = self.query_one(".note", Static)
        line.display = bool(note)
        line.update(note)

    async def replace(self, text: str, reasoning: str, note: str) -> None:
        """Show another version of the answer."""
        async with self._lock:
            self._shown, self._pending = printable(text), ""
            self._reasoning, self._reasoning_new = printable(reasoning), True
            await self.query_one(Markdown).update(self._shown)
            self._mark_ends()
            self._draw_reasoning(last=True)
        self.note(note)

    def toggle_thinking(self) -> bool:
        """Fold or unfold the thinking; False when there is none."""
        if self._reasoning:
            fold = self.query_one(Collapsible)
            fold.collapsed = not fold.collapsed
            self._reasoning_new = True
            self._draw_reasoning(last=self._timer is None)
        return bool(self._reasoning)

    async def _draw(self, last: bool = False) -> None:
        if not last and (self._lock.locked() or not self._may_draw()):
            return
        async with self._lock:
            self._drawn = (time.thread_time(), time.monotonic())
            new, self._pending = self._pending, ""
            if new or last:
                self._draw_reasoning(last=last or bool(self._shown + new))
            elif self._reasoning_new:
                self._draw_reasoning(last=False)
            if new:
                self._shown += new
                await self._add(self.query_one(Markdown), new)
        if isinstance(self.parent, Transcript):
            self.parent.follow()

    def _may_draw(self) -> bool:
        cpu_s, at_s = self._drawn
        passed_s = time.monotonic() - at_s
        return passed_s >= DRAW_AT_LEAST_EVERY_S or time.thread_time() - cpu_s <= DRAW_SHARE * passed_s

    async def _add(self, markdown: Any, new: str) -> None:
        # Textual 4 parses and draws only the last block again; before it there is only the whole.
        if hasattr(markdown, "append"):
            await markdown.append(new)
        else:
            await markdown.update(self._shown)
        self._mark_ends()

    def _mark_ends(self) -> None:
        """Class the outer blocks, for the margins: :last-child is not looked at again when a block is appended."""
        blocks = self.query_one(Markdown).children
        for i, block in enumerate(blocks):
            block.set_class(i == 0, "-first")
            block.set_class(i == len(blocks) - 1, "-last")

    def _draw_reasoning(self, *, last: bool) -> None:
        fold = self.query_one(Collapsible)
        if not self._reasoning:
            fold.display = False
            return
        fold.display = True
        self._set_reasoning_title(done=last)
        if self._reasoning_new and (last or not fold.collapsed):
            self.query_one(".thinking", Static).update(self._reasoning)
            self._reasoning_new = False

    def _set_reasoning_title(self, *, done: bool) -> None:
        words = len(self._reasoning.split())
        self.query_one(Collapsible).title = f"{'Thought' if done else 'Thinking…'} ({words:,} words, Ctrl+T)"


class Note(Vertical):
    """Something the chat itself says, as Markdown or plain text; kept out of the conversation."""

    DEFAULT_CSS = """
    Note { margin-top: 1; padding-left: 2; }
    Note > Markdown { height: auto; padding: 0; margin: 0; background: transparent; }
    Note > Static { text-style: dim; }
    """

    def __init__(self, text: str, *, markdown: bool = False) -> None:
        super().__init__()
        self.text = text
        self.markdown = markdown

    def compose(self) -> ComposeResult:
        yield Markdown(self.text) if self.markdown else Static(printable(self.text), markup=False)


class Trouble(Vertical):
    """An error, what to do about it, and the way on."""

    DEFAULT_CSS = """
    Trouble { margin-top: 1; padding-left: 1; border-left: double $error; }
    Trouble > .message { text-style: bold; }
    """

    def __init__(self, message: str, hint: str = "", way_on: str = "") -> None:
        super().__init__()
        self.lines = (message, hint, way_on)

    def compose(self) -> ComposeResult:
        message, hint, way_on = (printable(line) for line in self.lines)
        yield Static(f"Error: {message}", classes="message", markup=False)
        if hint:
            yield Static(f"Hint: {hint}", markup=False)
        if way_on:
            yield Static(way_on, markup=False)
