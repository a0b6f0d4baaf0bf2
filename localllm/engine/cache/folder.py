"""The folders of models' cached prefixes: whose each is, and how much may be written into all of them in a day.

What was written in a day outlives restarts: each model's folder has one file for the day, to which each write first adds a
line with its bytes, which needs no lock between processes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_COUNT_PREFIX = "written-"
LABEL = "model.txt"
_LONGEST_LABEL_BYTES = 1024


def put_label(folder: Path, model: str) -> None:
    """Make the folder of a model, which says whose it is: its name is a hash. On a full or read-only disk nothing is kept."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if model and label(folder) != model:
            (folder / LABEL).write_text(model + "\n", encoding="utf-8")


def label(folder: Path) -> str | None:
    try:
        with (folder / LABEL).open("rb") as f:
            return f.read(_LONGEST_LABEL_BYTES).decode("utf-8", "replace").strip() or None
    except OSError:
        return None


def today() -> str:
    return time.strftime("%Y-%m-%d")


@dataclass
class WriteBudget:
    """What all models under `root` together may write in a day: `limit_bytes` (0: no limit). A write that begins below the
    limit is done whole."""

    root: Path
    limit_bytes: int = 0
    day: Callable[[], str] = today
    # The day, and what its files said when they were last read.
    _known: tuple[str, int] = ("", 0)

    def written_bytes(self, folder: Path | None = None) -> int:
        """What was written today, under `root` or in one `folder` of it."""
        name = _COUNT_PREFIX + self.day()
        if folder is not None:
            return _counted_bytes(folder / name)
        total = sum(_counted_bytes(path) for path in self.root.glob(f"*/{name}"))
        self._known = name, total
        return total

    def known(self) -> tuple[int, bool]:
        """What `written_bytes` last found, if that was today, and whether the limit was met; no file is read."""
        name, total = self._known
        total = total if name == _COUNT_PREFIX + self.day() else 0
        return total, 0 < self.limit_bytes <= total

    @property
    def used_up(self) -> bool:
        """Nothing more is written today."""
        return 0 < self.limit_bytes <= self.written_bytes()

    def count(self, folder: Path, n_bytes: int) -> None:
        """So many bytes are about to be written into `folder`. Raises OSError."""
        path = folder / (_COUNT_PREFIX + self.day())
        if not path.exists():
            remove_old_counts(folder, self.day())
        with path.open("ab", buffering=0) as f:
            f.write(b"%d\n" % n_bytes)


def _counted_bytes(path: Path) -> int:
    """What a day's file says. Its last line may be half written."""
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n")
    except OSError:
        return 0
    return sum(int(line) for line in whole.split(b"\n") if line.isdigit())


def remove_old_counts(folder: Path, day: str) -> None:
    """Remove the counts of days before `day`."""
    for path in folder.glob(f"{_COUNT_PREFIX}*"):
        if path.name < _COUNT_PREFIX + day:
            with contextlib.suppress(OSError):
                path.unlink()
