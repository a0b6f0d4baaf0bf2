"""LocalModel: the files of one Variant on this disk, and their origin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localllm_catalog.names import FOLDER_FORMATS, Format

Origin = Literal[
    "path", "hf-cache", "lmstudio", "ollama", "llama.cpp", "folder", "starter", "quantised"
]
# The owner of the files, for messages.
OWNERS: dict[Origin, str] = {
    "lmstudio": "LM Studio", "ollama": "Ollama", "llama.cpp": "llama.cpp",
    "hf-cache": "localllm (the hub's cache)", "starter": "localllm (the starter)",
    "folder": "your own folder", "path": "your own file", "quantised": "localllm (quantize)",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Files of one Variant on this disk.

    - `path`: the GGUF file (its first part) or the MLX folder.
    - `files`: all weight files in order (splits, shards).
    - `size_bytes`: the sum of their sizes.
    - `mmproj`: their image projector, if any.
    - `companions`: (kind, path) of other files in the same folder that are no models, e.g. a LoRA,
      an importance matrix or a drafter. Kinds are those of localllm_catalog.kinds.
    - `repo`: the hub repository, if known.
    - `origin`: the owner of the folder that holds the files.
    - `fault`: why no engine can load the files, if a look at their headers shows it: they are cut
      short. Such a model is not listed, but it can be removed.
    - `mmproj_fault`: the same of the projector. The model is listed, but it reads no images.
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
    fault: str = ""
    mmproj_fault: str = ""

    @property
    def ref(self) -> str:
        """The reference to type for files of this quant: the repository if known, else the name."""
        named = self.repo or self.name
        if self.quant:
            return f"{named}:{self.quant}"
        return named

    @property
    def is_folder(self) -> bool:
        """`Format.is_folder` of its format. A format that only a third-party backend knows is a
        file."""
        return self.format in FOLDER_FORMATS
