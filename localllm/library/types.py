"""LocalModel: the files of one Variant on this disk, and where they came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localllm_catalog.names import FOLDER_FORMATS, Format

Origin = Literal["path", "hf-cache", "lmstudio", "ollama", "llama.cpp", "folder", "starter"]
# Who holds the files, in words.
OWNERS: dict[Origin, str] = {
    "lmstudio": "LM Studio", "ollama": "Ollama", "llama.cpp": "llama.cpp",
    "hf-cache": "localllm (the hub's cache)", "starter": "localllm (the starter)",
    "folder": "a folder of yours", "path": "a file of yours",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Files of one Variant on this disk: `path` is the GGUF (its first part) or the MLX folder.

    `files` are all its weight files in order (splits, shards), `size_bytes` their sum;
    `mmproj` the image projector that belongs to them, if any, and `companions` what else lies
    beside them and is no model (a LoRA, an importance matrix, a drafter …), each after its kind in
    localllm_catalog.kinds.
    `repo` is the hub repository where it is known, `origin` whose folder holds the files.
    """

    name: str
    path: Path
    format: Format
    size_bytes: int
    quant: str
    origin: Origin
    repo: str = ""
    files: tuple[Path, ...] = ()
    mmproj: Path | None = None
    companions: tuple[tuple[str, Path], ...] = ()

    @property
    def ref(self) -> str:
        """What to type for files of this quant: the repository where it is known, else the name."""
        named = self.repo or self.name
        if self.quant:
            return f"{named}:{self.quant}"
        return named

    @property
    def is_folder(self) -> bool:
        """`Format.is_folder` of its form; one that only somebody else's backend knows is a file."""
        return self.format in FOLDER_FORMATS
