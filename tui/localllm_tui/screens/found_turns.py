"""What was searched for in the conversation on screen, and the turns that have it."""

from __future__ import annotations

from localllm.conversation.history import History
from localllm_tui.control import command_actions
from localllm_tui.control.chat import ChatController
from localllm_tui.control.formatting import elide
from localllm_tui.control.terminal import one_line
from localllm_tui.screens.turn_window import TurnWindow
from localllm_tui.widgets.transcript import Transcript

HITS = 2_000


class FoundTurns:
    """Marks the words in the transcript, and goes from hit to hit."""

    def __init__(self, chat: ChatController, transcript: Transcript, window: TurnWindow) -> None:
        self._chat, self._transcript, self._window = chat, transcript, window
        self._words = ""
        self._ids: list[int] = []  # the turns that have them, oldest first

    def clear(self) -> None:
        self._mark("", [])

    def _mark(self, words: str, ids: list[int]) -> None:
        self._words, self._ids = words, ids
        self._transcript.search(words)

    def search(self, history: History, conversation_id: str, words: str) -> None:
        """Mark the words, and go to the first hit of the selected turn."""
        hits = history.search(words, limit=HITS)
        self._mark(words, sorted(h.message_id for h in hits if h.conversation_id == conversation_id))
        self._enter(1)

    def _enter(self, step: int) -> None:
        self._transcript.call_after_refresh(self._transcript.show_found, step, entering=True)

    def words_at(self, turn_id: int) -> str:
        """Which of the hits this turn is, in words; "" for none."""
        if turn_id not in self._ids:
            return ""
        at = f"{self._ids.index(turn_id) + 1} of {len(self._ids)}"
        return f"found “{elide(one_line(self._words), 30)}”: turn {at}"

    async def show_next(self, turn_id: int, step: int) -> bool:
        """Go to the next hit (-1: the one before): in this turn, else in the next that has one, on whichever branch. False where
        nothing was searched for."""
        if not self._ids or self._transcript.show_found(step):
            return bool(self._ids)
        at = (self._ids.index(turn_id) + step) % len(self._ids) if turn_id in self._ids else 0
        words, ids = self._words, self._ids
        view = self._window.view(ids[at])
        if view is not None:
            self._transcript.select(view)
        elif self._chat.session.id is not None:
            await command_actions.resume(self._chat, self._chat.session.id, ids[at])
        self._mark(words, ids)  # to open a conversation ends a search
        self._enter(step)
        return True
