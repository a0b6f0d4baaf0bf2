"""Cached prefixes as `localllm cache` shows and clears them: a folder per model.

Files are whole or absent, and one that is gone is a miss, so a server may run while they are
cleared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from localllm.engine.cache.folder import LABEL, WriteBudget, label, remove_old_counts


@dataclass(frozen=True, slots=True)
class ModelPrefixes:
    """One model's `folder`: so many files and bytes, and what was written into it today. `model` is
    its name, None where the folder doesn't say; `used_s`: when one of its files was last used
    (None: there are none)."""

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
            found.append(
                ModelPrefixes(folder, label(folder), len(stats), size_bytes, written, used_s)
            )
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


def _remove_if_empty(folder: Path) -> None:
    budget = WriteBudget(folder.parent)
    remove_old_counts(folder, budget.day())
    with contextlib.suppress(OSError):
        if {path.name for path in folder.iterdir()} <= {LABEL}:
            (folder / LABEL).unlink(missing_ok=True)
            folder.rmdir()
