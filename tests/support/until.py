"""Waiting for something that announces itself by no event: asked again and again, in one place and
with one limit."""

from __future__ import annotations

import threading
from collections.abc import Callable


def until(
    true: Callable[[], object], what: str = "it never came true", *, timeout_s: float = 60.0
) -> None:
    """Return once `true()` is; an AssertionError that says `what` after `timeout_s` seconds."""
    pause, waited_s = threading.Event(), 0.0
    while not true():
        assert waited_s < timeout_s, what
        pause.wait(0.01)
        waited_s += 0.01
