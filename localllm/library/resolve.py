"""From a MODEL reference to files on this disk: a path, a name, a catalog id, or nothing (the best at hand)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from localllm.errors import ModelNotFoundError
from localllm.library import starter

if TYPE_CHECKING:
    from localllm_catalog.catalog import Catalog

Origin = Literal["path", "hf-cache", "lmstudio", "ollama", "llama.cpp", "starter"]


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Files of one Variant on this disk: `path` is the GGUF (its first part) or the MLX folder."""

    name: str
    path: Path
    format: Literal["gguf", "mlx"]
    size_bytes: int
    quant: str
    origin: Origin


def resolve(ref: str | None, *, catalog: Catalog | None = None, offline: bool = False) -> LocalModel:
    """The files that `ref` means; None = the best model at hand. Raises ModelNotFoundError with what to do."""
    if ref is None or ref.lower() in (starter.NAME, "smollm2-135m", "starter"):
        file = starter.path()
        if file is not None:
            return LocalModel(starter.NAME, file, "gguf", file.stat().st_size, "Q4_1", "starter")
        raise ModelNotFoundError("no model is installed", hint="fetch one: `localllm recommend`, then `localllm pull ID`")
    file = Path(ref).expanduser()
    if file.exists() or ref.endswith(".gguf"):
        if not file.exists():
            raise ModelNotFoundError(f"there is no file {ref!r}", hint="check the path")
        if file.is_dir():
            size = sum(f.stat().st_size for f in file.glob("*.safetensors"))
            return LocalModel(file.name, file, "mlx", size, "", "path")
        return LocalModel(file.stem, file, "gguf", file.stat().st_size, "", "path")
    from localllm_catalog import catalog as catalogs

    known = catalog or catalogs.load()
    model = known.get(ref.partition(":")[0])
    if model is not None:
        raise ModelNotFoundError(f"{model.name} is not on this disk", hint=f"fetch it: localllm pull {ref}")
    near = known.suggest(ref)
    raise ModelNotFoundError(
        f"no model is called {ref!r}",
        hint=f"did you mean {', '.join(near)}?" if near else "see `localllm models list` and `localllm recommend`",
    )
