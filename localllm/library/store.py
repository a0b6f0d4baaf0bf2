"""All models on this disk: scan, measure, verify, remove, adopt."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

from localllm.errors import LocalLLMError, ModelFileError, UsageError
from localllm.library import (
    app_folders,
    file_kinds,
    folders,
    hf_cache,
    names,
    other_apps,
    shared_blobs,
    starter,
)
from localllm.library.catalog import read_header
from localllm.library.types import OWNERS, LocalModel
from localllm_catalog.names import Format

# A file modified within this many seconds may belong to a running download.
_MIN_AGE_S = 600.0


def _quantised(folder: Path) -> list[LocalModel]:
    return folders.scan(folder, "quantised")


# The model folders of each application, and the function that finds models in them.
_APPLICATIONS: tuple[tuple[Callable[[], list[Path]], Callable[[Path], list[LocalModel]]], ...] = (
    (app_folders.lmstudio, other_apps.lmstudio),
    (app_folders.ollama, other_apps.ollama),
    (app_folders.llamacpp, other_apps.llamacpp),
    (app_folders.folders, folders.scan),
    (app_folders.quants, _quantised),
)


def scan() -> list[LocalModel]:
    """Every complete model on this disk."""
    return [model for model in everything() if not model.fault]


def everything() -> list[LocalModel]:
    """Every model on this disk, also those whose files are cut short.

    Searches the hub's cache, LM Studio, Ollama, llama.cpp, adopted folders, quants that were made
    here, and the starter. Names, sizes and GGUF headers are read, but no weights. Files that two
    applications share are listed once.
    """
    found = hf_cache.scan(app_folders.hub_cache())
    for places, models_in in _APPLICATIONS:
        for place in places():
            found += models_in(place)
    found += packaged()
    # One application may give a file several names, and all are kept. The names that another
    # application gives to the same file are left out.
    holder: dict[str, str] = {}
    return [m for m in found if holder.setdefault(os.path.realpath(m.path), m.origin) == m.origin]


def packaged() -> list[LocalModel]:
    file = starter.path()
    if file is None:
        return []
    return [
        LocalModel(
            starter.NAME, file, Format.GGUF, file.stat().st_size, "Q4_1", "starter", "", (file,)
        )
    ]


# --- du -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Bytes of disk used by one origin. Files that several names share count once."""

    origin: str
    n_models: int
    size_bytes: int


def du() -> list[DiskUsage]:
    """Disk usage by origin, biggest first.

    Unfinished downloads have the origin "partial". Files of the hub's shared store that no
    repository uses have the origin "unused".
    """
    sizes: dict[str, dict[tuple[int, int], int]] = {}
    counts: dict[str, int] = {}
    for model in everything():
        counts[model.origin] = counts.get(model.origin, 0) + 1
        for file in _all_files(model):
            with suppress(OSError):
                stat = file.stat()
                sizes.setdefault(model.origin, {})[(stat.st_dev, stat.st_ino)] = stat.st_size
    usage = [
        DiskUsage(origin, counts[origin], sum(files.values())) for origin, files in sizes.items()
    ]
    unfinished = hf_cache.partials(app_folders.hub_cache())
    if unfinished:
        size_bytes = sum(hf_cache.size_of(path) for path in unfinished)
        usage.append(DiskUsage("partial", len(unfinished), size_bytes))
    unused = shared_blobs.unreferenced(app_folders.hub_cache())
    if unused:
        usage.append(DiskUsage("unused", len(unused), sum(unused.values())))
    return sorted(usage, key=attrgetter("size_bytes"), reverse=True)


def _all_files(model: LocalModel) -> list[Path]:
    files = list(model.files or (model.path,))
    if model.is_folder:
        files = folders.files_below(model.path, 2)
    if model.mmproj is not None:
        return [*files, model.mmproj]
    return files


# --- rm and prune ---------------------------------------------------------------------------------


def rm(model: LocalModel) -> int:
    """Remove a model of the hub's cache, or a quant that was made here. Returns the bytes freed.

    Raises UsageError for files of another application or of the user's own folders.
    """
    check_removable(model)
    try:
        if model.origin == "quantised":
            return _remove_quant(model)
        return hf_cache.remove(model)
    except OSError as e:
        raise LocalLLMError(
            f"{model.name} can't be removed: {e.strerror or e}", hint=f"its folder: {model.path}"
        ) from e


def _remove_quant(model: LocalModel) -> int:
    """Remove the quant, and the folder of its model if no other quant is in it."""
    files = list(model.files)
    if model.is_folder:
        files = folders.files_below(model.path)
    freed = 0
    for file in files:
        freed += file.stat().st_size
        file.unlink()
    above = model.path.parent
    if model.is_folder:
        shutil.rmtree(model.path, ignore_errors=True)
    if not folders.scan(above):
        for link in filter(Path.is_symlink, above.iterdir()):
            link.unlink()
        with suppress(OSError):  # other files are in it
            above.rmdir()
    return freed


def check_removable(model: LocalModel) -> None:
    """Raise UsageError if `model` is the starter, another application's, or in a user's own
    folder."""
    if model.origin == "starter":
        raise UsageError(
            f"{model.name} is the starter model, which is installed with localllm",
            hint="`localllm models` lists the models that can be removed",
        )
    if model.origin not in ("hf-cache", "quantised"):
        raise UsageError(
            f"{model.name} belongs to {OWNERS[model.origin]}",
            hint=f"remove it with that program: {model.path}",
        )


_Why = Literal["unfinished download", "no snapshot uses it", "no repository uses it"]


@dataclass(frozen=True, slots=True)
class Waste:
    """One file that prune removes: path, size in bytes, and the reason."""

    path: Path
    size_bytes: int
    why: _Why


