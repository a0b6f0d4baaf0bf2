"""The folder of all models' cached prefixes: what lies in it, clearing it, and how much may be written into it in a day.

Files are whole or absent, and one that is gone is a miss, so a server may run while they are cleared. What was written in
a day outlives restarts: each model's folder has one file for the day, to which each write first adds a line with its bytes,
which needs no lock between processes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from localllm.engine.cache import tunables

_COUNT_PREFIX = "written-"
_LABEL = "model.txt"
_LONGEST_LABEL_BYTES = 1024


@dataclass(frozen=True, slots=True)
class ModelPrefixes:
    """One model's `folder`: so many files and bytes, and what was written into it today. `model` is its name, None where
    the folder doesn't say; `used_s`: when one of its files was last used (None: there are none)."""

    folder: Path
    model: str | None
    n_files: int
    size_bytes: int
    written_today_bytes: int
    used_s: float | None


@dataclass(frozen=True, slots=True)
class Cleared:
    """What clearing came to. `n_left`: files that could not be removed."""

    n_files: int = 0
    freed_bytes: int = 0
    n_left: int = 0


def put_label(folder: Path, model: str) -> None:
    """Make the folder of a model, which says whose it is: its name is a hash. On a full or read-only disk nothing is kept."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if model and _label(folder) != model:
            (folder / _LABEL).write_text(model + "\n", encoding="utf-8")


def survey(root: Path) -> list[ModelPrefixes]:
    """Every model's folder that holds something or was written to today, the largest first."""
    budget = WriteBudget(root)
    found = []
    for folder in root.glob("*"):
        if not folder.is_dir():
            continue
        stats = []
        for path in _content(folder):
            # The engine may remove a file at any moment.
            with contextlib.suppress(OSError):
                stats.append(path.stat())
        written = budget.written_bytes(folder)
        if stats or written:
            used_s = max((s.st_mtime for s in stats), default=None)
            size_bytes = sum(s.st_size for s in stats)
            found.append(ModelPrefixes(folder, _label(folder), len(stats), size_bytes, written, used_s))
    return sorted(found, key=lambda m: (-m.size_bytes, m.model or "", m.folder.name))


def clear(models: Iterable[ModelPrefixes]) -> Cleared:
    """Remove what they hold. What was written today stays counted."""
    n_files = freed_bytes = n_left = 0
    for model in models:
        for path in _content(model.folder):
            try:
                size_bytes = path.stat().st_size
                path.unlink()
            except FileNotFoundError:
                continue
            except OSError:
                n_left += 1
                continue
            n_files, freed_bytes = n_files + 1, freed_bytes + size_bytes
        _remove_if_empty(model.folder)
    return Cleared(n_files, freed_bytes, n_left)


def _content(folder: Path) -> list[Path]:
    return [*folder.glob("*.kv"), *folder.glob("*.part")]


def _label(folder: Path) -> str | None:
    try:
        with (folder / _LABEL).open("rb") as f:
            return f.read(_LONGEST_LABEL_BYTES).decode("utf-8", "replace").strip() or None
    except OSError:
        return None


def _remove_if_empty(folder: Path) -> None:
    budget = WriteBudget(folder.parent)
    remove_old_counts(folder, budget.day())
    with contextlib.suppress(OSError):
        if {path.name for path in folder.iterdir()} <= {_LABEL}:
            (folder / _LABEL).unlink(missing_ok=True)
            folder.rmdir()


# --- what is written in a day -----------------------------------------------------------------------------------------


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

    @property
    def easy(self) -> bool:
        """There is enough left for what may not be wanted again."""
        return self.limit_bytes <= 0 or self.written_bytes() < tunables.EASY_SHARE * self.limit_bytes

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
