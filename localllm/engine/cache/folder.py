"""The folders of cached prefixes, one per model: their names, labels, files and daily write limit.

The count of bytes written per day survives restarts. Each model's folder has one file per day.
Every write first appends a line with its size, so processes need no lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from localllm.engine.cache.eviction import StoredFile
from localllm_backends.contract import Backend

_COUNT_PREFIX = "written-"
LABEL = "model.txt"
_LONGEST_LABEL_BYTES = 1024


def folder_names(backend: Backend) -> tuple[str, str]:
    """Return the common prefix of the folder names for this model and KV types, and one full name.

    The full name is that of the folder whose KV this build can read.
    """
    info = backend.info
    able = backend.capabilities
    if able.states:
        shape = "states"
    elif able.segments:
        shape = "parts"
    else:
        shape = "snapshots"
    kind = f"{info.fingerprint}-{info.kv_type_k}-{info.kv_type_v}-"
    # The meaning of KV depends on the build: another one may compute, rotate or arrange it
    # differently.
    return (
        kind,
        f"{kind}{shape}-{hashlib.blake2b(info.kv_meaning.encode(), digest_size=8).hexdigest()}",
    )


def remove_stale(folder: Path, older: str) -> None:
    """Remove the other folders whose names begin with `older`: their contents have lost their
    meaning.
    """
    for path in folder.parent.glob(f"{older}*"):
        if path != folder and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


class Survey(NamedTuple):
    """The files of all models, least recently used first, with their total and the maximum size."""

    files: Sequence[StoredFile] = ()
    files_bytes: int = 0
    most_bytes: int = 0

    def without(self, paths: Container[Path]) -> Survey:
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
        with (folder / LABEL).open("rb") as f:
            return f.read(_LONGEST_LABEL_BYTES).decode("utf-8", "replace").strip() or None
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

    def written_bytes(self, folder: Path | None = None) -> int:
        """Bytes written today, under `root` or in one `folder` of it."""
        name = _COUNT_PREFIX + self.day()
        if folder is not None:
            return _counted_bytes(folder / name)
        total = sum(_counted_bytes(path) for path in self.root.glob(f"*/{name}"))
        self._known = name, total
        return total

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
        path = folder / (_COUNT_PREFIX + self.day())
        if not path.exists():
            remove_old_counts(folder, self.day())
        with path.open("ab", buffering=0) as f:
            f.write(b"%d\n" % n_bytes)


def _counted_bytes(path: Path) -> int:
    """The sum of a day's file. Its last line may be incomplete."""
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
