"""The published sha256 of a model's files, and the list of files that were already verified."""

from __future__ import annotations

import hashlib
from pathlib import Path

from localllm.library import store
from localllm.library.cached_facts import CachedFacts, key_of
from localllm.library.types import LocalModel

_SHA256_DIGITS = 64
kept = CachedFacts("digests.json")


def model_digest(model: LocalModel) -> str:
    """The model's sha256, 64 hex digits.

    - For one file: its published sha256.
    - For several files: the sha256 of the lines `HASH  NAME` that sha256sum prints for them.
    - For a file without a published hash: the sha256 of its name, size and time. Its content is not
      read.
    """
    files = model.files or (model.path,)
    digests = [_digest(model, file) for file in files]
    if len(files) == 1:
        return digests[0]
    lines = "".join(f"{digest}  {file.name}\n" for file, digest in zip(files, digests, strict=True))
    return hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()


def _digest(model: LocalModel, file: Path) -> str:
    published = store.published_digest(model, file)
    if len(published) == _SHA256_DIGITS:
        return published
    try:
        key = key_of(file)
    except OSError:
        key = str(file)
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def is_known(file: Path, digest: str) -> bool:
    """True if `file` had this hash when it was last read and was not modified since. Raises
    OSError."""
    return kept.facts().get(key_of(file)) == digest


def remember(file: Path, digest: str) -> None:
    """Keep the hash of `file` in its current state. Raises OSError."""
    kept.add({key_of(file): digest})
