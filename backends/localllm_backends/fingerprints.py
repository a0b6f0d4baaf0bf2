"""What identifies a file of many gigabytes without reading all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def add_samples(digest: Any, path: Path) -> None:
    """Feed a hash with a file's size, its first and last MiB, and 64 KiB at 30 places between.

    Hashing 40 GB would take longer than loading it; a file that differs only elsewhere is another
    quantisation run of the same weights with the same header, which no two published files share.
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
