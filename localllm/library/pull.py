"""Downloads a model complete and verified, and only if no application has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import DownloadError, ModelFileError, ModelNotFoundError
from localllm.library import (
    file_kinds,
    hub,
    names,
    other_apps,
    store,
    targets,
    variants,
)
from localllm.library.catalog import load_catalog
from localllm.library.download_files import download, has_content
from localllm.library.hub import HubUnreachableError, Listing, Patience, RepoFile
from localllm.library.names import ModelReference
from localllm.library.resolve import resolve
from localllm.library.transfer import DownloadProgress
from localllm.library.types import LocalModel
from localllm.library.variants import Choose, Selection
from localllm_catalog.names import Format

if TYPE_CHECKING:
    from localllm_catalog.catalog import Catalog
    from localllm_catalog.types import Companion, Model

# Bytes to leave free after a download, for logs, the prefix cache and other programs.
RESERVE_BYTES = 512 << 20
# How many files are tried if headers show that the picked file is no model.
_MAX_PICKS = 8


def pull(
    ref: str,
    *,
    on_progress: Callable[[DownloadProgress], None] | None = None,
    choose: Choose | None = None,
    catalog: Catalog | None = None,
    offline: bool = False,
    mmproj: bool = False,
    reserve_bytes: int = RESERVE_BYTES,
    patience: Patience | None = None,
) -> LocalModel:
    """Return the files that `ref` names, fetching missing ones into the hub's cache.

    `ref` is a catalog id[:quant], org/name[:quant], a hub URL, or anything `resolve` finds. If it
    leaves the variant open, `choose` receives the Model with its variants and returns one that
    fits. Without `choose`, the usual variant is taken. `mmproj` also fetches the image projector.
    An interrupted download is kept, and the next call continues it. If the hub is down or limits
    us, an installed model is returned.

    Raises UsageError (malformed reference), ModelNotFoundError, ModelFileError (files that the
    engine misreads), DownloadError (hub, network, disk space, content).
    """
    progress = on_progress or _ignore_progress
    names.check_not_empty(ref)
    names.check_readable(ref)
    if offline or hub.is_offline():
        return _without_network(ref, catalog)
    wanted = targets.wanted(ref, catalog, choose)
    if isinstance(wanted, LocalModel):
        return wanted
    patience = patience or Patience.from_environment()
    progress(DownloadProgress("listing", wanted.repo, 0, 0))
    try:
        listing = hub.list_files(wanted.repo, wanted.revision, patience)
    except HubUnreachableError as e:
        try:
            return resolve(ref, catalog=catalog)
        except ModelNotFoundError:
            raise e from None
    selection = _picked(listing, wanted, catalog, choose, mmproj)
    for _ in range(_MAX_PICKS):
        other_copy = _copy_in_other_store(listing, selection)
        if other_copy is not None:
            return other_copy
        try:
            return download(
                listing, selection, wanted, progress, reserve_bytes, patience, _check_kind
            )
        except ModelFileError as e:
            listing = _without_refused(listing, selection, wanted, e)
            try:
                selection = _picked(listing, wanted, catalog, choose, mmproj)
            except DownloadError as nothing_else:
                raise DownloadError(e.message, hint=nothing_else.hint) from e
    raise DownloadError(
        f"{listing.repo} has too many files that are not models",
        hint="give the address of one file",
    )


def _without_refused(
    listing: Listing, selection: Selection, wanted: ModelReference, why: ModelFileError
) -> Listing:
    """The listing without the file that is no model.

    Raises DownloadError if the user named that file.
    """
    refused = selection.files[0].name
    if wanted.file == refused:
        raise DownloadError(why.message, hint=why.hint) from why
    return replace(listing, files=tuple(f for f in listing.files if f.name != refused))


def pull_drafter(
    companion: Companion,
    *,
    on_progress: Callable[[DownloadProgress], None] | None = None,
    patience: Patience | None = None,
) -> Path:
    """Fetch a drafter that the catalog names for a model into the hub's cache and return its file
    or folder.

    If the repository has several, the smallest is taken. Raises DownloadError (hub, network, disk
    space, content, no such file).
    """
    patience = patience or Patience.from_environment()
    listing = hub.list_files(companion.repo, "", patience)
    progress = on_progress or _ignore_progress
    if companion.folder:
        folder = variants.folder_of(listing)
        if folder is None:
            raise DownloadError(
                f"{companion.repo} holds no config.json and safetensors",
                hint=f"see {companion.url}",
            )
        named = ModelReference("", "", companion.repo)
        return download(listing, folder, named, progress, RESERVE_BYTES, patience, None).path
    files = [
        f
        for f in listing.files
        if f.name.lower().endswith(".gguf") and companion.file in ("", f.name)
    ]
    if not files:
        raise DownloadError(
            f"{companion.repo} holds no {companion.file or 'GGUF'}", hint=f"see {companion.url}"
        )
    smallest = min(files, key=attrgetter("size_bytes"))
    selection = Selection(Format.GGUF, "", (smallest,))
    wanted = ModelReference("", "", companion.repo, file=smallest.name)
    return download(listing, selection, wanted, progress, RESERVE_BYTES, patience, None).path


def _ignore_progress(_: DownloadProgress) -> None:
    """Ignore the progress of a download."""


def _picked(
    listing: Listing,
    wanted: ModelReference,
    catalog: Catalog | None,
    choose: Choose | None,
    mmproj: bool,
) -> Selection:
    def described() -> Model:
        return _described(listing, catalog)

    selection = variants.pick(
        listing, file=wanted.file, quant=wanted.quant, described=described, choose=choose
    )
    if not mmproj:
        return selection
    projector = variants.projector_of(listing, selection.files[0].name, wanted.projector)
    return replace(selection, projector=projector)


def _check_kind(partial: Path, file: RepoFile) -> None:
    """Raise ModelFileError and delete the partial download if its header shows that it is no
    model."""
    try:
        if names.is_first_part(file.name):
            file_kinds.check_is_model(partial)
    except ModelFileError as e:
        partial.unlink(missing_ok=True)
        raise ModelFileError(e.message.replace(partial.name, file.name, 1), hint=e.hint) from e


def _copy_in_other_store(listing: Listing, selection: Selection) -> LocalModel | None:
    """The same files in another application's store, or None.

    Ollama's blobs are compared by hash. Other files are compared by repository, name and size
    first, then by hash.
    """
    weights = [f for f in selection.files if f.name.lower().endswith((".gguf", ".safetensors"))]
    for model in store.scan():
        if model.origin in ("hf-cache", "starter") or (
            selection.projector and model.mmproj is None
        ):
            continue
        if len(weights) == 1 and weights[0].digest == other_apps.ollama_digest(model.path):
            return model
        if model.repo.lower() != listing.repo.lower() or len(model.files) != len(weights):
            continue
        if all(_is_installed(model.files, f) for f in weights):
            return model
    return None


def _is_installed(files: tuple[Path, ...], wanted: RepoFile) -> bool:
    """True if the published file is among these with the right content.

    llama.cpp's cache puts the repository before the file's name.
    """
    base = wanted.name.rpartition("/")[2]
    for file in files:
        if (file.name == base or file.name.endswith(f"_{base}")) and file.exists():
            return has_content(file, wanted, _ignore_bytes)
    return False


def _ignore_bytes(_: int) -> None:
    """Ignore the progress of reading a file."""


def _without_network(ref: str, catalog: Catalog | None) -> LocalModel:
    try:
        return resolve(ref, catalog=catalog)
    except ModelNotFoundError as e:
        hint = "unset HF_HUB_OFFLINE" if hub.is_offline() else "omit --offline"
        raise DownloadError(
            f"{e.message}, and offline mode prevents the download", hint=hint
        ) from e


def _described(listing: Listing, catalog: Catalog | None) -> Model:
    """The Model in a repository: the catalog's, else from the header of its smallest GGUF file.

    The header is read with range requests.
    """
    if catalog is None:
        catalog = load_catalog()
    known = catalog.recognise(listing.repo)
    if known is not None:
        return known
    return variants.model_of(
        listing,
        variants.selections(listing),
        hint=f"choose a variant: {listing.repo}:QUANT",
    )
