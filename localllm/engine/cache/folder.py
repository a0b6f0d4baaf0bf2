"""The folders of cached prefixes, one per model: their names, labels, files and daily write limit.

Several servers may use the same folders, also on several machines with a shared disk. A file is
written under a name of its own and renamed, and files are found by their names, so no locks are
needed. A server marks its folder while it runs, by the folder's time stamp.

The count of bytes written per day survives restarts. Each model's folder has one file per day.
Every write first appends a line with its size, so processes need no lock.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from localllm import paths
from localllm.engine.cache import tunables
from localllm.engine.cache.eviction import StoredFile
from localllm.engine.cache.part_files import machine_name

_COUNT_PREFIX = "written-"
LABEL = "model.txt"
_LONGEST_LABEL_BYTES = 1024


def mark_in_use(folder: Path) -> None:
    """Mark a folder as used by a running server, unless it was marked recently."""
    with contextlib.suppress(OSError):
        if time.time() - folder.stat().st_mtime > tunables.FOLDER_MARK_S:
            os.utime(folder)


def remove_stale(folder: Path, older: str) -> None:
    """Remove other folders whose names begin with `older`, unless a server used them today. They
    belong to other layouts of the same model's KV, which another build may still use.

    `folder` must exist. Its time stamp is renewed and compared, because the clock of a shared disk
    may differ from ours.
    """
    with contextlib.suppress(OSError):
        os.utime(folder)
        now_s = folder.stat().st_mtime
        for path in folder.parent.glob(f"{older}*"):
            is_old = now_s - path.stat().st_mtime > tunables.FOLDER_UNUSED_S
            if path != folder and path.is_dir() and is_old:
                shutil.rmtree(path, ignore_errors=True)


class FolderSurvey(NamedTuple):
    """The files of all models, least recently used first, with their total and the maximum size."""

    files: Sequence[StoredFile] = ()
    files_bytes: int = 0
    max_bytes: int = 0

    def without(self, paths: Container[Path]) -> FolderSurvey:
        """The same survey without these files."""
        left = [file for file in self.files if file.path not in paths]
        return self._replace(files=left, files_bytes=sum(file.size_bytes for file in left))


def put_label(folder: Path, model: str) -> None:
    """Create the folder of a model, with a label that names the model, because its name is a hash.

    On a full or read-only disk no folder or label is written.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if model and label(folder) != model:
            (folder / LABEL).write_text(model + "\n", encoding="utf-8")


def label(folder: Path) -> str | None:
    try:
        text = paths.file_bytes(folder / LABEL, _LONGEST_LABEL_BYTES).decode("utf-8", "replace")
        return text.strip() or None
    except OSError:
        return None


def _today() -> str:
    return time.strftime("%Y-%m-%d")


@dataclass
class WriteBudget:
    """The daily write limit of all models under `root` together: `limit_bytes` (0: no limit).

    A write that begins below the limit is completed.
    """

    root: Path
    limit_bytes: int = 0
    day: Callable[[], str] = _today
    # The name of the day's count files, and their total when they were last read.
    _known: tuple[str, int] = ("", 0)
    # The sums so far of the count files. Other processes only append to them.
    _sums: dict[Path, _LineSum] = field(default_factory=dict)

    def written_bytes(self, folder: Path | None = None) -> int:
        """Bytes written today, under `root` or in one `folder` of it."""
        name = _COUNT_PREFIX + self.day()
        if folder is not None:
            return self._sum_of(folder.glob(f"{name}*"))
        if self._known[0] != name:
            self._sums.clear()
        total = self._sum_of(self.root.glob(f"*/{name}*"))
        self._known = name, total
        return total

    def _sum_of(self, files: Iterable[Path]) -> int:
        return sum(self._sums.setdefault(path, _LineSum()).read(path) for path in files)

    def known(self) -> tuple[int, bool]:
        """Return the last result of `written_bytes`, if it is of today, and whether the limit is
        reached.

        Reads no file.
        """
        name, total = self._known
        total = total if name == _COUNT_PREFIX + self.day() else 0
        return total, 0 < self.limit_bytes <= total

    def count(self, folder: Path, n_bytes: int) -> None:
        """Record that `n_bytes` are about to be written into `folder`. Raises OSError."""
        # Only processes of one machine append to the same file.
        path = folder / f"{_COUNT_PREFIX}{self.day()}.{machine_name()}"
        if not path.exists():
            self._sums.pop(path, None)
            remove_old_counts(folder, self.day())
        with path.open("ab", buffering=0) as f:
            f.write(b"%d\n" % n_bytes)


@dataclass(slots=True)
class _LineSum:
    """The sum of the numbers in a file's lines, of which `end` bytes have been read."""

    end: int = 0
    total: int = 0

    def read(self, path: Path) -> int:
        """Add the lines that were appended since the last call. Returns the sum.

        The last line may be incomplete. It is read again by the next call.
        """
        try:
            if path.stat().st_size < self.end:
                # Another file was put in its place.
                self.end = self.total = 0
            whole, newline, _ = paths.file_bytes(path, begin=self.end).rpartition(b"\n")
        except OSError:
            return 0
        self.end += len(whole) + len(newline)
        self.total += sum(int(line) for line in whole.split(b"\n") if line.isdigit())
        return self.total


def remove_old_counts(folder: Path, day: str) -> None:
    """Remove the counts of days before `day`."""
    for path in folder.glob(f"{_COUNT_PREFIX}*"):
        if path.name < _COUNT_PREFIX + day:
            with contextlib.suppress(OSError):
                path.unlink()
