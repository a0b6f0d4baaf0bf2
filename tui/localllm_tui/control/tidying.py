"""Keeps Python's search for circular garbage out of the frames: it looks at every object there is, 0.3 s in a long chat."""

from __future__ import annotations

import gc

# Of quiet: nobody types, nothing streams.
TIDY_AFTER_S = 3.0
_NEVER = 1_000_000


class Tidying:
    """From `begin` to `end` all objects are looked at only when `quiet` says that nobody waits; young ones as ever."""

    def __init__(self) -> None:
        self._before: tuple[int, int, int] | None = None
        self._due = False

    def begin(self) -> None:
        """Put the search off."""
        self._before = gc.get_threshold()
        gc.set_threshold(*self._before[:2], _NEVER)

    def end(self) -> None:
        """Have it as it was."""
        if self._before is not None:
            gc.set_threshold(*self._before)
            self._before = None

    def busy(self) -> None:
        """Something happens: there will be something to tidy up."""
        self._due = True

    def quiet(self, for_s: float) -> None:
        """Nothing has happened for so long: search now, once."""
        if self._due and for_s >= TIDY_AFTER_S:
            self._due = False
            gc.collect()
