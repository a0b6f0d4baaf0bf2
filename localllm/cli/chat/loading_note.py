"""Progress on stderr for what takes over a second: a line that rewrites itself on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE_S = 1.0


@contextmanager
def loading_note(name: str) -> Iterator[Callable[[float], None]]:
    """Yields a function to call with 0.0 … 1.0; says nothing when all is over within a second."""
    started = time.monotonic()
    tty = sys.stderr.isatty()
    said = False

    def note(progress: float) -> None:
        nonlocal said
        if time.monotonic() - started < _PATIENCE_S:
            return
        if tty:
            print(f"\rloading {name} … {progress:4.0%}", end="", file=sys.stderr, flush=True)
        elif not said:
            print(f"loading {name} …", file=sys.stderr, flush=True)
        said = True

    try:
        yield note
    finally:
        if said and tty:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
