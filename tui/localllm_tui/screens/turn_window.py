"""Which turns of a conversation are on screen: each is a widget tree, and a hundred take seconds to lay out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from textual.widget import Widget

from localllm.conversation.history import ConversationSummary, StoredMessage
from localllm.errors import LocalLLMError
from localllm_tui.control import wording
from localllm_tui.control.chat import ChatController
from localllm_tui.control.interfaces import is_here
from localllm_tui.widgets.transcript import Transcript, TurnView
from localllm_tui.widgets.turns import UNANSWERED, ChatNote, EarlierTurns, FirstRunPage, LaterTurns, view_of

EARLIER_SHOWN = 3
# A long conversation opens with its newest turns.
TURNS_SHOWN = 24
TURNS_ABOVE = 5  # above a turn that was searched for


class TurnWindow:
    """The chat's turns from `first` to the last but one (`last` None: to the end), as views in the transcript."""

    def __init__(self, chat: ChatController, transcript: Transcript) -> None:
        self._chat, self._transcript = chat, transcript
        self._first = 0
        self.last: int | None = None
        self.recent: Sequence[ConversationSummary] = ()  # the conversations that an empty one offers

    @property
    def _turns(self) -> list[StoredMessage]:
        return self._chat.session.turns

    def choose(self, at: int = 0) -> None:
        """Choose the turns to be on screen: those around this one, or the last ones."""
        place = next((i for i, t in enumerate(self._turns) if t.id == at), len(self._turns))
        self._first = max(0, min(place - TURNS_ABOVE, len(self._turns) - TURNS_SHOWN))
        self._end_at(self._first + TURNS_SHOWN)

    def _end_at(self, last: int) -> None:
        self.last = last if last < len(self._turns) else None

    def view(self, turn_id: int) -> TurnView | None:
        return next((v for v in self._transcript.views if v.turn_id == turn_id), None)

    async def draw(self) -> None:
        """Show the session's current branch; turns that are on screen already stay."""
        if self._first >= len(self._turns) or (self.last is not None and self.last >= len(self._turns)):
            self.choose()
        wanted = self._turns[self._first : self.last]
        keep = self._unchanged(wanted)
        await self._remove_all_but(keep)
        await self._transcript.mount_all([*self._views(wanted[len(keep) :]), *self._after_turns()])
        await self._mount_earlier()

    def _unchanged(self, wanted: Sequence[StoredMessage]) -> list[TurnView]:
        """The views that show the first of these turns already."""
        keep: list[TurnView] = []
        for view, turn in zip(self._transcript.views, wanted, strict=False):
            if view.turn_id != turn.id:
                break
            view.show_place(turn.id, self._chat.session.place(turn))
            keep.append(view)
        return keep

    async def _remove_all_but(self, keep: Sequence[Widget]) -> None:
        await self._transcript.remove_children([w for w in self._transcript.children if w not in keep])

    def _views(self, turns: Sequence[StoredMessage]) -> list[Widget]:
        sent = {t.id for t in self._chat.session.sent_turns}
        return [view_of(self._chat.session, t, sent) for t in turns]

    def _after_turns(self) -> list[Widget]:
        """What stands below the turns."""
        if not self._turns:
            return self._welcome()
        if self.last is not None:
            return [LaterTurns(len(self._turns) - self.last)]
        return [ChatNote(UNANSWERED)] if self._chat.session.unanswered else []

    def _welcome(self) -> list[Widget]:
        chat, engine = self._chat, self._chat.client.engine
        elsewhere = engine.where if engine is not None and not is_here(engine) else ""
        self.recent = ()
        with suppress(LocalLLMError):
            self.recent = chat.history.list(limit=EARLIER_SHOWN)
        note = ChatNote(wording.welcome(chat.model, chat.options.greeting, self.recent, elsewhere), markdown=True)
        return [note] if chat.first_run is None else [note, FirstRunPage(chat.first_run.lines())]

    async def ensure_shown(self, turn_id: int) -> None:
        """Make sure this turn is among those on screen (0: the last one)."""
        missing = self.view(turn_id) is None if turn_id else self.last is not None
        if missing:
            self.choose(turn_id)
            await self.draw()

    async def remove_after(self, turn_id: int) -> None:
        """Take what follows this turn off the screen, to its end."""
        await self.ensure_shown(turn_id)
        views = self._transcript.views
        after = next((i + 1 for i, v in enumerate(views) if v.turn_id == turn_id), len(views))
        await self._remove_all_but([*self._transcript.query(EarlierTurns), *views[:after]])
        self.last = None

    async def show_later(self) -> None:
        """Turns below the last one shown come in."""
        if self.last is not None:
            self._end_at(self.last + TURNS_SHOWN)
            self._transcript.release()
            self._transcript.following = False
            await self.draw()
        self._transcript.call_after_refresh(self._transcript.more_came)

    async def show_earlier(self) -> None:
        """Turns above the first one shown come in, and what was on screen stays where it is."""
        transcript = self._transcript
        if not self._first:
            transcript.more_came()
            return
        end, self._first = self._first, max(0, self._first - TURNS_SHOWN)
        transcript.release()
        transcript.following = False
        top = next(iter(transcript.views), None)
        await transcript.query(EarlierTurns).remove()
        await transcript.mount_all(self._views(self._turns[self._first : end]), before=0)
        await self._mount_earlier()
        if top is not None:
            transcript.call_after_refresh(transcript.scroll_to_widget, top, animate=False, top=True)
        transcript.call_after_refresh(transcript.more_came)

    async def _mount_earlier(self) -> None:
        if self._first:
            await self._transcript.mount(EarlierTurns(self._first), before=0)
