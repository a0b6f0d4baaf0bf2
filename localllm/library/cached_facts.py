"""Facts about files that were found once and are kept while the files stay as they were."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from localllm import json_store, paths

# Older entries are dropped: a disk holds few models.
_MAX_KEPT = 512


class CachedFacts:
    """One fact of each file, in the JSON file `name` of the cache folder.

    The key of a fact is the file's real path, size and time.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()

    @property
    def path(self) -> Path:
        return paths.cache_dir() / self._name

    def facts(self) -> dict[str, Any]:
        """Every fact by its key (see `key_of`)."""
        return json_store.read(self.path)

    def add(self, facts: dict[str, Any]) -> None:
        """Keep these facts. Disk errors are ignored, because facts can be found again."""
        with self._lock:
            all_facts = {**self.facts(), **facts}
            json_store.keep(self.path, dict(list(all_facts.items())[-_MAX_KEPT:]))


def key_of(file: Path) -> str:
    """The key of a file's facts. It changes if the file is modified. Raises OSError."""
    stat = file.stat()
    return f"{os.path.realpath(file)}|{stat.st_size}|{stat.st_mtime_ns}"
