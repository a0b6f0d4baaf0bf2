"""The sha256 of a model's files: as published where that is known, else read once and
remembered."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from localllm import json_store, paths
from localllm.library import store
from localllm.library.types import LocalModel

_SHA256_DIGITS = 64
# The oldest are forgotten: a disk holds few models that nobody published.
_MOST_REMEMBERED = 512
_lock = threading.Lock()


class ModelDigest:
    """Called, it gives 64 digits at once: the sha256 of the model's one file; of several files, the
    sha256 of the lines
    `HASH  NAME` that sha256sum prints of them.

    A file whose hash nobody knows is read in the background from the first call on. Until then, and
    where it can't be read, the digits are those of its name, size and time.
    """

    def __init__(self, model: LocalModel) -> None:
        self._model = model
        self._files = tuple(model.files or (model.path,))
        self._reading: threading.Thread | None = None

    def __call__(self) -> str:
        found = [self._known(file) for file in self._files]
        if all(found):
            return _joined(self._files, found)
        with _lock:
            if self._reading is None:
                self._reading = threading.Thread(target=self.read, name="digest", daemon=True)
                self._reading.start()
        return _joined(
            self._files,
            [digest or _stand_in(f) for f, digest in zip(self._files, found, strict=True)],
        )

    def read(self) -> None:
        """Read the files whose hash nobody knows, and remember it."""
        for file in self._files:
            if not self._known(file):
                try:
                    key = _key(file)
                    digest = store.digest_file(file, "0" * _SHA256_DIGITS)
                    if key == _key(file):  # it was not written to meanwhile
                        remember(file, digest)
                except OSError:
                    continue

    def wait(self) -> None:
        """Until what the first call began has ended."""
        if self._reading is not None:
            self._reading.join()

    def _known(self, file: Path) -> str:
        published = store.published_digest(self._model, file)
        if len(published) == _SHA256_DIGITS:
            return published
        try:
            return _remembered().get(_key(file), "")
        except OSError:
            return ""


def _joined(files: Sequence[Path], digests: Sequence[str]) -> str:
    if len(files) == 1:
        return digests[0]
    lines = "".join(f"{digest}  {file.name}\n" for file, digest in zip(files, digests, strict=True))
    return hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()


def _key(file: Path) -> str:
    """What a hash is remembered by: a file that was changed has another. Raises OSError."""
    stat = file.stat()
    return f"{os.path.realpath(file)}|{stat.st_size}|{stat.st_mtime_ns}"


def _stand_in(file: Path) -> str:
    try:
        key = _key(file)
    except OSError:
        key = str(file)
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def kept_in() -> Path:
    return paths.cache_dir() / "digests.json"


def _remembered() -> dict[str, str]:
    return {k: v for k, v in json_store.read(kept_in()).items() if isinstance(v, str)}


def is_known(file: Path, digest: str) -> bool:
    """Whether `file` had this hash when it was last read, and was not written to since. Raises
    OSError."""
    return _remembered().get(_key(file)) == digest


def remember(file: Path, digest: str) -> None:
    """Remember the hash of `file` as it is. Raises OSError."""
    with _lock:
        kept = {**_remembered(), _key(file): digest}
        json_store.write(kept_in(), dict(list(kept.items())[-_MOST_REMEMBERED:]))
