"""An answer on screen: streams as Markdown, and never draws the whole of it again; its tool calls
are folded in it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from textual.app import ComposeResult
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Collapsible, Static

from localllm.conversation.history import StoredMessage
from localllm_tui.control.formatting import elide
from localllm_tui.control.terminal import one_line, printable
from localllm_tui.control.wording import note_under
from localllm_tui.widgets.line_filters import frame_title
from localllm_tui.widgets.text import GrowingText
from localllm_tui.widgets.transcript import Transcript, TurnView

# 15 frames a second look continuous. But drawing takes CPU time from the model: a frame waits until
# the CPU time of this thread since the last frame is at most this share of the time passed, or
# until a second is over.
DRAW_EVERY_S = 1 / 15
DRAW_SHARE = 0.1
DRAW_AT_LEAST_EVERY_S = 1.0
_NEVER_DRAWN = (0.0, float("-inf"))
# The characters of a tool's arguments that may be in its headline.
_CALL_CHARS = 1_000
FOLDED: dict[str, Any] = {"collapsed": True, "collapsed_symbol": "▸", "expanded_symbol": "▾"}


class AnswerView(TurnView):
    """An answer: the thinking (folded), the Markdown text, and a line under it. Streams by `feed`,
    ends by `end`."""

    DEFAULT_CSS = """
    AnswerView { border-left: solid $foreground 40%; }
    AnswerView > .progress, AnswerView > .running { color: $hint; }
    AnswerView > Collapsible, AnswerView > Collapsible:ansi {
        border: none; padding: 0; margin: 0; background: transparent;
    }
    AnswerView > Collapsible Contents { padding: 0 0 0 2; }
    AnswerView .thinking { color: $hint; text-style: italic; }
    """

    def __init__(self, turn: StoredMessage, model: str, place: tuple[int, int] = (1, 1)) -> None:
        """An answer, complete or not; `model` is its model if the turn does not name one."""
        super().__init__(str(turn.meta.get("model") or model), turn.id, place)
        self._answer = GrowingText(printable(turn.content))
        self._thought = GrowingText(printable(turn.reasoning or ""), plain=True, classes="thinking")
        self._thought_words = len(self._thought.source.split())
        self._pending = self._pending_thought = ""
        self._note = note_under(turn)
        self._ran: Sequence[Mapping[str, Any]] = turn.meta.get("tools") or ()
        self._timer: Timer | None = None
        self._tool: tuple[str, float] | None = None  # the one that runs, and its start in seconds
        self._tool_line = ""
        self._hides_thinking = False  # until a key asks for it
        # CPU seconds of this thread, and the time, at the last frame
        self._drawn = _NEVER_DRAWN

    def compose(self) -> ComposeResult:
        yield Static(self.headline, classes="who", markup=False)
        yield Static(classes="progress", markup=False)
        with Fold(title="Thinking", **FOLDED):
            yield self._thought
        for ran in self._ran:
            yield ToolFold(ran)
        yield self._answer
        yield Static(classes="running", markup=False)
        yield Static(classes="note", markup=False)

    def on_mount(self) -> None:
        self._set_reasoning_title(done=True)
        if isinstance(self.parent, Transcript):
            self._hides_thinking = self.parent.thinking == "off"
            self._thinking.collapsed = self.parent.thinking != "shown"
        self._thinking.display = bool(self._thought.source) and not self._hides_thinking
        self.progress("")
        self._show_line(".running", "")
        self._show_line(".note", self._note)

    @property
    def _thinking(self) -> Collapsible:
        return self.query(Collapsible).first()

    def progress(self, text: str) -> None:
        """Show the progress before the first text ("": none any more)."""
        self._show_line(".progress", text)

    def _show_line(self, where: str, text: str) -> None:
        line = self.query_one(where, Static)
        line.display = bool(text)
        line.update(text)

    def start(self) -> None:
        self._timer = self.set_interval(DRAW_EVERY_S, self._draw)

    def feed(self, text: str = "", reasoning: str = "") -> None:
        """Take a piece. The first is drawn at once, others with the next frame."""
        self._pending += printable(text)
        self._pending_thought += printable(reasoning)
        if self._drawn == _NEVER_DRAWN:
            self._draw()

    def tool_started(self, name: str) -> None:
        self._tool = (one_line(name), time.monotonic())
        self._show_tool()

    def tool(self, ran: Mapping[str, Any]) -> None:
        """Show a tool call and its result, folded, above the text."""
        self._tool = None
        self._show_tool()
        self.mount(ToolFold(ran), before=self._answer)

    def _show_tool(self) -> None:
        """Show which tool runs, and for how long."""
        line = ""
        if self._tool is not None:
            name, began_s = self._tool
            line = f"▸ tool: {elide(name, 60)} … {time.monotonic() - began_s:.0f} s, Esc stops"
        if line != self._tool_line:
            self._tool_line = line
            self._show_line(".running", line)

    def end(self, note: str) -> None:
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
        self.progress("")
        self._draw(last=True)
        self._show_line(".note", note)

    def toggle_thinking(self) -> bool:
        """Fold or unfold the thinking and the tool calls. Returns False if there are none."""
        folds: list[Collapsible] = [*self.query(ToolFold)]
        if self._thought.source:
            self._hides_thinking = False
            self._thinking.display = True
            folds.append(self._thinking)
        unfolds = any(fold.collapsed for fold in folds)
        for fold in folds:
            fold.collapsed = not unfolds
        return bool(folds)

    def _draw(self, *, last: bool = False) -> None:
        if self._tool is not None:
            self._show_tool()
        if not self.is_attached or (not last and not self._may_draw()):
            return
        self._drawn = (time.thread_time(), time.monotonic())
        new = self._pending
        self._pending = ""
        self._draw_thought(done=last or bool(self._answer.source or new))
        if new:
            self._answer.add(new)
        if isinstance(self.parent, Transcript):
            self.parent.follow()

    def _may_draw(self) -> bool:
        if not self._pending and not self._pending_thought:
            return False
        cpu_s, at_s = self._drawn
        passed_s = time.monotonic() - at_s
        if passed_s >= DRAW_AT_LEAST_EVERY_S:
            return True
        return time.thread_time() - cpu_s <= DRAW_SHARE * passed_s

    def _draw_thought(self, *, done: bool) -> None:
        new = self._pending_thought
        self._pending_thought = ""
        if new:
            self._thought_words += len(new.split())
            if self._thought.source[-1:].strip() and new[:1].strip():
                self._thought_words -= 1  # the new text begins within a word
            self._thought.add(new)
        self._thinking.display = bool(self._thought.source) and not self._hides_thinking
        self._set_reasoning_title(done=done)

    def _set_reasoning_title(self, *, done: bool) -> None:
        words = self._thought_words
        if done:
            self._thinking.title = f"Thought ({words:,} words, Ctrl+T)"
        else:
            self._thinking.title = f"Thinking… ({words:,} words, Ctrl+T)"


class Fold(Collapsible):
    """A fold for the mouse: the keyboard focus stays with the input."""

    def on_mount(self) -> None:
        for part in self.walk_children(Widget):
            part.can_focus = False


class ToolFold(Fold):
    DEFAULT_CSS = """
    ToolFold, ToolFold:ansi { border: none; padding: 0; margin: 0; background: transparent; height: auto; }
    ToolFold Contents { padding: 0 0 0 2; height: auto; }
    """

    def __init__(self, ran: Mapping[str, Any]) -> None:
        arguments = str(ran.get("arguments", ""))
        result = str(ran.get("result", ""))
        call = elide(one_line(f"{ran.get('name', '')} {arguments[:_CALL_CHARS]}"), 60)
        inside = GrowingText(printable(f"{arguments}\n→ {result}"), plain=True)
        # Collapsible expects a string, but accepts Content, which is not parsed. There is no escape
        # that Textual always undoes.
        head = frame_title(f"tool: {call} · did not run")
        if ran.get("allowed"):
            head = frame_title(f"tool: {call} · {len(result):,} characters")
        super().__init__(inside, title=head, **FOLDED)  # type: ignore[arg-type]
