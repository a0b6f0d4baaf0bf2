"""Identify a file of many gigabytes without reading all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm_backends.plain_files import check_plain_file

if TYPE_CHECKING:
    from localllm_backends.values import LoraAdapter


# The samples of a smaller file have more bytes than the file.
SAMPLED_BYTES = 2 * 2**20 + 30 * 2**16


def add_samples(digest: Any, path: Path) -> None:
    """Add a file's size, its first and last MiB, and 64 KiB at 30 places between to a hash.

    Hashing 40 GB would take longer than loading them. A file that differs only elsewhere would have
    to be another quantisation run of the same weights with the same header. No two published files
    are like that.
    """
    size = path.stat().st_size
    digest.update(str(size).encode())
    with path.open("rb") as f:
        digest.update(f.read(2**20))
        for i in range(1, 31):
            f.seek(size * i // 31)
            digest.update(f.read(2**16))
        f.seek(max(0, size - 2**20))
        digest.update(f.read(2**20))


def adapter_digest(path: Path) -> str:
    """Return the identity (hex, 32 digits) of an adapter's file or folder, whatever its name is."""
    digest = hashlib.sha256()
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("adapter*.*"))
    for file in files:
        check_plain_file(file)
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:32]


def loaded_adapters(adapters: Iterable[LoraAdapter]) -> tuple[tuple[str, float], ...]:
    """Return `ModelInfo.adapters` for these adapters."""
    return tuple((adapter_digest(Path(a.path)), float(a.scale)) for a in adapters)


def fingerprint(path: Path) -> str:
    """Return the identity of a GGUF file (hex, 32 digits)."""
    digest = hashlib.sha256()
    add_samples(digest, path)
    return digest.hexdigest()[:32]
