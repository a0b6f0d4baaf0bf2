"""Survey and clear cached prefixes for `localllm cache`. Each model has a folder.

Files are written atomically, and a missing file counts as a cache miss. So a server may run while
they are cleared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from localllm.engine.cache.folder import WriteBudget, label


@dataclass(frozen=True, slots=True)
class ModelPrefixes:
    """The cached prefixes of one model.

    `model`: its name; None if the folder does not contain it.
    `used_s`: the last use of one of its files (None: the folder has no files).
    """

    folder: Path
    model: str | None
    n_files: int
    size_bytes: int
    written_today_bytes: int
    used_s: float | None


def survey(root: Path) -> list[ModelPrefixes]:
    """List the folders that contain files or were written to today, the largest first."""
    budget = WriteBudget(root)
    prefixes = []
    for folder in root.glob("*"):
        if not folder.is_dir():
            continue
        stats = []
        for path in _prefix_files(folder):
            # The engine may remove a file at any moment.
            with contextlib.suppress(OSError):
                stats.append(path.stat())
        written_bytes = budget.written_bytes(folder)
        if stats or written_bytes:
            used_s = max((stat.st_mtime for stat in stats), default=None)
            size_bytes = sum(stat.st_size for stat in stats)
            prefixes.append(
                ModelPrefixes(folder, label(folder), len(stats), size_bytes, written_bytes, used_s)
            )
    return sorted(prefixes, key=_largest_first)


def _largest_first(prefixes: ModelPrefixes) -> tuple[int, str, str]:
    return -prefixes.size_bytes, prefixes.model or "", prefixes.folder.name


def clear(models: Iterable[ModelPrefixes]) -> tuple[list[int], int]:
    """Delete the cached files of `models`.

    Returns the size of each deleted file, and the number of files that could not be deleted. The
    counters of bytes written today are kept.
    """
    freed_bytes = []
    n_failed = 0
    for path in chain.from_iterable(_prefix_files(model.folder) for model in models):
        try:
            size_bytes = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            continue
        except OSError:
            n_failed += 1
            continue
        freed_bytes.append(size_bytes)
    return freed_bytes, n_failed


def _prefix_files(folder: Path) -> list[Path]:
    return [*folder.glob("*.kv"), *folder.glob("*.part")]
