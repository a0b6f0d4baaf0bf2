"""An mlx-lm checkpoint on disk: its folder, its weight files and its identity."""

from __future__ import annotations

import hashlib
from pathlib import Path

from localllm_backends.failures import LoadError
from localllm_backends.fingerprints import add_samples
from localllm_backends.plain_files import check_plain_files


def checkpoint_folder(path: str) -> Path:
    """Return the checkpoint's folder: `path` itself, or the folder of a .safetensors file."""
    folder = Path(path)
    if folder.suffix == ".safetensors" and folder.is_file():
        return folder.parent
    return folder


def weight_files(folder: Path) -> list[Path]:
    """Return the files from which mlx-lm reads weights (mlx_lm/utils.py, load_model)."""
    return sorted(folder.glob("model*.safetensors"))


def check_folder(path: str) -> Path:
    """Return the checkpoint's folder. Raises LoadError, with the missing part, if it is
    incomplete."""
    folder = checkpoint_folder(path)
    name = folder.name
    if not folder.exists():
        raise LoadError(f"there is no folder {name!r} at that path")
    if not folder.is_dir():
        raise LoadError(f"{name!r} is a file, not an MLX checkpoint folder")
    check_plain_files(folder)
    if not (folder / "config.json").is_file():
        raise LoadError(f"{name!r} has no config.json: it is not an MLX checkpoint folder")
    if not weight_files(folder):
        raise LoadError(
            f"{name!r} has no model*.safetensors, and weights in other formats are not supported"
        )
    return folder


def fingerprint(folder: Path) -> str:
    """Return the identity of a checkpoint (hex, 32 digits).

    It is a hash of its config and tokenizer, and of samples from each weight file.
    """
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    for path in weight_files(folder):
        digest.update(f"{path.name} ".encode())
        add_samples(digest, path)
    return digest.hexdigest()[:32]
