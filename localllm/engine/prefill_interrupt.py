"""A step that reads one request's prompt and nothing else: its client may leave in the middle of it, and it ends there.

Cancels are taken up between steps, and on a large model such a step takes many seconds. So the thread that hears of one
says so here at once. A step that others share goes on: they would have to wait for it again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from localllm.engine.scheduler import Grant
from localllm_backends.contract import Backend, InterruptedStepError


class PrefillInterrupt:
    """Knows whose prompt is alone in the step that runs, and who is about to leave. Methods may be called by any thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend if backend.capabilities.interruptible else None
        self._lock = threading.Lock()
        self._reading: str | None = None
        self._leaving: set[str] = set()

    @property
    def can_end(self) -> bool:
        """True where the backend can end a step before it is done."""
        return self._backend is not None

    @contextmanager
    def running(self, grants: Sequence[Grant]) -> Iterator[None]:
        """Around a step of `grants`; InterruptedStepError before it where its only request is about to leave."""
        alone = grants[0].key if len(grants) == 1 and grants[0].prefill else None
        with self._lock:
            if alone in self._leaving:
                raise InterruptedStepError("its client has left")
            self._reading = alone
        try:
            yield
        finally:
            with self._lock:
                self._reading = None

    def leave(self, request_id: str) -> None:
        """This request will be cancelled between two steps."""
        if self._backend is None:
            return
        with self._lock:
            self._leaving.add(request_id)
            if self._reading == request_id:
                self._backend.interrupt()

    def left(self, request_id: str) -> None:
        """It was."""
        with self._lock:
            self._leaving.discard(request_id)
