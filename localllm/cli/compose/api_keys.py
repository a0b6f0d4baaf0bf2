"""The key that `localllm serve` makes up for addresses that other machines reach: kept, so that clients stay set up."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from localllm import paths
from localllm.errors import LocalLLMError

_KEY = re.compile(r"[A-Za-z0-9_-]{24,128}")
_LONGEST_FILE_BYTES = 4096


def key_path() -> Path:
    """Where the key is kept."""
    return paths.data_dir() / "server-key"


def existing_key() -> str | None:
    """The kept key where there is one that can be read; none is made up."""
    try:
        return _read(key_path())
    except OSError:
        return None


def kept_key(*, new: bool = False) -> str:
    """The kept key; one made up now where there is none that can be used, or for `new`. Raises LocalLLMError."""
    path = key_path()
    try:
        key = None if new else _read(path)
        if key is None:
            key = secrets.token_urlsafe(24)
            _write(path, key)
    except OSError as e:
        raise LocalLLMError(
            f"the server's key can't be kept in {path}: {e.strerror or e}",
            hint="give the server a key of your own: --api-key KEY, or LOCALLLM_API_KEY",
        ) from e
    return key


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as f:
            text = f.read(_LONGEST_FILE_BYTES).decode("latin-1").strip()
    except FileNotFoundError:
        return None
    if os.name == "posix" and path.stat().st_mode & 0o077:
        path.chmod(0o600)
    return text if _KEY.fullmatch(text) else None


def _write(path: Path, key: str) -> None:
    paths.private_dir(path.parent)
    paths.write_private(path, key + "\n")
