"""Where each application keeps its models on this disk: folders only, nothing is opened that isn't
a pointer to one.

Sources of the layouts:
  hub cache    https://huggingface.co/docs/huggingface_hub/guides/manage-cache and
               …/package_reference/environment_variables
  LM Studio    https://lmstudio.ai/docs/basics/import-model (models/publisher/model/file);
               ~/.lmstudio-home-pointer names the home, settings.json's downloadsFolder the models
               folder
  Ollama       https://github.com/ollama/ollama/blob/main/docs/faq.md#where-are-models-stored;
               manifest/paths.go
  llama.cpp    https://github.com/ggml-org/llama.cpp: common/common.cpp (fs_get_cache_directory:
               flat files), since 2026 common/hf-cache.cpp (the hub's cache layout, LLAMA_CACHE
               first)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from localllm import json_store, paths

# Where Ollama's Linux service (its own user's home) keeps its models.
SERVICE_STORE = Path("/usr/share/ollama/.ollama/models")


# Ollama's, the newer first: what both name, the newer one says.
MANIFESTS = ("manifests-v2", "manifests")


def _env_path(name: str) -> Path | None:
    value = os.environ.get(name, "").strip()
    if value:
        return Path(value).expanduser()
    return None


def hub_cache() -> Path:
    """The hub's cache, by huggingface-hub's own rules (HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME),
    without importing it."""
    chosen = _env_path("HF_HUB_CACHE") or _env_path("HUGGINGFACE_HUB_CACHE")
    if chosen is not None:
        return chosen
    home = _env_path("HF_HOME")
    if home is not None:
        return home / "hub"
    return (_env_path("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface" / "hub"


def lmstudio() -> list[Path]:
    pointer = _text(Path.home() / ".lmstudio-home-pointer")
    homes = [Path(named.strip()) for named in pointer.splitlines()[:1]]
    found = []
    for home in (*homes, Path.home() / ".lmstudio", Path.home() / ".cache" / "lm-studio"):
        downloads = json_store.read(home / "settings.json").get("downloadsFolder")
        if downloads and isinstance(downloads, str):
            found.append(Path(downloads))
        found.append(home / "models")
    return _existing(found)


def ollama() -> list[Path]:
    """Ollama's stores (folders with manifests/ and blobs/): the user's, and that of the Linux
    service."""
    candidates = []
    chosen = _env_path("OLLAMA_MODELS")
    if chosen is not None:
        candidates.append(chosen)
    home = _env_path("OLLAMA_HOME")
    if home is not None:
        candidates.append(home / "models")
    candidates.append(Path.home() / ".ollama" / "models")
    if sys.platform == "linux":
        candidates.append(SERVICE_STORE)
    stores = _existing(candidates)
    return [store for store in stores if any((store / m).is_dir() for m in MANIFESTS)]


def llamacpp() -> list[Path]:
    """llama.cpp's own cache: LLAMA_CACHE, or its place on this system."""
    if sys.platform == "darwin":
        default = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        default = _env_path("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        default = _env_path("XDG_CACHE_HOME") or Path.home() / ".cache"
    chosen = _env_path("LLAMA_CACHE")
    return _existing([p for p in (chosen, default / "llama.cpp") if p])


def folders_file() -> Path:
    """The file that remembers folders adopted by name (`localllm models adopt FOLDER`)."""
    return paths.data_dir() / "folders.json"


def folders() -> list[Path]:
    """Folders adopted by name, those that exist; a damaged list counts as none."""
    return _existing(remembered())


def remembered() -> list[Path]:
    """Folders adopted by name, whether or not they exist now (a drive may be unplugged)."""
    try:
        listed = json_store.load(folders_file())
    except (OSError, ValueError):
        return []
    if isinstance(listed, list):
        return [Path(entry) for entry in listed if isinstance(entry, str)]
    return []


def remember(listed: list[Path]) -> None:
    json_store.write(folders_file(), [str(folder) for folder in listed])


def _existing(candidates: list[Path]) -> list[Path]:
    """Existing folders, each once. What can't be looked at (another user's) counts as absent."""
    found: dict[str, Path] = {}
    for folder in candidates:
        try:
            if folder.is_dir():
                found.setdefault(os.path.realpath(folder), folder)
        except OSError:
            continue
    return list(found.values())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")[:65536].strip()
    except (OSError, UnicodeDecodeError):
        return ""
