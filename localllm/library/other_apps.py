"""Finds the models of other applications in place: LM Studio, Ollama, llama.cpp's cache.

Their files are never changed. app_folders.py links to the documentation of each layout.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from localllm import json_store
from localllm.library import app_folders, file_kinds, folders, hf_cache, names
from localllm.library.types import LocalModel
from localllm_catalog.names import Format

# llama.cpp's flat files: a manifest, and a GGUF file. The GGUF pattern is needed if no manifest
# shows which part of a file name is the repository.
_FLAT = (
    re.compile(r"manifest=(?P<publisher>[^=]+)=(?P<name>[^=]+)=[^=]+(?:\.json)?"),
    re.compile(r"(?P<publisher>[^_]+)_(?P<name>.+?-GGUF)_.+\.gguf", re.IGNORECASE),
)
_OLLAMA_DIGEST = re.compile(r"sha256[:-](?P<hex>[0-9a-f]{64})")
_MODEL = "application/vnd.ollama.image.model"
_PROJECTOR = "application/vnd.ollama.image.projector"
_ADAPTER = "application/vnd.ollama.image.adapter"
_MANIFEST_LIST = "application/vnd.ollama.manifest.list.v2+json"
# Manifests in a list name a runner. These are Ollama's own engine ("" if not stated). They come
# after those for llama.cpp itself, in this order.
_OWN_RUNNERS = {"ollama": 1, "": 2}
# One registry under two names (manifests/ uses the first, manifests-v2/ the second).
_OLLAMA_HOSTS = ("registry.ollama.ai", "ollama.com")


def lmstudio(store: Path) -> list[LocalModel]:
    """LM Studio's models folder: publisher/model/*.gguf, or MLX files in publisher/model."""
    return folders.scan(store, "lmstudio", repo_of_folder=True)


def llamacpp(cache: Path) -> list[LocalModel]:
    """llama.cpp's cache: flat files publisher_repository_file.gguf, or the hub's layout (since
    2026)."""
    files = next((files for _, files in folders.walk(cache, 0)), [])
    known = [repo for repo in (_repo_of(file.name) for file in files) if repo]
    of_repo: dict[str, list[Path]] = {}
    for file in files:
        repo = next((r for r in known if file.name.startswith(_prefix(r))), "")
        of_repo.setdefault(repo, []).append(file)
    # The cache mixes the files of many repositories. A model's companions must come from its own.
    found = []
    for repo, its in of_repo.items():
        for model in folders.ggufs(its, "llama.cpp", repo):
            found.append(replace(model, name=model.name.removeprefix(_prefix(repo))))
    return found + hf_cache.scan(cache, "llama.cpp")


def _prefix(repo: str) -> str:
    """The prefix of a repository's flat file names."""
    if not repo:
        return ""
    return repo.replace("/", "_") + "_"


def _repo_of(name: str) -> str:
    """The repository in a flat file's name, or ""."""
    for pattern in _FLAT:
        match = pattern.fullmatch(name)
        if match is not None:
            repo = f"{match['publisher']}/{match['name']}"
            return repo if names.safe_repo(repo) else ""
    return ""


def ollama(store: Path) -> list[LocalModel]:
    """GGUF models in Ollama's store.

    The blobs are named by manifests-v2/ or manifests/HOST/NAMESPACE/MODEL/TAG. Two kinds are left
    out:
    - models with an adapter, because the base alone is another model
    - models whose weights are not one GGUF file (Ollama's own safetensors layout)
    """
    found: dict[str, LocalModel] = {}
    for root in app_folders.MANIFESTS:
        for manifest in _manifests(store / root):
            name = manifest.relative_to(store / root).parts
            if _title(name) in found:
                continue
            model = _ollama_model(store, manifest, name)
            if model is not None:
                found[model.name] = model
    return list(found.values())


def _manifests(folder: Path) -> Iterator[Path]:
    for current, files in folders.walk(folder, 3):
        if len(current.relative_to(folder).parts) == 3:
            yield from files


