"""Checks of a model's files before any library opens them."""

from __future__ import annotations

from pathlib import Path

from localllm_backends.failures import LoadError

# Published tokenizer.json files have up to 35 MB.
_MAX_TEXT_BYTES = 256 << 20
_WEIGHTS = frozenset({".safetensors", ".npz", ".gguf", ".bin", ".pt", ".pth"})


def check_plain_file(path: Path) -> None:
    """Raise LoadError unless `path` is a regular file, and no text of more than 256 MiB.

    Opening a pipe waits for its writer, and reading a device may never end.
    """
    if not path.is_file():
        raise LoadError(f"{path.name!r} is a pipe or a device, not a file")
    if path.suffix.lower() not in _WEIGHTS and path.stat().st_size > _MAX_TEXT_BYTES:
        most_mib = _MAX_TEXT_BYTES >> 20
        raise LoadError(f"{path.name!r} is larger than {most_mib} MiB, unlike any such file")


def check_plain_files(folder: Path) -> None:
    """Raise LoadError if an entry of `folder` is neither a folder nor a file that
    `check_plain_file` accepts. Libraries open files there by names of their own."""
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_dir():
            check_plain_file(path)
