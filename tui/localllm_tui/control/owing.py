"""Answers that the disk refused when they were complete: they are on screen, and are written once it takes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from localllm.conversation.history import StoredMessage
from localllm.errors import LocalLLMError
from localllm_tui.control.answering import Answering

TRY_EVERY_S = 1.0
# A locked file makes each try wait: the keys are to have most of the time all the same.
WAIT_SHARE = 5.0


class Owing:
    """Tried again by a timer, and before anything else is asked."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._owed: list[tuple[Answering, Callable[[StoredMessage], None]]] = []
        self._next_s = 0.0

    def add(self, answering: Answering, then: Callable[[StoredMessage], None]) -> None:
        """Remember an answer if it is owed; `then` is told of its turn once it is written."""
        if answering.owed:
            self._owed.append((answering, then))
            self._next_s = self._now() + TRY_EVERY_S

    def pay(self) -> None:
        """Write all of it. Raises LocalLLMError where the disk still refuses."""
        while self._owed:
            answering, then = self._owed[0]
            turn = answering.write_owed()
            del self._owed[0]
            if turn is not None:
                then(turn)

    def pay_if_due(self) -> None:
        """The same for a timer, which is not to stop for it."""
        began_s = self._now()
        if self._owed and began_s >= self._next_s:
            with suppress(LocalLLMError):
                self.pay()
            ended_s = self._now()
            self._next_s = ended_s + max(TRY_EVERY_S, WAIT_SHARE * (ended_s - began_s))
