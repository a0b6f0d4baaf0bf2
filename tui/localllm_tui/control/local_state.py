"""Drafts of unsent messages, kept in files next to the history, one for each window."""

from __future__ import annotations

import os
import sqlite3
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from pathlib import Path

from localllm import paths

# Further windows share the last place.
_WINDOWS = 64


class Drafts:
    """Drafts under `folder`, by conversation id (None: a new conversation).

    Windows open at the same time have their own drafts: each window locks the first free file until
    `close` or the end of its process. Drafts of a closed window go to the next one. A disk that
    refuses is ignored: losing a draft must never stop the chat. Nor may saving slow a key:
    replacing a file may take a tenth of a second while an engine writes its cache, so a thread
    writes, and only the newest text.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer = ThreadPoolExecutor(1, "drafts")
        self._writes: dict[Path, Future[None]] = {}
        self._place = 1
        self._held: sqlite3.Connection | None = None
        for place in range(1, _WINDOWS + 1):
            lock = self._take(place)
            if lock is not None:
                self._place = place
                self._held = lock
                break

    def load(self, conv_id: str | None) -> str:
        file = self._file(conv_id, self._place)
        wait(self._writes.values())
        try:
            if not file.exists():
                self._inherit(conv_id, file)
            return paths.file_text(file)
        except (OSError, UnicodeDecodeError):
            return ""

    def save(self, conv_id: str | None, text: str) -> None:
        """Save `text`; blank text removes the draft. Returns at once; not to be called after
        `close`."""
        file = self._file(conv_id, self._place)
        if file in self._writes:
            self._writes[file].cancel()  # if it has not begun
        self._writes[file] = self._writer.submit(self._write, file, text)

    def _write(self, file: Path, text: str) -> None:
        with suppress(OSError):
            if text.strip():
                paths.private_dir(self.folder)
                paths.write_private(file, text)
            else:
                file.unlink(missing_ok=True)

    def close(self) -> None:
        """Write what is left, and free this window's place."""
        self._writer.shutdown()
        if self._held is not None:
            self._held.close()
            self._held = None

    def _file(self, conv_id: str | None, place: int) -> Path:
        name = conv_id or "new"
        if place == 1:
            return self.folder / f"{name}.txt"
        return self.folder / f"{name}.{place}.txt"

    def _inherit(self, conv_id: str | None, file: Path) -> None:
        """Take over a draft of this conversation from a window that is closed."""
        for place in range(1, _WINDOWS + 1):
            left = self._file(conv_id, place)
            if place == self._place or not left.exists():
                continue
            lock = self._take(place)
            if lock is not None:
                with suppress(OSError):
                    os.replace(left, file)
                lock.close()
                return

    def _take(self, place: int) -> sqlite3.Connection | None:
        """The lock of a place, held until it is closed: a database, because SQLite can lock it on
        every system. None if another window has the place, or if the disk fails."""
        with ExitStack() as opened, suppress(OSError, sqlite3.Error):
            locks = paths.private_dir(self.folder.with_name(self.folder.name + ".open"))
            lock = sqlite3.connect(locks / str(place), timeout=0, isolation_level=None)
            opened.callback(lock.close)
            lock.execute("BEGIN EXCLUSIVE")
            opened.pop_all()
            return lock
        return None
