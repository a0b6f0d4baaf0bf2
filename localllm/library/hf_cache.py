"""The Hugging Face cache folder: complete models, partial downloads, unreferenced blobs, removal.

Layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
- `blobs/` holds files under their hash (sha256, or git's sha1 for small ones).
- `snapshots/COMMIT/NAME` are links to the blobs.
- `refs/BRANCH` names a commit.

Without links (Windows), the snapshot holds the file itself. Links to blobs are followed, links to
folders never.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING

from localllm import paths
from localllm.library import app_folders, folders, names, shared_blobs
from localllm.library.types import LocalModel, Origin

if TYPE_CHECKING:
    from localllm_catalog.catalog import Catalog

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
# Used by localllm and older huggingface-hub (".incomplete", resumed), huggingface-hub 2.x
# (".XXXXXXXX.incomplete", never resumed), and llama.cpp (".downloadInProgress").
_PARTIAL = re.compile(
    r"(?P<digest>[0-9a-f]{40}|[0-9a-f]{64})(?:\.[0-9a-f]{8})?\.(?:incomplete|downloadInProgress)"
)


def repo_folder(cache: Path, repo: str) -> Path:
    return cache / ("models--" + repo.replace("/", "--"))


def repos(cache: Path) -> Iterator[tuple[str, Path]]:
    """(repository, folder) of every model repository in `cache`."""
    try:
        entries = sorted(p for p in cache.iterdir() if p.name.startswith("models--"))
    except OSError:
        return
    for folder in entries:
        repo = folder.name.removeprefix("models--").replace("--", "/")
        if names.safe_repo(repo) and folder.is_dir():
            yield repo, folder


def snapshots(folder: Path) -> list[Path]:
    """Snapshots of a repository: `main` first, then other branches, then the rest by age, newest
    first."""
    try:
        found = [
            s for s in (folder / "snapshots").iterdir() if _COMMIT.fullmatch(s.name) and s.is_dir()
        ]
    except OSError:
        return []
    heads = _heads(folder)

    def place(snapshot: Path) -> tuple[bool, bool, float]:
        is_main = snapshot.name == heads.get("main")
        is_head = snapshot.name in heads.values()
        return not is_main, not is_head, -snapshot.stat().st_mtime

    return sorted(found, key=place)


def _heads(folder: Path) -> dict[str, str]:
    heads = {}
    for file in folders.files_below(folder / "refs", 2):
        with suppress(OSError, ValueError):
            commit = paths.file_text(file, encoding="ascii")[:64].strip()
            heads[str(file.relative_to(folder / "refs"))] = commit
    return heads


def scan(cache: Path, origin: Origin = "hf-cache") -> list[LocalModel]:
    """Every complete model in the cache.

    A file of several snapshots is listed once, from the first in `snapshots` order.
    """
    found: list[LocalModel] = []
    for repo, folder in repos(cache):
        seen_keys: set[str] = set()
        for snapshot in snapshots(folder):
            for model in models_of(snapshot, repo, origin):
                key = str(model.path.relative_to(snapshot))
                if key not in seen_keys:
                    seen_keys.add(key)
                    found.append(model)
    return found


def models_of(snapshot: Path, repo: str, origin: Origin = "hf-cache") -> list[LocalModel]:
    """The complete models in one snapshot: GGUFs at any level, and the snapshot itself if it is an
    MLX folder."""
    files = folders.files_below(snapshot)
    at_root = [file for file in files if file.parent == snapshot]
    mlx_model = folders.mlx(snapshot, at_root, origin, repo.partition("/")[2], repo)
    ggufs = folders.ggufs(files, origin, repo, snapshot)
    if mlx_model is None:
        return ggufs
    return [mlx_model, *ggufs]


# --- blobs ----------------------------------------------------------------------------------------


def digest_of(pointer: Path) -> str:
    """The published hash of a snapshot's file (its blob's name), or "" if the cache has no
    links."""
    try:
        name = os.path.basename(os.readlink(pointer))
    except OSError:
        return ""
    if _DIGEST.fullmatch(name):
        return name
    return ""


def partials(cache: Path) -> list[Path]:
    """The files of unfinished downloads."""
    return list(chain.from_iterable(partials_in(folder) for _, folder in repos(cache)))


def unreferenced(cache: Path) -> list[Path]:
    """Blobs that no snapshot links to, and dangling links."""
    found: list[Path] = []
    for _, folder in repos(cache):
        used: set[str] = set()
        for snapshot in snapshots(folder):
            links = [file for file in folders.files_below(snapshot) if file.is_symlink()]
            used.update(os.path.basename(os.readlink(file)) for file in links)
            found += [file for file in links if not file.exists()]
        blobs = folders.files_below(folder / "blobs", 0)
        found += [f for f in blobs if _DIGEST.fullmatch(f.name) and f.name not in used]
    return found


def remove(model: LocalModel) -> int:
    """Remove one model's links, and the blobs that are then unreferenced. Returns the bytes freed.

    A repository without any snapshot file or partial download is removed with its folder. Raises
    OSError.
    """
    folder = _snapshot_of(model.path).parent.parent
    files = [*model.files]
    if model.mmproj is not None and _is_last(model, folder):
        files.append(model.mmproj)
    if model.is_folder:
        files = folders.files_below(model.path)
    wanted = {os.path.relpath(f, _snapshot_of(model.path)) for f in files}
    freed = sum(_unlink(snapshot / name) for snapshot, name in product(snapshots(folder), wanted))
    unused = [file for file in unreferenced(folder.parent) if folder in file.parents]
    shared = {shared_blobs.target(file, folder.parent) for file in unused} - {None}
    freed += sum(_unlink(file) for file in unused)
    freed += sum(shared_blobs.sweep(file, folder.parent) for file in shared if file is not None)
    is_used = any(folders.files_below(snapshot) for snapshot in snapshots(folder))
    if not is_used and not partials_in(folder):
        shutil.rmtree(folder, ignore_errors=True)
    return freed


def drafters_here(names_of: tuple[str, ...], catalog: Catalog) -> list[Path]:
    """The drafters in the hub's cache that `catalog` lists for the model with these names."""
    model = catalog.recognise(*names_of)
    cache = app_folders.hub_cache()
    if model is None:
        return []
    found = []
    for companion in model.companions:
        snapshots = repo_folder(cache, companion.repo) / "snapshots"
        if companion.folder:
            found += sorted(config.parent for config in snapshots.glob("*/config.json"))
        else:
            found += sorted(snapshots.glob(f"*/{companion.file or '*.gguf'}"))
    return found


def _unlink(file: Path) -> int:
    """Remove `file` and return the bytes freed (0 for a link)."""
    freed = 0 if file.is_symlink() else size_of(file)
    file.unlink(missing_ok=True)
    return freed


def _is_last(model: LocalModel, folder: Path) -> bool:
    """True if no other model of the repository uses the projector."""
    files = chain.from_iterable(models_of(snapshot, model.repo) for snapshot in snapshots(folder))
    return all(other.name == model.name for other in files)


def _snapshot_of(path: Path) -> Path:
    for parent in (path, *path.parents):
        if parent.parent.name == "snapshots" and _COMMIT.fullmatch(parent.name):
            return parent
    raise FileNotFoundError(f"{path} is not in a snapshot")


def partials_in(folder: Path) -> list[Path]:
    return [f for f in folders.files_below(folder / "blobs", 0) if _PARTIAL.fullmatch(f.name)]


def size_of(path: Path) -> int:
    """Size of a file or link in bytes, or 0 if it is gone."""
    if path.exists() or path.is_symlink():
        return path.lstat().st_size
    return 0
