"""What the keys of the selected turn do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textual.screen import Screen

from localllm.conversation.history import StoredMessage
from localllm.errors import LocalLLMError
from localllm_tui.control import command_actions
from localllm_tui.control.chat import ChatController
from localllm_tui.messages import TurnAsked
from localllm_tui.screens.frames import ChatFrames
from localllm_tui.screens.turn_window import FoundTurns
from localllm_tui.widgets.answer import AnswerView
from localllm_tui.widgets.transcript import Transcript, TurnView


class SelectedTurn:
    """Does what is asked of the turn that is selected in the transcript, and moves the selection
    after it."""

    def __init__(
        self,
        screen: Screen[Any],
        chat: ChatController,
        transcript: Transcript,
        found: FoundTurns,
        frames: ChatFrames,
    ) -> None:
        self._notify: Callable[..., None] = screen.notify
        self._chat, self._transcript, self._found, self._frames = chat, transcript, found, frames

    async def act(self, event: TurnAsked) -> None:
        turns = {t.id: t for t in self._chat.session.turns}
        turn, selected = turns.get(event.turn_id), self._transcript.selected
        if turn is None or selected is None:
            return
        if event.what == "thinking":
            if isinstance(selected, AnswerView):
                selected.toggle_thinking()
        elif event.what == "found":
            if not await self._found.show_next(turn.id, event.argument):
                self._notify("Ctrl+F finds words in this conversation", timeout=3, markup=False)
        elif event.what == "remove" and self._frames.removing != turn.id:
            self._frames.removing = turn.id
        else:
            await self._run(event, turn)
        self._frames.show_state()

    async def _run(self, event: TurnAsked, turn: StoredMessage) -> None:
        self._frames.removing = 0
        try:
            await command_actions.run_on_turn(self._chat, event.what, turn, event.argument)
        except LocalLLMError as e:
            self._notify(
                f"{e.message}. {e.hint or ''}".rstrip(". "),
                severity="warning",
                timeout=4,
                markup=False,
            )
        if event.what not in ("copy", "code"):
            self._reselect(event.what, turn)

    def _reselect(self, what: str, turn: StoredMessage) -> None:
        """Select the version that took the turn's place, else go back to the input."""
        view: TurnView | None = None
        if what == "version":
            versions = {v.id for v in self._chat.session.tree.versions(turn)}
            view = next(
                (v for v in self._transcript.views if v.turn_id in versions),
                None,
            )
        self._transcript.select(view)
        if what == "remove":
            self._transcript.action_select(-1)
