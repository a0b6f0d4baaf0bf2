"""Work beside the screen that an exit in between leaves no trace of; and the token count that
follows what is typed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

from textual.dom import DOMNode
from textual.screen import Screen
from textual.timer import Timer
from textual.worker import Worker

from localllm_tui.control.meter import TokenCosts


def start(
    node: DOMNode,
    what: Callable[[], Coroutine[Any, Any, None]],
    group: str,
    *,
    exclusive: bool = True,
    exit_on_error: bool = False,
) -> Worker[None]:
    """Run `what` for as long as `node` lives; `exclusive`: in place of the rest of its group. What
    it raises ends it alone, unless `exit_on_error`.

    Takes the function and not its coroutine: one that an exit keeps from being started would be
    warned of.
    """
    work = cast("Callable[[], Coroutine[None, None, None]]", what)
    return node.run_worker(work, group=group, exclusive=exclusive, exit_on_error=exit_on_error)


# Long enough that not every key sends a request.
PAUSE_S = 0.25
_GROUP = "count"


class TokenCounter:
    """`cost` is the last result of `count`; `show` is called when it changes."""

    def __init__(
        self,
        screen: Screen[Any],
        count: Callable[[], Awaitable[TokenCosts]],
        show: Callable[[], None],
    ) -> None:
        self._screen = screen
        self._count = count
        self._show = show
        self._timer: Timer | None = None
        self.cost = TokenCosts()

    def afresh(self) -> None:
        """Forget the count and count again, for another conversation."""
        self._screen.workers.cancel_group(self._screen, _GROUP)
        self.cost = TokenCosts()
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
