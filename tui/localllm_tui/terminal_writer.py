"""Write short frames to the terminal at once.

Textual 8.2.8 gives every frame to a thread. On a busy machine, waking that thread takes longer than
drawing a key. `install` replaces the thread in the driver's module.
"""

from __future__ import annotations

import select
import sys
from contextlib import suppress

from textual.driver import Driver
from textual.drivers._writer_thread import WriterThread

# The frame of a key is shorter. A terminal that is ready takes so much without a wait.
_SHORT_CHARS = 2_000


def install(driver: type[Driver]) -> None:
    """Let a driver of Textual write with TerminalWriter. Windows has no `select` for terminals."""
    names = vars(sys.modules[driver.__module__])
    if "WriterThread" in names and sys.platform != "win32":
        names["WriterThread"] = TerminalWriter


class TerminalWriter(WriterThread):
    """Writes a short text at once if the terminal is ready, and all others in a thread."""

    def write(self, text: str) -> None:
        queue = self._queue
        if queue.unfinished_tasks or len(text) > _SHORT_CHARS or not self._is_ready():
            queue.put(text)
            return
        with suppress(OSError):  # the terminal is gone, which the chat notices by itself
            self._file.write(text)
            self._file.flush()

    def _is_ready(self) -> bool:
        _, ready, _ = select.select([], [self._file], [], 0)
        return bool(ready)

    def run(self) -> None:
        queue = self._queue
        while True:
            text = queue.get()
            if text is None:
                return
            self._file.write(text)
            if queue.qsize() == 0:
                self._file.flush()
            queue.task_done()
