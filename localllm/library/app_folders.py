"""The folders in which each application keeps its models on this disk.

Only pointer files, which name such a folder, are opened here. Sources of the layouts:
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

# The model folder of Ollama's Linux service, in the home of the service's user.
SERVICE_STORE = Path("/usr/share/ollama/.ollama/models")


# Ollama's manifest folders, newest layout first. The newer folder wins if both hold a name.
MANIFESTS = ("manifests-v2", "manifests")


def _env_path(name: str) -> Path | None:
    value = os.environ.get(name, "").strip()
    if value:
        return Path(value).expanduser()
    return None


def hub_cache() -> Path:
    """The hub's cache folder, found as huggingface-hub does but without importing it.

    Reads HF_HUB_CACHE, HUGGINGFACE_HUB_CACHE, HF_HOME and XDG_CACHE_HOME.
    """
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
    """Ollama's stores, i.e. folders with manifests/ and blobs/: the user's and the Linux
    service's."""
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
    """llama.cpp's own cache: LLAMA_CACHE and the default folder of this system."""
    if sys.platform == "darwin":
        default = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        default = _env_path("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        default = _env_path("XDG_CACHE_HOME") or Path.home() / ".cache"
    chosen = _env_path("LLAMA_CACHE")
    return _existing([p for p in (chosen, default / "llama.cpp") if p])


def quants() -> list[Path]:
    """The folder of the quants that were made here."""
    return _existing([paths.quants_dir()])


def folders_file() -> Path:
    """The file that lists the adopted folders (`localllm models adopt FOLDER`)."""
    return paths.data_dir() / "folders.json"


def folders() -> list[Path]:
    """The adopted folders that exist. A damaged list counts as empty."""
    return _existing(remembered())


def remembered() -> list[Path]:
    """All adopted folders, including missing ones (a drive may be unplugged)."""
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
    """The existing folders, each once. Unreadable folders (another user's) count as absent."""
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
        return paths.file_text(path)[:65536].strip()
    except (OSError, UnicodeDecodeError):
        return ""
