"""What the model writes in a quiet moment: the conversation's title, and a summary for `/compact`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from localllm_tui.control import prepared_summary, titles
from localllm_tui.control.client import ChatClient
from localllm_tui.control.prepared_summary import PreparedSummary
from localllm_tui.control.session import Session

Writing = Callable[[], Coroutine[Any, Any, None]]


class IdleWriting:
    """Writes one text at a time. A slow model may need longer than the time between two quiet
    moments, and the second one must not replace the unfinished text.

    `summary`: the last summary that was prepared.
    """

    def __init__(self) -> None:
        self._running = False
        self.summary = PreparedSummary()

    def title_of(self, client: ChatClient, model: str, session: Session) -> Writing | None:
        """Return what writes the title; None if it is not wanted or a text is being written."""
        if self._running or not titles.wanted(session):
            return None
        return partial(self._run, partial(titles.generate, client, model, session))

    def summary_of(
        self, client: ChatClient, model: str, session: Session, n_ctx: int | None
    ) -> Writing | None:
        """Return what prepares a summary; None if it is not wanted or a text is being written."""
        if self._running or not prepared_summary.wanted(client, session, self.summary):
            return None

        async def write() -> None:
            self.summary = await prepared_summary.prepare(client, model, session, n_ctx)

        return partial(self._run, write)

    async def _run(self, write: Writing) -> None:
        self._running = True
        try:
            await write()
        finally:
            self._running = False
