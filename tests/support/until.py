"""Wait for conditions that trigger no event, by polling in one place with one time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable


def until(
    true: Callable[[], object], what: str = "it never came true", *, timeout_s: float = 60.0
) -> None:
    """Return as soon as `true()` is true. Raise an AssertionError with `what` after `timeout_s`
    seconds."""
    pause, waited_s = threading.Event(), 0.0
    while not true():
        assert waited_s < timeout_s, what
        pause.wait(0.01)
        waited_s += 0.01
