"""What the chat remembers of how it was used: a small file beside the conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from localllm import paths

_FILE = "chat.json"


class Preferences:
    """Names and values in `folder`. A file that can't be read is empty, and a disk that refuses is ignored: what is
    lost is a habit, never something said."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _FILE

    def get(self, name: str) -> Any:
        """What was set last; None where nothing was."""
        return self._read().get(name)

    def set(self, name: str, value: Any) -> None:
        """Remember a value."""
        try:
            paths.private_dir(self._file.parent)
            paths.write_private(self._file, json.dumps({**self._read(), name: value}))
        except OSError:
            pass

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
