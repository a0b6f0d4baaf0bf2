"""The folders of models' cached prefixes: whose each is, what lies in all of them, and how much may
be written there in a day.

What was written in a day outlives restarts: each model's folder has one file for the day, to which
each write first adds a line with its bytes, which needs no lock between processes.
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
    """What the names of all folders of this model's KV, of these types, begin with; and the one
    whose KV this build can read."""
    info = backend.info
    able = backend.capabilities
    if able.states:
        shape = "states"
    elif able.segments:
        shape = "parts"
    else:
        shape = "snapshots"
    kind = f"{info.fingerprint}-{info.kv_type_k}-{info.kv_type_v}-"
    # What wrote KV is part of what it means: another build may compute, rotate or lay it out in
    # another way.
    return (
        kind,
        f"{kind}{shape}-{hashlib.blake2b(info.kv_meaning.encode(), digest_size=8).hexdigest()}",
    )


def remove_stale(folder: Path, older: str) -> None:
    """Remove the folders beside this one whose names begin with `older`: what they hold has lost
    its meaning."""
    for path in folder.parent.glob(f"{older}*"):
        if path != folder and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


class Survey(NamedTuple):
    """The files of all models, those unused the longest first, what they take, and what they may
    take."""

    files: Sequence[StoredFile] = ()
    files_bytes: int = 0
    most_bytes: int = 0

    def without(self, paths: Container[Path]) -> Survey:
        """The same when these files are gone."""
        left = [file for file in self.files if file.path not in paths]
        return self._replace(files=left, files_bytes=sum(file.size_bytes for file in left))


def put_label(folder: Path, model: str) -> None:
    """Make the folder of a model, which says whose it is: its name is a hash. On a full or
    read-only disk nothing is kept."""
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
    """What all models under `root` together may write in a day: `limit_bytes` (0: no limit). A
    write that begins below the limit is done whole."""

    root: Path
    limit_bytes: int = 0
    day: Callable[[], str] = _today
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
        """What `written_bytes` last found, if that was today, and whether the limit was met; no
        file is read."""
        name, total = self._known
        total = total if name == _COUNT_PREFIX + self.day() else 0
        return total, 0 < self.limit_bytes <= total

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