def waste(*, now: float | None = None) -> list[Waste]:
    """The files that prune would remove from the hub's cache.

    Files of the last ten minutes are left out because they may be in use.
    """
    cache = app_folders.hub_cache()
    if now is None:
        now = time.time()
    limit = now - _MIN_AGE_S
    reasons: dict[Path, _Why] = dict.fromkeys(hf_cache.partials(cache), "unfinished download")
    reasons |= dict.fromkeys(hf_cache.unreferenced(cache), "no snapshot uses it")
    reasons |= dict.fromkeys(shared_blobs.unreferenced(cache), "no repository uses it")
    found = []
    for path, reason in reasons.items():
        with suppress(OSError):
            stat = path.lstat()
            if stat.st_mtime < limit:
                found.append(Waste(path, stat.st_size, reason))
    return found


def prune(found: Iterable[Waste]) -> int:
    """Remove the files found by `waste` and return the bytes freed. Failed removals are skipped."""
    cache = app_folders.hub_cache()
    freed = 0
    for item in found:
        if item.why == "no repository uses it":
            freed += shared_blobs.sweep(item.path, cache)
            continue
        shared = shared_blobs.target(item.path, cache)
        with suppress(OSError):
            item.path.unlink()
            freed += item.size_bytes
            if shared is not None:
                freed += shared_blobs.sweep(shared, cache)
    return freed


# --- verify ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of verifying one model.

    "ok": the hash matches the published one. "whole": no hash was published, but header and length
    agree. "bad": see the reason in `detail`.
    """

    model: LocalModel
    result: Literal["ok", "whole", "bad"]
    detail: str = ""


def verify(model: LocalModel, on_bytes: Callable[[int], None] | None = None) -> Checked:
    """Check every file of `model` against its published hash, or against its header without one.

    `on_bytes` receives the number of bytes read in each step.
    """
    fault = model.fault or model.mmproj_fault
    if fault:
        return Checked(model, "bad", fault)
    hashed = True
    for file in _all_files(model):
        expected = published_digest(model, file)
        if not expected:
            hashed = False
            continue
        try:
            found = digest_file(file, expected, on_bytes)
        except OSError as e:
            return Checked(model, "bad", f"{file.name} can't be read: {e.strerror or e}")
        if found != expected:
            return Checked(
                model,
                "bad",
                f"{file.name} has hash {found[:12]}…, but the published hash is {expected[:12]}…",
            )
    if not model.is_folder:
        try:
            read_header(model.path)
        except ModelFileError as e:
            return Checked(model, "bad", e.message)
    return Checked(model, "ok" if hashed else "whole")


def published_digest(model: LocalModel, file: Path) -> str:
    """The published hash of a file of `model` (sha256, or git's sha1 for a small file), or ""."""
    if model.origin == "starter":
        return starter.SHA256
    if model.origin == "ollama":
        return other_apps.ollama_digest(file)
    return hf_cache.digest_of(file)


def digest_file(file: Path, like: str, on_bytes: Callable[[int], None] | None = None) -> str:
    """The file's sha256, or its git blob sha1 if `like` has 40 digits. Raises OSError."""
    digest = new_digest(like, file.stat().st_size)
    with file.open("rb") as f:
        while True:
            block = f.read(1 << 22)
            if not block:
                break
            digest.update(block)
            if on_bytes is not None:
                on_bytes(len(block))
    return digest.hexdigest()


def new_digest(like: str, size_bytes: int) -> hashlib._Hash:
    """A hash object of the same kind as `like`.

    64 digits mean sha256, 40 digits git's sha1 of a blob of `size_bytes`. Git's form:
    https://git-scm.com/book/en/v2/Git-Internals-Git-Objects.
    """
    if len(like) == 64:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {size_bytes}\0".encode(), usedforsecurity=False)


# --- adopt ----------------------------------------------------------------------------------------


def adopt(folder: Path) -> list[LocalModel]:
    """Remember `folder` and return its models. They are listed and run in place from now on.

    Raises UsageError if it is no folder or contains no model.
    """
    target = folder.expanduser().resolve()
    if not target.is_dir():
        raise UsageError(
            f"{folder} is not a folder",
            hint="give the folder that contains .gguf files or MLX folders",
        )
    found = folders.scan(target)
    if not found:
        raise _no_model_error(target, folder)
    listed = app_folders.remembered()
    if target not in listed:
        app_folders.remember([*listed, target])
    return found


def _no_model_error(target: Path, called: Path) -> UsageError:
    """The error for a folder without a model. It lists the kinds of the GGUF files found."""
    files = folders.files_below(target)
    raw = next(filter(None, (names.raw_part_of(f.name) for f in files)), "")
    if raw:
        return UsageError(f"{called} has {raw} only in raw parts", hint=names.join_hint(raw))
    reasons = []
    for file in [f for f in files if file_kinds.is_gguf(f.name)][:6]:
        try:
            file_kinds.check_is_model(file)
            reasons.append(f"{file.name} is empty, or a part of an incomplete split")
        except ModelFileError as e:
            reasons.append(e.message)
    found = f"{called} contains no model"
    if reasons:
        found += f": {'; '.join(reasons)}"
    return UsageError(found, hint="models are .gguf files, or folders with config.json")


def forget(folder: Path) -> None:
    """Remove a folder from the list of adopted ones. Its files stay.

    Raises UsageError if it is not on the list.
    """
    target = folder.expanduser().resolve()
    listed = app_folders.remembered()
    if target not in listed:
        raise UsageError(f"{folder} is not an adopted folder", hint="see `localllm models list`")
    app_folders.remember([f for f in listed if f != target])
