"""How much the prefix cache may write in a day: a count that outlives restarts, shared by everybody who writes, and its limit.

Every model's folder has one file for the day, to which each write adds a line with its bytes. Adding a line to a file's end
needs no lock between processes, and is done before the bytes are written, so that a crash forgets nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_PREFIX = "written-"
# What may not be wanted again is written only while less than this part of the day's bytes is gone.
_EASY_SHARE = 0.5


def today() -> str:
    """The day here, as files are named by it."""
    return time.strftime("%Y-%m-%d")


@dataclass
class WriteBudget:
    """What all models under `root` together may write in a day: `limit_bytes` (0: no limit). A write that begins below the
    limit is done whole."""

    root: Path
    limit_bytes: int = 0
    day: Callable[[], str] = today
    # How far each of the day's files was read, and what it says up to there.
    _seen: dict[Path, tuple[int, int]] = field(default_factory=dict)
    # The day whose bytes are known to be gone: that is not asked of the files again.
    _spent_on: str = ""
    # What was read of all the day's files when they were last read.
    _known: tuple[str, int] = ("", 0)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def written_bytes(self, folder: Path | None = None) -> int:
        """What was written today, under `root` or in one `folder` of it."""
        name = _PREFIX + self.day()
        files = [folder / name] if folder is not None else list(self.root.glob(f"*/{name}"))
        with self._lock:
            self._seen = {path: seen for path, seen in self._seen.items() if path.name == name}
            total = sum(self._read_on(path) for path in files)
        if folder is None:
            self._known = name, total
        return total

    def known(self) -> tuple[int, bool]:
        """What `written_bytes` last found, if that was today, and whether the limit was met; no file is read."""
        day = self.day()
        name, total = self._known
        return total if name == _PREFIX + day else 0, self._spent_on == day

    @property
    def used_up(self) -> bool:
        """Nothing more is written today."""
        day = self.day()
        if self._spent_on != day and 0 < self.limit_bytes <= self.written_bytes():
            self._spent_on = day
        return self._spent_on == day

    @property
    def easy(self) -> bool:
        """There is enough left for what may not be wanted again."""
        return self.limit_bytes <= 0 or self.written_bytes() < _EASY_SHARE * self.limit_bytes

    def count(self, folder: Path, n_bytes: int) -> None:
        """So many bytes are about to be written into `folder`. Raises OSError."""
        path = folder / (_PREFIX + self.day())
        if not path.exists():
            remove_old_counts(folder, self.day())
        with path.open("ab", buffering=0) as f:
            f.write(b"%d\n" % n_bytes)

    def _read_on(self, path: Path) -> int:
        at, total = self._seen.get(path, (0, 0))
        try:
            with path.open("rb") as f:
                f.seek(at)
                whole, _, _ = f.read().rpartition(b"\n")
        except OSError:
            return total
        if whole:
            total += sum(int(line) for line in whole.split(b"\n") if line.isdigit())
            self._seen[path] = at + len(whole) + 1, total
        return total


def remove_old_counts(folder: Path, day: str) -> None:
    """Remove the counts of days before `day`."""
    for path in folder.glob(f"{_PREFIX}*"):
        if path.name < _PREFIX + day:
            with contextlib.suppress(OSError):
                path.unlink()