def _title(name: tuple[str, ...]) -> str:
    """A model's name as Ollama prints it, without its own registry and the namespace `library`."""
    host, namespace, model, tag = name
    if host.lower() not in _OLLAMA_HOSTS:
        return f"{host}/{namespace}/{model}:{tag}"
    if namespace == "library":
        return f"{model}:{tag}"
    return f"{namespace}/{model}:{tag}"


def _runnable_manifest(store: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The manifest itself or, for a manifest list, the entry that we can run.

    An entry is contained in the list or stored as a blob.
    """
    if content.get("mediaType") != _MANIFEST_LIST:
        return content
    runnable = [child for child in _dicts(content.get("manifests")) if _is_runnable(child)]
    child = min(runnable, key=_precedence, default={})
    if "layers" in child:
        return child
    blob = _blob(store, child)
    return child if blob is None else json_store.read(blob)


def _dicts(listed: object) -> list[dict[str, Any]]:
    """The objects in a JSON array, or an empty list for any other value."""
    if not isinstance(listed, list):
        return []
    return [item for item in listed if isinstance(item, dict)]


def _is_runnable(child: dict[str, Any]) -> bool:
    return child.get("format", Format.GGUF) == Format.GGUF and _runner(child) != Format.MLX


def _precedence(child: dict[str, Any]) -> int:
    return _OWN_RUNNERS.get(_runner(child), 0)


def _runner(child: dict[str, Any]) -> str:
    return str(child.get("runner", "")).lower()


def _ollama_model(store: Path, manifest: Path, name: tuple[str, ...]) -> LocalModel | None:
    from localllm_catalog.kinds import MODELS

    content = _runnable_manifest(store, json_store.read(manifest))
    by_type = _blobs_by_type(store, content.get("layers"))
    weights = by_type.get(_MODEL, [])
    if len(weights) != 1 or _ADAPTER in by_type or not file_kinds.has_magic(weights[0]):
        return None
    if file_kinds.of_header(weights[0]) not in (None, *MODELS):
        return None
    host, namespace, model, tag = name
    repo = f"{namespace}/{model}"
    if host not in ("hf.co", "huggingface.co") or not names.safe_repo(repo):
        repo = ""
    quant = _stated_quant(store, content.get("config")) or names.quant_of(f"-{tag}")
    return LocalModel(
        _title(name),
        weights[0],
        Format.GGUF,
        weights[0].stat().st_size,
        quant.upper(),
        "ollama",
        repo,
        (weights[0],),
        next(iter(by_type.get(_PROJECTOR, ())), None),
    )


def _stated_quant(store: Path, config: object) -> str:
    """The quant that a manifest's config states, or ""."""
    blob = _blob(store, config) if isinstance(config, dict) else None
    if blob is None:
        return ""
    quant = json_store.read(blob).get("file_type")
    if not isinstance(quant, str) or quant == "unknown":
        return ""
    return quant


def _blobs_by_type(store: Path, layers: object) -> dict[str, list[Path]]:
    """The blobs of a manifest's layers by media type. Empty if a weights file is missing."""
    by_type: dict[str, list[Path]] = {}
    for layer in _dicts(layers):
        blob = _blob(store, layer)
        if blob is not None:
            by_type.setdefault(str(layer.get("mediaType")), []).append(blob)
        elif layer.get("mediaType") == _MODEL:
            return {}
    return by_type


def _blob(store: Path, layer: dict[str, object]) -> Path | None:
    """The blob of a manifest's layer, or None if it is missing or its size differs from the
    manifest's."""
    match = _OLLAMA_DIGEST.fullmatch(str(layer.get("digest")))
    if match is None:
        return None
    for separator in "-:":
        blob = store / "blobs" / f"sha256{separator}{match['hex']}"
        try:
            if blob.is_file() and blob.stat().st_size == layer.get("size", blob.stat().st_size):
                return blob
        except OSError:
            return None
    return None


def ollama_digest(blob: Path) -> str:
    """The sha256 in a blob's name, or ""."""
    match = _OLLAMA_DIGEST.fullmatch(os.path.basename(blob))
    if match:
        return match["hex"]
    return ""
