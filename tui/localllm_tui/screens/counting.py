"""Keeps what the conversation costs up to date: counted again a moment after anything changed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from textual.screen import Screen
from textual.timer import Timer

from localllm_tui.control.meter import Cost
from localllm_tui.screens.working import start

# Long enough that typing does not ask with every key, short enough to be there when one looks.
PAUSE_S = 0.25
_GROUP = "count"


class Counting:
    """`cost` is what `count` last found; `show` is called when it changes."""

    def __init__(self, screen: Screen[Any], count: Callable[[], Awaitable[Cost]], show: Callable[[], None]) -> None:
        self._screen = screen
        self._count = count
        self._show = show
        self._timer: Timer | None = None
        self.cost = Cost()

    def afresh(self) -> None:
        """Forget what was counted, for another conversation is on screen, and count."""
        self._screen.workers.cancel_group(self._screen, _GROUP)
        self.cost = Cost()
        self.soon()

    def soon(self) -> None:
        """Count when nothing has changed for a moment."""
        if self._timer is not None:
            self._timer.stop()
        self._timer = self._screen.set_timer(PAUSE_S, self._start)

    def _start(self) -> None:
        start(self._screen, self._run, _GROUP)

    async def _run(self) -> None:
        self.cost = await self._count()
        self._show()
