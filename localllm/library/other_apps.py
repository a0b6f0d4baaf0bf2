"""Models that other applications hold, found in place and never changed: LM Studio, Ollama, llama.cpp's cache.

places.py says where each layout is documented.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from localllm.library import folders, hf_cache, names
from localllm.library.types import LocalModel

_OLLAMA_DIGEST = re.compile(r"sha256[:-](?P<hex>[0-9a-f]{64})")
_MODEL, _PROJECTOR = "application/vnd.ollama.image.model", "application/vnd.ollama.image.projector"
_ADAPTER = "application/vnd.ollama.image.adapter"


def lmstudio(store: Path) -> list[LocalModel]:
    """LM Studio's models folder: publisher/model/*.gguf, or MLX files in publisher/model."""
    return folders.scan(store, "lmstudio", depth=3, repo_of_folder=True)


def llamacpp(cache: Path) -> list[LocalModel]:
    """llama.cpp's cache: flat files called publisher_repository_file.gguf, or the hub's layout (since 2026)."""
    files = next((files for _, files in folders.walk(cache, 0)), [])
    known = [_repo_of_manifest(f.name) for f in files]
    found = []
    for model in folders.ggufs(files, "llama.cpp"):
        repo = next((r for r in known if r and model.path.name.startswith(r.replace("/", "_") + "_")), "")
        name = model.name.removeprefix(repo.replace("/", "_") + "_") if repo else model.name
        # The cache holds many repositories side by side: a projector belongs to the model of its own.
        projector = _own_projector(files, repo) if repo else None
        found.append(
            LocalModel(
                name, model.path, "gguf", model.size_bytes, model.quant, "llama.cpp", repo, model.files, projector
            )
        )
    return found + hf_cache.scan(cache, "llama.cpp")


def _own_projector(files: list[Path], repo: str) -> Path | None:
    prefix = repo.replace("/", "_") + "_"
    return folders.best_projector([f for f in files if f.name.startswith(prefix) and names.is_projector(f.name)])


def _repo_of_manifest(name: str) -> str:
    """The repository in "manifest=publisher=repository=tag.json", or ""."""
    parts = name.removesuffix(".json").split("=")
    if len(parts) != 4 or parts[0] != "manifest":
        return ""
    repo = f"{parts[1]}/{parts[2]}"
    return repo if names.safe_repo(repo) else ""


def ollama(store: Path) -> list[LocalModel]:
    """Ollama's store: manifests/HOST/NAMESPACE/MODEL/TAG name the blobs. GGUF models only.

    Left out: models with an adapter (running the base alone would be another model), and those whose weights are not
    one GGUF file (Ollama's own safetensors layout).
    """
    found = []
    for manifest in _manifests(store / "manifests"):
        model = _ollama_model(store, manifest)
        if model is not None:
            found.append(model)
    return found


def _manifests(folder: Path) -> Iterator[Path]:
    for current, files in folders.walk(folder, 3):
        if len(current.relative_to(folder).parts) == 3:
            yield from files


def _ollama_model(store: Path, manifest: Path) -> LocalModel | None:
    content = folders.read_json(manifest)
    layers = content.get("layers")
    if not isinstance(layers, list):
        return None
    by_type: dict[str, list[Path]] = {}
    for layer in layers:
        if isinstance(layer, dict):
            blob = _blob(store, layer)
            if blob is None and layer.get("mediaType") == _MODEL:
                return None
            if blob is not None:
                by_type.setdefault(str(layer.get("mediaType")), []).append(blob)
    weights = by_type.get(_MODEL, [])
    if len(weights) != 1 or _ADAPTER in by_type or not _is_gguf(weights[0]):
        return None
    host, namespace, name, tag = manifest.relative_to(store / "manifests").parts
    repo = f"{namespace}/{name}" if host in ("hf.co", "huggingface.co") else ""
    config = content.get("config")
    config_blob = _blob(store, config) if isinstance(config, dict) else None
    facts = folders.read_json(config_blob) if config_blob is not None else {}
    quant = facts.get("file_type") if isinstance(facts.get("file_type"), str) else ""
    if not quant or quant == "unknown":
        quant = names.quant_of(f"-{tag}")
    title = f"{name}:{tag}"
    if host != "registry.ollama.ai":
        title = f"{host}/{namespace}/{title}"
    elif namespace != "library":
        title = f"{namespace}/{title}"
    projectors = by_type.get(_PROJECTOR, [])
    return LocalModel(
        title,
        weights[0],
        "gguf",
        weights[0].stat().st_size,
        str(quant).upper(),
        "ollama",
        repo if names.safe_repo(repo) else "",
        (weights[0],),
        projectors[0] if projectors else None,
    )


def _blob(store: Path, layer: dict[str, object]) -> Path | None:
    """The blob of a manifest's layer: there, and as long as the manifest says."""
    match = _OLLAMA_DIGEST.fullmatch(str(layer.get("digest")))
    if match is None:
        return None
    for separator in "-:":
        blob = store / "blobs" / f"sha256{separator}{match['hex']}"
        try:
            if blob.is_file() and blob.stat().st_size == layer.get("size"):
                return blob
        except OSError:
            return None
    return None


def ollama_digest(blob: Path) -> str:
    """The sha256 in a blob's name, or ""."""
    match = _OLLAMA_DIGEST.fullmatch(os.path.basename(blob))
    return match["hex"] if match else ""


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as f:
            return f.read(4) == b"GGUF"
    except OSError:
        return False
