"""The turns of a conversation that are on screen (laying out a hundred would take seconds), and the
search in them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from textual.widget import Widget

from localllm.conversation.history import ConversationSummary, StoredMessage
from localllm.errors import LocalLLMError
from localllm_tui.control import command_actions, wording
from localllm_tui.control.chat import ChatController
from localllm_tui.control.formatting import elide
from localllm_tui.control.interfaces import is_local
from localllm_tui.control.terminal import one_line
from localllm_tui.widgets.transcript import Transcript, TurnView
from localllm_tui.widgets.turns import UNANSWERED, ChatNote, FirstRunPage, HiddenTurns, view_of

EARLIER_SHOWN = 3
# A long conversation opens with its newest turns.
TURNS_SHOWN = 24
TURNS_ABOVE = 5  # above a turn that was searched for
HITS = 2_000


class TurnWindow:
    """The part of the chat's turns that has views in the transcript, and the words marked in them.

    The part begins at turn `first` and ends before turn `last` (None: at the end).
    """

    def __init__(self, chat: ChatController, transcript: Transcript) -> None:
        self._chat = chat
        self._transcript = transcript
        self._first = 0
        self.last: int | None = None
        self._words = ""  # that were searched for
        self._ids: list[int] = []  # the turns that have them, oldest first

    @property
    def _turns(self) -> list[StoredMessage]:
        return self._chat.session.turns

    def choose(self, at: int = 0) -> None:
        """Choose the turns to be on screen: those around this one, or the last ones."""
        place = next((i for i, t in enumerate(self._turns) if t.id == at), len(self._turns))
        self._first = max(0, min(place - TURNS_ABOVE, len(self._turns) - TURNS_SHOWN))
        self._end_at(self._first + TURNS_SHOWN)

    def _end_at(self, last: int) -> None:
        self.last = None
        if last < len(self._turns):
            self.last = last

    def view(self, turn_id: int) -> TurnView | None:
        return next((v for v in self._transcript.views if v.turn_id == turn_id), None)

    async def draw(self, until: int = 0) -> None:
        """Show the session's current branch; with `until`, only the turns up to the one of this id.
        Turns that are on screen already remain."""
        end = max(self._first, self.last or 0)
        if end >= len(self._turns):
            self.choose()
        wanted = self._turns[self._first : self.last]
        below = self._after_turns()
        ids = [turn.id for turn in wanted]
        if until in ids:
            wanted = wanted[: ids.index(until) + 1]
            below = []
            self.last = None
        keep = self._unchanged(wanted)
        gone = [child for child in self._transcript.children if child not in keep]
        await self._transcript.remove_children(gone)
        await self._transcript.mount_all([*self._views(wanted[len(keep) :]), *below])
        await self._mount_earlier()

    def _unchanged(self, wanted: Sequence[StoredMessage]) -> list[TurnView]:
        """The views that show the first of these turns already."""
        keep = []
        for view, turn in zip(self._transcript.views, wanted, strict=False):
            if view.turn_id != turn.id:
                break
            view.show_place(turn.id, self._chat.session.place(turn))
            keep.append(view)
        return keep

    def _views(self, turns: Sequence[StoredMessage]) -> list[Widget]:
        sent = {t.id for t in self._chat.session.sent_turns}
        return [view_of(self._chat.session, t, sent) for t in turns]

    def _after_turns(self) -> list[Widget]:
        """Return the widgets below the turns."""
        self._chat.recent = {}
        if not self._turns:
            return self._welcome()
        if self.last is not None:
            return [HiddenTurns(len(self._turns) - self.last, 1)]
        if self._chat.session.unanswered:
            return [ChatNote(UNANSWERED)]
        return []

    def _welcome(self) -> list[Widget]:
        chat = self._chat
        engine = chat.client.engine
        host = ""
        if engine is not None and not is_local(engine):
            host = engine.where
        recent: Sequence[ConversationSummary] = ()
        with suppress(LocalLLMError):
            recent = chat.history.list(limit=EARLIER_SHOWN)
        chat.recent = {str(n): summary.id for n, summary in enumerate(recent, 1)}
        welcome = wording.welcome(chat.model, chat.options.greeting, recent, host)
        note = ChatNote(welcome, markdown=True)
        if chat.first_run is None:
            return [note]
        return [note, FirstRunPage(chat.first_run)]

    async def ensure_shown(self, turn_id: int) -> None:
        """Make sure this turn is among those on screen (0: the last one)."""
        missing = self.last is not None
        if turn_id:
            missing = self.view(turn_id) is None
        if missing:
            self.choose(turn_id)
            await self.draw()

    async def show_later(self) -> None:
        """Show later turns below the last one."""
        if self.last is not None:
            self._end_at(self.last + TURNS_SHOWN)
            self._transcript.release()
            await self.draw()
        self._transcript.call_after_refresh(self._transcript.more_shown)

    async def show_earlier(self) -> None:
        """Show earlier turns above the first one. The visible part does not move."""
        transcript = self._transcript
        if not self._first:
            transcript.more_shown()
            return
        end = self._first
        self._first = max(0, self._first - TURNS_SHOWN)
        transcript.release()
        top = next(iter(transcript.views), None)
        await transcript.query_one(HiddenTurns).remove()
        await transcript.mount_all(self._views(self._turns[self._first : end]), before=0)
        await self._mount_earlier()
        if top is not None:
            transcript.call_after_refresh(transcript.scroll_to_widget, top, animate=False, top=True)
        transcript.call_after_refresh(transcript.more_shown)

    async def _mount_earlier(self) -> None:
        if self._first:
            await self._transcript.mount(HiddenTurns(self._first, -1), before=0)

    # -- what was searched for ---------------------------------------------------------------------

    def mark(self, words: str, ids: list[int]) -> None:
        """Mark the words in these turns, oldest first; "" removes the marks."""
        self._words = words
        self._ids = ids
        self._transcript.search(words)

    def search(self, conversation_id: str, words: str) -> None:
        """Mark the words, and go to the first hit of the selected turn."""
        hits = self._chat.history.search(words, limit=HITS)
        self.mark(words, sorted(h.message_id for h in hits if h.conversation_id == conversation_id))
        self._enter(1)

    def _enter(self, step: int) -> None:
        self._transcript.call_after_refresh(self._transcript.show_found, step, entering=True)

    def words_at(self, turn_id: int) -> str:
        """The number of this turn among the hits, in words; "" if it has no hit."""
        if turn_id not in self._ids:
            return ""
        at = f"{self._ids.index(turn_id) + 1} of {len(self._ids)}"
        return f"found “{elide(one_line(self._words), 30)}”: turn {at}"

    async def show_next(self, turn_id: int, step: int) -> bool:
        """Go to the next hit (-1: the previous one): in this turn, else in the next turn with a
        hit, on any branch. False if there is no search."""
        if not self._ids or self._transcript.show_found(step):
            return bool(self._ids)
        at = 0
        if turn_id in self._ids:
            at = (self._ids.index(turn_id) + step) % len(self._ids)
        words = self._words
        ids = self._ids
        view = self.view(ids[at])
        if view is not None:
            self._transcript.select(view)
        elif self._chat.session.id is not None:
            await command_actions.resume(self._chat, self._chat.session.id, ids[at])
        self.mark(words, ids)  # opening a conversation ends a search
        self._enter(step)
        return True
