"""Finds files that other servers have written into a folder of cached prefixes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path

from localllm.engine.cache import tunables
from localllm.engine.cache.folder import mark_in_use


class FolderScan:
    """Lists `directory` from time to time. Used by one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._listed: set[Path] = set()
        self._listed_ns = 0
        self._listed_s = 0.0

    @property
    def due(self) -> bool:
        """True if the last scan was long ago."""
        return time.monotonic() - self._listed_s > tunables.FOLDER_SCAN_S

    def new_files(self, known: Collection[Path]) -> set[Path]:
        """The files that are not `known` and were not there at the last scan. A folder in which no
        file was added or removed is not listed. Also marks the folder as in use."""
        self._listed_s = time.monotonic()
        mark_in_use(self._directory)
        found: set[Path] = set()
        with contextlib.suppress(OSError):
            stamp_ns = self._directory.stat().st_mtime_ns
            if stamp_ns == self._listed_ns:
                return found
            with os.scandir(self._directory) as listing:
                names = [e.name for e in listing if e.name.endswith(".kv") and e.is_file()]
            paths = {self._directory / name for name in names}
            found = paths - self._listed - set(known)
            self._listed = paths
            self._listed_ns = stamp_ns
        return found
