"""Downloads the files of a selection into the hub's cache: checks space, resumes, verifies,
links."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from localllm import json_store
from localllm.errors import DownloadError
from localllm.formatting import byte_size
from localllm.library import (
    app_folders,
    digests,
    folders,
    hf_cache,
    hub,
    names,
    store,
    transfer,
    variants,
)
from localllm.library.file_kinds import is_gguf
from localllm.library.hub import Listing, Patience, RepoFile
from localllm.library.names import ModelReference
from localllm.library.transfer import DownloadMeter, DownloadProgress
from localllm.library.types import LocalModel
from localllm.library.variants import Selection

if TYPE_CHECKING:
    import httpx

_CONFIG = "config.json"
CheckKind = Callable[[Path, RepoFile], None]
# The first keys of a GGUF header are within this many bytes.
_HEADER_BYTES = 1 << 20


def download(
    listing: Listing,
    selection: Selection,
    wanted: ModelReference,
    on_progress: Callable[[DownloadProgress], None],
    reserve_bytes: int,
    patience: Patience,
    check: CheckKind | None,
) -> LocalModel:
    """Fetch the missing files of `selection` and return the model.

    `check` inspects the first bytes of a GGUF file while it downloads. Raises DownloadError, and
    any error that `check` raises.
    """
    cache = app_folders.hub_cache()
    folder = hf_cache.repo_folder(cache, listing.repo)
    files = [*selection.files]
    if selection.projector is not None:
        files.append(selection.projector)
    meter = DownloadMeter(selection.total_bytes, on_progress)
    missing = [f for f in files if not _is_downloaded(folder, listing, f, meter)]
    _check_space(cache, folder, missing, reserve_bytes, listing.repo)
    if missing:
        sent = hub.headers(anonymous=listing.anonymous)
        with hub.new_client(sent, patience, hub.endpoint()) as client:
            for file in files:
                if file in missing:
                    is_model = file in selection.files and is_gguf(file.name)
                    check_file = check if is_model else None
                    _download_file(client, folder, listing, file, meter, patience, check_file)
                meter.finished(file.size_bytes)
                if selection.format.is_folder:
                    _check_small_file(folder / "snapshots" / listing.commit, listing, file.name)
    _write_ref(folder, listing, wanted.revision)
    first = selection.files[0].name
    on_progress(DownloadProgress("done", first, selection.total_bytes, selection.total_bytes))
    return _as_local(folder, listing, selection, wanted)


def _check_small_file(snapshot: Path, listing: Listing, name: str) -> None:
    """Raise DownloadError if a downloaded small file shows that the weights are of no use."""
    if name == _CONFIG:
        _check_format(snapshot / name, listing.repo)
    if name == folders.INDEX:
        listed = {file.name for file in listing.files}
        variants.check_complete(folders.shards_of(snapshot / name), listed, listing.repo)


def _check_format(config: Path, repo: str) -> None:
    """Raise DownloadError if the weights are in another program's format, before they are
    downloaded."""
    from localllm_catalog.from_hf import foreign_format

    foreign = foreign_format(json_store.read(config))
    if foreign:
        raise DownloadError(
            f"the weights of {repo} are in {foreign}, a "
            "format that neither MLX nor llama.cpp can run",
            hint="download a GGUF file of the model, or an MLX conversion (mlx-community has many)",
        )


def _is_downloaded(folder: Path, listing: Listing, file: RepoFile, meter: DownloadMeter) -> bool:
    """True if the file is here with the published content.

    A file that was modified since its last check is read and hashed again.
    """
    pointer = folder / "snapshots" / listing.commit / file.name
    try:
        named = hf_cache.digest_of(pointer) in (file.digest, "")
        return named and _has_its_content(pointer, file, meter)
    except OSError:
        return False


def _check_space(
    cache: Path, folder: Path, missing: list[RepoFile], reserve_bytes: int, repo: str
) -> None:
    """Raise DownloadError before the download if the files do not fit on the disk.

    The bytes of partial downloads count as present.
    """
    sizes = {folder / "blobs" / file.digest: file.size_bytes for file in missing}
    need = sum(
        n - min(n, hf_cache.size_of(_partial(blob)))
        for blob, n in sizes.items()
        if not blob.exists()
    )
    if not need:
        return
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise transfer.disk_error(e, cache / repo) from e
    free = shutil.disk_usage(cache).free
    if need + reserve_bytes > free:
        raise DownloadError(
            f"{repo} needs {byte_size(need)} more, beside {byte_size(reserve_bytes)} that are kept "
            f"for everything else, and the disk of {cache} has {byte_size(free)} free",
            hint="free disk space (`localllm models du`, `localllm models prune`), set HF_HOME "
            "to a bigger disk, or download a smaller quant",
        )


def _partial(blob: Path) -> Path:
    return blob.with_name(blob.name + ".incomplete")


def _download_file(
    client: httpx.Client,
    folder: Path,
    listing: Listing,
    file: RepoFile,
    meter: DownloadMeter,
    patience: Patience,
    check: CheckKind | None,
) -> None:
    """Bring one file: its blob, then the link in the snapshot.

    The blob is fetched, or verified if another program left it there.
    """
    from huggingface_hub.utils import WeakFileLock

    blob = folder / "blobs" / file.digest
    try:
        blob.parent.mkdir(parents=True, exist_ok=True)
        # huggingface-hub's own lock of this blob: two programs never fetch it at the same time
        locks = folder.parent / ".locks" / folder.name
        locks.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(locks / f"{file.digest}.lock"):
            if blob.exists() and not _has_its_content(blob, file, meter):
                _demote(blob)
            if not blob.exists():
                _fetch(client, blob, listing, file, meter, patience, check)
            _link(blob, folder / "snapshots" / listing.commit / file.name)
    except OSError as e:
        raise transfer.disk_error(e, blob) from e


def has_content(path: Path, file: RepoFile, on_bytes: Callable[[int], None]) -> bool:
    """True if the file has the published content.

    Other programs check only the length, and disks fail. `on_bytes` receives the number of bytes
    read in each step. Raises OSError.
    """
    if path.stat().st_size != file.size_bytes:
        return False
    if digests.is_known(path, file.digest):
        return True
    is_correct = store.digest_file(path, file.digest, on_bytes) == file.digest
    if is_correct:
        digests.remember(path, file.digest)
    return is_correct


def _has_its_content(blob: Path, file: RepoFile, meter: DownloadMeter) -> bool:
    have = 0

    def count(n: int) -> None:
        nonlocal have
        have += n
        meter.report("verifying", file.name, have, file.digest)

    return has_content(blob, file, count)


def _demote(blob: Path) -> None:
    """Turn a blob with wrong content into a partial download. A link is removed instead."""
    if blob.is_symlink():
        blob.unlink()  # the shared store's file belongs to huggingface-hub
        return
    os.replace(blob, _partial(blob))


def _fetch(
    client: httpx.Client,
    blob: Path,
    listing: Listing,
    file: RepoFile,
    meter: DownloadMeter,
    patience: Patience,
    check: CheckKind | None,
) -> None:
    partial = _partial(blob)
    url = hub.file_url(listing, file.name)

    checked = False

    def on_bytes(have: int, state: transfer.DownloadState) -> None:
        nonlocal checked
        meter.report(state, file.name, have, file.digest)
        if check is not None and not checked and have >= min(_HEADER_BYTES, file.size_bytes):
            checked = True
            check(partial, file)

    partial.touch()
    transfer.Fetch(client, url, file, partial, patience, on_bytes).run()
    with partial.open("rb+") as f:
        os.fsync(f.fileno())
    os.replace(partial, blob)
    digests.remember(blob, file.digest)


def _link(blob: Path, pointer: Path) -> None:
    """Link the snapshot's name to the blob with a relative link, as huggingface-hub does.

    If the file system has no links, the file itself is moved there.
    """
    pointer.parent.mkdir(parents=True, exist_ok=True)
    if pointer.is_symlink() or pointer.exists():
        pointer.unlink()
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError:
        os.replace(blob, pointer)


def _write_ref(folder: Path, listing: Listing, revision: str) -> None:
    """Point the ref of `main` (or of the requested branch) at this commit.

    Other tools then find the commit offline.
    """
    name = revision or "main"
    if name == listing.commit:
        return
    ref = folder / "refs" / name
    try:
        ref.parent.mkdir(parents=True, exist_ok=True)
        partial = ref.with_name(f".{ref.name}.{os.getpid()}")
        partial.write_text(listing.commit, encoding="ascii")
        os.replace(partial, ref)
    except OSError as e:
        raise transfer.disk_error(e, ref) from e


def _as_local(
    folder: Path, listing: Listing, selection: Selection, wanted: ModelReference
) -> LocalModel:
    snapshot = folder / "snapshots" / listing.commit
    weights = tuple(
        snapshot / f.name
        for f in selection.files
        if f.name.lower().endswith((".gguf", ".safetensors"))
    )
    if selection.format.is_folder:
        path = snapshot
        name = listing.repo.partition("/")[2]
    else:
        path = weights[0]
        name = names.stem_of(path.name)
    return LocalModel(
        wanted.name or name,
        path,
        selection.format,
        selection.weights_bytes,
        selection.quant,
        "hf-cache",
        listing.repo,
        weights,
        snapshot / selection.projector.name if selection.projector else None,
    )
