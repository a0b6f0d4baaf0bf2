"""An answer on screen: streams as Markdown, and never draws the whole of it again."""

from __future__ import annotations

import asyncio
import time

from textual.app import ComposeResult
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Collapsible, Static

from localllm.conversation.history import StoredMessage
from localllm_tui.control.client import ToolRan
from localllm_tui.control.terminal import printable
from localllm_tui.control.wording import note_under
from localllm_tui.widgets.parts import AnswerText
from localllm_tui.widgets.tool import ToolFold, tool_ran
from localllm_tui.widgets.transcript import Transcript
from localllm_tui.widgets.turn import TurnView

# Twenty times a second reads as continuous. But laying out and drawing a long answer takes time that the model wants
# too: a frame waits until all the work of this thread since the last one is at most this share of the time passed,
# or two seconds are over (a list of hundreds of items is laid out anew each time), or as much waits as a frame takes:
# blocks cost time to make, and while they are made no key is taken.
DRAW_EVERY_S = 0.05
DRAW_SHARE = 0.1
DRAW_AT_LEAST_EVERY_S = 2.0
PIECE_CHARS = 400


class AnswerView(TurnView):
    """An answer: the thinking (folded), the Markdown text, and a line under it. Streams by `feed`, ends by `settle`."""

    DEFAULT_CSS = """
    AnswerView { border-left: solid $foreground 40%; }
    AnswerView MarkdownHeader { margin: 1 0; content-align: left middle; }
    AnswerView MarkdownFence { margin: 0 0 1 0; overflow: hidden hidden; }
    AnswerView MarkdownFence > Label { width: 1fr; padding: 0 2; }
    AnswerView MarkdownBlockQuote { margin: 0 0 1 0; }
    AnswerView > .progress { text-style: dim; }
    AnswerView > Collapsible { border: none; padding: 0; margin: 0; background: transparent; }
    AnswerView > Collapsible Contents { padding: 0 0 0 2; }
    AnswerView .thinking { text-style: dim italic; }
    """

    @classmethod
    def of(cls, turn: StoredMessage, model: str, place: tuple[int, int] = (1, 1)) -> AnswerView:
        """A stored answer; `model` gave it where the turn does not say."""
        who = str(turn.meta.get("model") or model)
        view = cls(who, turn.content, turn.reasoning or "", note_under(turn))
        view.turn_id, view.place = turn.id, place
        view._ran = [tool_ran(told) for told in turn.meta.get("tools") or ()]
        return view

    def __init__(self, who: str, text: str = "", reasoning: str = "", note: str = "") -> None:
        super().__init__(who)
        self._shown = printable(text)
        self._pending = ""
        self._reasoning = printable(reasoning)
        self._reasoning_new = False
        self._note = note
        self._ran: list[ToolRan] = []
        self._lock = asyncio.Lock()
        self._timer: Timer | None = None
        self._drawn = (0.0, float("-inf"))  # CPU seconds of this thread, and the time, at the last frame

    def compose(self) -> ComposeResult:
        yield self._headline()
        yield Static("", classes="progress", markup=False)
        with Collapsible(title="Thinking", collapsed=True):
            yield Static(self._reasoning, classes="thinking", markup=False)
        for ran in self._ran:
            yield ToolFold(ran)
        yield AnswerText(self._shown)
        yield Static(self._note, classes="note", markup=False)

    def on_mount(self) -> None:
        self._set_reasoning_title(done=True)
        fold = self._thinking
        fold.display = bool(self._reasoning)
        for part in fold.walk_children(Widget):
            part.can_focus = False  # a click folds; the keys stay with the input
        if self._shown:
            self.call_after_refresh(self._ends_of_stored)
        self.query_one(".progress").display = False
        self.query_one(".note").display = bool(self._note)

    def _ends_of_stored(self) -> None:
        self._text.mark_ends(all_of_it=True)
        # What was folded before that had the margins of before.
        self._text.unfold_all()
        if isinstance(self.parent, Transcript):
            self.call_after_refresh(self.parent.fold_far)

    @property
    def text(self) -> str:
        """The answer as shown, what is not drawn yet included."""
        return self._shown + self._pending

    @property
    def _text(self) -> AnswerText:
        return self.query_one(AnswerText)

    @property
    def _thinking(self) -> Collapsible:
        return self.query(Collapsible).first()

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

    def tool(self, ran: ToolRan) -> None:
        """Show a call and what came of it, folded, above the text."""
        self.mount(ToolFold(ran), before=self._text)

    async def settle(self, note: str = "") -> None:
        """The stream is over: draw the rest and show `note` under the answer."""
        if self._timer is not None:
            async with self._lock:  # stopped in the middle of a frame it would take the half-mounted blocks along
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

    def toggle_thinking(self) -> bool:
        """Fold or unfold the thinking; False when there is none."""
        if self._reasoning:
            fold = self._thinking
            fold.collapsed = not fold.collapsed
            self._reasoning_new = True
            self._draw_reasoning(last=self._timer is None)
        return bool(self._reasoning)

    async def _draw(self, last: bool = False) -> None:
        if not self.is_attached or (not last and (self._lock.locked() or not self._may_draw())):
            return
        async with self._lock:
            self._drawn = (time.thread_time(), time.monotonic())
            new, self._pending = self._pending[:PIECE_CHARS], self._pending[PIECE_CHARS:]
            if new or last:
                self._draw_reasoning(last=last or bool(self._shown + new))
            elif self._reasoning_new:
                self._draw_reasoning(last=False)
            if new:
                self._shown += new
                await self._text.add(new)
        if isinstance(self.parent, Transcript):
            self.parent.follow()
            self.parent.fold_far()
        if last and self._pending:
            await asyncio.sleep(0)
            await self._draw(last=True)

    def _may_draw(self) -> bool:
        cpu_s, at_s = self._drawn
        passed_s = time.monotonic() - at_s
        if len(self._pending) >= PIECE_CHARS:
            return True
        return passed_s >= DRAW_AT_LEAST_EVERY_S or time.thread_time() - cpu_s <= DRAW_SHARE * passed_s

    def _draw_reasoning(self, *, last: bool) -> None:
        fold = self._thinking
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
        self._thinking.title = f"{'Thought' if done else 'Thinking…'} ({words:,} words, Ctrl+T)"
