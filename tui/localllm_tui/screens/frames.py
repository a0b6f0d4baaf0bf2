"""The lines around the conversation: above it the head, the input's frame and what the keys do now,
the status and the panel."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from textual.css.query import NoMatches
from textual.screen import Screen

from localllm_tui.control import commands, sampling
from localllm_tui.control.chat import ChatController
from localllm_tui.control.formatting import elide, fitted
from localllm_tui.control.keys import KeyContext, hints
from localllm_tui.control.meter import cost_words
from localllm_tui.control.physics import memory_size, panel_lines
from localllm_tui.control.terminal import one_line
from localllm_tui.screens.background_work import start
from localllm_tui.screens.turn_window import TURNS_SHOWN, TurnWindow
from localllm_tui.widgets.composer import Composer
from localllm_tui.widgets.figures import GlassPanel, HeadLine, StatusLine
from localllm_tui.widgets.line_filters import frame_title
from localllm_tui.widgets.transcript import Transcript

# Delay before counting, so that not every key sends a request.
COUNT_AFTER_S = 0.25


class ChatFrames:
    """Draws them on `screen` from what the chat and the transcript say now."""

    def __init__(self, screen: Screen[Any], chat: ChatController, window: TurnWindow) -> None:
        self._screen = screen
        self._chat = chat
        self._window = window
        # tokens of the conversation, and of it with what is typed; None: not counted
        self._counted: int | None = None
        self._with_input: int | None = None
        self._more_below = False
        self.removing = 0  # the turn that the next D removes

    @property
    def _transcript(self) -> Transcript:
        return self._screen.query_one(Transcript)

    def count(self, *, anew: bool = False) -> None:
        """Count the tokens of the conversation and of the input after a moment without changes;
        `anew`: the last count is no longer valid."""
        if anew:
            self._counted = self._with_input = None
        start(self._screen, self._count, "count")

    async def _count(self) -> None:
        await asyncio.sleep(COUNT_AFTER_S)
        chat = self._chat
        text = self._screen.query_one(Composer).written.strip()
        if chat.answering or (chat.editing is not None and chat.editing.role == "assistant"):
            return
        typed = ""
        if commands.parse(text) is None:
            typed = commands.question(text)
        approval = None
        if typed or chat.attached:
            approval = chat.messages_for(typed)
        session = chat.session
        if session.counted:
            self._counted = session.used_tokens
        else:
            self._counted = await chat.client.count(chat.model, session.context())
        self._with_input = None
        if approval is not None:
            self._with_input = await chat.client.count(chat.model, approval)
        self.show_all()

    def show_all(self) -> None:
        with suppress(NoMatches):  # a resize may happen before the first compose
            self.show_numbers()
            self.show_state()

    @property
    def more_below(self) -> bool:
        """True if there are turns below the visible part."""
        return self._window.last is not None or self._transcript.more_below

    def show_if_scrolled(self) -> None:
        if self._more_below != self.more_below:
            self.show_state()

    @property
    def _context(self) -> KeyContext:
        if self._transcript.selected is not None:
            return "selecting"
        if self._chat.answering:
            return "answering"
        if self._chat.editing:
            return "editing"
        return "writing"

    def show_state(self) -> None:
        """Update the input's frame: the state, and what the keys do now."""
        chat = self._chat
        box = self._screen.query_one(Composer)
        context = self._context
        if box.files.display and context in ("writing", "editing"):
            context = "filing"
        names = [name for name, _ in chat.attached]
        costs = cost_words(self._with_input, chat.listed.n_ctx)
        head = title(context, names, costs)
        self._more_below = self.more_below
        if self._more_below:
            head += " · ↓ more below"
        box.border_title = frame_title(head)
        self.show_head()
        width = self._screen.app.size.width - 8
        box.border_subtitle = frame_title(footer(context, box.text, width, bool(chat.queued)))
        self._show_selected(box)

    def _show_selected(self, box: Composer) -> None:
        """Show the hit in the selected turn, and keep the warning about the next D while its turn
        is selected."""
        selected = self._transcript.selected
        turns = [turn.id for turn in self._chat.session.turns]
        if selected is None:
            return
        found = self._window.words_at(selected.turn_id)
        if found:
            box.border_title = frame_title(found)
            box.border_subtitle = fitted(hints("found"), self._screen.app.size.width - 8)
        if selected.turn_id == self.removing and self.removing in turns:
            follows = len(turns) - 1 - turns.index(self.removing)
            box.border_title = "D again removes this turn permanently"
            if follows:
                box.border_title = (
                    f"D again removes this turn and the {follows} after it permanently"
                )

    def show_head(self) -> None:
        chat = self._chat
        width = self._screen.app.size.width
        waits = [chat.loading_words]
        if chat.pulls is not None:
            waits.append(chat.pulls.words())
        busy = any(waits)
        parts = [*waits, self._branch()]
        engine = chat.client.engine
        if engine is not None and engine.where:
            parts.append(f"attached to {engine.where}")
        parts.append(sampling.words(chat.listed.sampling, chat.client.sampling))
        if chat.tools.on:
            parts.append("tools on")
        if chat.listed.has_system and not chat.session.system:
            parts.append("the preset's system prompt")
        parts.append(self._reads())
        head = self._screen.query_one(HeadLine)
        head.show(parts, chat.session.system, busy=busy, width=width, title=chat.session.title)

    def _reads(self) -> str:
        """The bytes that a token of the newest answer read; "" before the first answer, or if the
        panel shows them."""
        physics = self._chat.listed.physics
        speed = self._chat.speed
        panel = self._screen.query_one(GlassPanel).has_class("wanted")
        if panel or physics is None or speed is None or not speed.usage.completion:
            return ""
        return f"each token reads {memory_size(physics.token_bytes(speed.depth))}"

    def _branch(self) -> str:
        """The version that is shown of the newest turn with several versions; "" if no turn has
        several."""
        session = self._chat.session
        for turn in reversed(session.turns[-TURNS_SHOWN:]):
            at, of = session.place(turn)
            if of > 1:
                return f"version {at} of {of}"
        return ""

    def show_numbers(self) -> None:
        chat = self._chat
        session = self._chat.session
        used = session.used_tokens
        answered = session.last_answer is not None
        meta: Mapping[str, Any] = {}
        if chat.streaming is not None:
            meter = chat.streaming.meter
            meta = meter.meta()
            answered = meter.tokens > 0
            if meter.used:
                used = meter.used
            elif used:
                used += meter.tokens  # an estimate until the server has counted
        else:
            if session.last_answer is not None:
                meta = session.last_answer.meta
            if self._counted is not None and not session.counted:
                used = self._counted
        in_use: int | None = used
        if answered and not used:
            in_use = None  # the server does not count
        self._screen.query_one(StatusLine).show(
            model=chat.model, used=in_use, n_ctx=chat.listed.n_ctx, meta=meta
        )
        self.show_head()
        panel = self._screen.query_one(GlassPanel)
        if panel.has_class("wanted"):
            panel.show(panel_lines(chat.listed.physics, chat.speed, loading=chat.loading_words))


def footer(context: KeyContext, typed: str, width: int, queued: bool) -> str:
    """Return the line under the input: the key hints, or the menu's hints if `typed` opens the
    menu.

    `queued`: a question waits for the answer to end.
    """
    if context in ("writing", "editing") and commands.offered(typed):
        context = "commands"
    text = hints(context)
    if context == "answering" and queued:
        text += " · sent when this answer ends"
    elif context == "writing":
        text += " · F1 help"
    return fitted(text, width)


def title(context: KeyContext, attached: Sequence[str], costs: str) -> str:
    """The line above the input: the kind of text, the attached files, and the tokens of the
    request."""
    if context == "answering":
        return "answering"
    if context == "selecting":
        return "a turn is selected"
    text = "message"
    if context == "editing":
        text = "editing a question"
    if attached:
        text += " " + elide(one_line(f"+ {', '.join(attached)}"), 50)
    if costs:
        text += f" · {costs}"
    return text
