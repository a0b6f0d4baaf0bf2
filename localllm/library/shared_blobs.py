"""The store that all repositories of the hub's cache share since huggingface-hub 2.4: `blobs/XX/HASH`,
with the repositories' links to each in `HASH.refs`.

huggingface-hub's own functions decide which files are in use, and remove them under its lock.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def target(blob: Path, cache: Path) -> Path | None:
    """Return the shared file that a repository's blob links to, or None."""
    if not blob.is_symlink():
        return None
    rules = _rules(cache)
    if rules is None:
        return None
    found: Path | None = rules.shared_blob_target(blob, cache)
    return found


def sweep(shared: Path, cache: Path) -> int:
    """Remove a shared file if no repository links to it. Returns the bytes freed."""
    rules = _rules(cache)
    if rules is None:
        return 0
    return int(rules.sweep_shared_blob(shared, cache_dir=cache))


def unreferenced(cache: Path) -> dict[Path, int]:
    """Return the shared files that no repository links to, with their bytes."""
    rules = _rules(cache)
    if rules is None:
        return {}
    found: dict[Path, int] = rules.unreferenced_shared_blobs(cache)
    return found


def _rules(cache: Path) -> Any:
    """Return huggingface-hub's module for the store, or None without a store or with an older
    version."""
    if not os.path.isdir(cache / "blobs"):
        return None
    try:
        from huggingface_hub.utils import _shared_blobs
    except ImportError:
        return None
    if not _shared_blobs.is_shared_blobs_dir(cache / "blobs"):
        return None
    return _shared_blobs
