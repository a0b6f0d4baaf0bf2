"""What the chat's screen lets one choose on top of it: a conversation, a file, whether something
may be done.

Dialogs are imported when they open: the first paint does not wait for them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.screen import Screen

from localllm_tui.control import command_actions, commands
from localllm_tui.control.chat import ChatController
from localllm_tui.screens.turn_window import FoundTurns
from localllm_tui.widgets.composer import Composer

if TYPE_CHECKING:
    from localllm_tui.screens.picker import TurnPlace


class Choices:
    """Opens them on `screen`, and does what was chosen."""

    def __init__(self, screen: Screen[Any], chat: ChatController, found: FoundTurns) -> None:
        self._screen, self._chat, self._found = screen, chat, found

    async def choose_conversation(self, words: str, *, in_this_conversation: bool) -> None:
        from localllm_tui.screens.picker import ConversationPicker

        def chosen(place: TurnPlace | None) -> None:
            self._screen.call_later(self._open, place)

        conv_id = self._chat.session.id if in_this_conversation else None
        await self._screen.app.push_screen(
            ConversationPicker(self._chat.history, words, only=conv_id), chosen
        )

    async def _open(self, place: TurnPlace | None) -> None:
        await self._chat.reporting(self._open_place(place))
        self._chat.face.changed()

    async def _open_place(self, place: TurnPlace | None) -> None:
        session, history = self._chat.session, self._chat.history
        if place is not None:
            await command_actions.resume(self._chat, place.conversation_id, place.turn_id)
            if place.words:
                self._found.search(history, place.conversation_id, place.words)
        elif session.id is not None and not history.holds(session.id):
            await command_actions.new(self._chat, "")  # it was removed in the list

    async def choose_file(self) -> None:
        from localllm_tui.screens.picking import FilePicker

        def chosen(path: Path | None) -> None:
            if path is not None:
                self._screen.call_later(self._attach, path)

        await self._screen.app.push_screen(FilePicker(self._chat, Path.cwd()), chosen)

    async def _attach(self, path: Path) -> None:
        self._screen.query_one(Composer).insert(f"{path.name} ")  # after the @
        await commands.run_and_report(self._chat, "attach", str(path))

    async def approve(self, about: str, *said: str) -> bool:
        """Ask the user. To cancel this (the answer is stopped) closes the dialog."""
        from localllm_tui.screens.dialogs import Approval

        dialog, answer = Approval(about, *said), asyncio.get_running_loop().create_future()

        def answered(yes: bool | None) -> None:
            if not answer.done():
                answer.set_result(yes)

        await self._screen.app.push_screen(dialog, answered)
        try:
            return await answer is True
        finally:
            if dialog.is_attached and self._screen.app.screen is dialog:
                dialog.dismiss(False)
