"""Brings a model to this disk, once and intact: picks the variant, checks the space, resumes, verifies, links it in."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from localllm import json_store
from localllm.errors import DownloadError, ModelFileError, ModelNotFoundError
from localllm.library import (
    app_folders,
    file_kinds,
    hf_cache,
    hub,
    names,
    other_apps,
    store,
    transfer,
    variants,
)
from localllm.library.catalog import load_catalog
from localllm.library.file_kinds import is_gguf
from localllm.library.hub import HubUnreachableError, Listing, Patience, RepoFile
from localllm.library.resolve import resolve
from localllm.library.transfer import DownloadMeter, DownloadProgress
from localllm.library.types import LocalModel
from localllm.library.variants import Choose, Selection
from localllm_catalog.names import Format

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from localllm_catalog.catalog import Catalog
    from localllm_catalog.types import Companion, Model

# Left free on the disk after a download: logs, the prefix cache and everybody else need some.
_CONFIG = "config.json"
RESERVE_BYTES = 512 << 20
_CheckKind = Callable[[Path, RepoFile], None]
# How often another file is taken, because the one that was picked by its name says that it is no model.
_MOST_PICKS = 8
# With so much of a file its header's first keys are there.
_HEADER_BYTES = 1 << 20


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
    """The files that `ref` names, fetched into the hub's cache if they are not there yet.

    `ref` is a catalog id[:quant], org/name[:quant], a hub URL, or anything `resolve` finds. Where it leaves the variant
    open, `choose` is given the Model with the variants there are and returns one (what fits); without it, the usual one
    is taken. `mmproj` brings the image projector too. An interrupt keeps what has arrived; the next call goes on there.
    When the hub is down or limits us, a model that is here already is returned.

    Raises UsageError (malformed reference), ModelNotFoundError, ModelFileError (what the engine reads wrong), DownloadError
    (hub, network, disk space, content).
    """
    say = on_progress or (lambda _: None)
    names.check_readable(ref)
    if offline or hub.is_offline():
        return _without_network(ref, catalog)
    wanted = _wanted(ref, catalog, choose)
    if isinstance(wanted, LocalModel):
        return wanted
    patience = patience or Patience.from_environment()
    say(DownloadProgress("listing", wanted.repo, 0, 0))
    try:
        listing = hub.list_files(wanted.repo, wanted.revision, patience)
    except HubUnreachableError as e:
        try:
            return resolve(ref, catalog=catalog)
        except ModelNotFoundError:
            raise e from None
    selection = _picked(listing, wanted, catalog, choose, mmproj)
    for _ in range(_MOST_PICKS):
        elsewhere = _held_elsewhere(listing, selection)
        if elsewhere is not None:
            return elsewhere
        try:
            return _bring(listing, selection, wanted, say, reserve_bytes, patience)
        except _NoModelError as e:
            if wanted.file == e.file:
                raise e.why from e
            listing = replace(listing, files=tuple(f for f in listing.files if f.name != e.file))
            try:
                selection = _picked(listing, wanted, catalog, choose, mmproj)
            except DownloadError as nothing_else:
                raise DownloadError(e.why.message, hint=nothing_else.hint) from e
    raise DownloadError(f"{listing.repo} holds too many files that are no models", hint="name one by its address")


def pull_drafter(
    companion: Companion,
    *,
    on_progress: Callable[[DownloadProgress], None] | None = None,
    patience: Patience | None = None,
) -> Path:
    """The file of a drafter that the catalog names for a model, fetched into the hub's cache; of a repository with several, the
    smallest. Raises DownloadError (hub, network, disk space, content, no such file)."""
    patience = patience or Patience.from_environment()
    listing = hub.list_files(companion.repo, "", patience)
    files = [f for f in listing.files if f.name.lower().endswith(".gguf") and companion.file in ("", f.name)]
    if not files:
        raise DownloadError(f"{companion.repo} holds no {companion.file or 'GGUF'}", hint=f"look at {companion.url}")
    smallest = min(files, key=lambda f: f.size_bytes)
    selection = Selection(Format.GGUF, "", (smallest,))
    wanted = _PullTarget(companion.repo, file=smallest.name, drafts=True)
    return _bring(listing, selection, wanted, on_progress or (lambda _: None), RESERVE_BYTES, patience).path


def drafters_here(names_of: tuple[str, ...]) -> list[Path]:
    """The drafters that the catalog names for the model of these names, as far as they are in the hub's cache."""
    model, cache = load_catalog().recognise(*names_of), app_folders.hub_cache()
    found = []
    for companion in model.companions if model is not None else ():
        snapshots = hf_cache.repo_folder(cache, companion.repo) / "snapshots"
        found += sorted(snapshots.glob(f"*/{companion.file or '*.gguf'}"))
    return found


def _picked(
    listing: Listing, wanted: _PullTarget, catalog: Catalog | None, choose: Choose | None, mmproj: bool
) -> Selection:
    selection = variants.pick(
        listing, file=wanted.file, quant=wanted.quant, described=lambda: _described(listing, catalog), choose=choose
    )
    projector = variants.projector_of(listing, selection.files[0].name, wanted.projector) if mmproj else None
    return replace(selection, projector=projector)


class _NoModelError(Exception):
    """`file`, on its way, says in its header that it is no model: `why` it is refused."""

    def __init__(self, file: str, why: DownloadError) -> None:
        super().__init__(file)
        self.file, self.why = file, why


def _held_elsewhere(listing: Listing, selection: Selection) -> LocalModel | None:
    """The same files in another application's store: by hash, and looked for by name and size first."""
    weights = [f for f in selection.files if f.name.lower().endswith((".gguf", ".safetensors"))]
    for model in store.scan():
        if model.origin in ("hf-cache", "starter") or (selection.projector and model.mmproj is None):
            continue
        if len(weights) == 1 and weights[0].digest == other_apps.ollama_digest(model.path):
            return model
        if model.repo.lower() != listing.repo.lower() or len(model.files) != len(weights):
            continue
        if all(_is_here(model.files, f) for f in weights):
            return model
    return None


def _is_here(files: tuple[Path, ...], wanted: RepoFile) -> bool:
    """Is the published file among these, whole? llama.cpp's cache puts the repository before its name."""
    base = wanted.name.rpartition("/")[2]
    held = next((f for f in files if (f.name == base or f.name.endswith(f"_{base}")) and f.exists()), None)
    if held is None or held.stat().st_size != wanted.size_bytes:
        return False
    return not wanted.digest or store.digest_file(held, wanted.digest) == wanted.digest


@dataclass(frozen=True, slots=True)
class _PullTarget:
    """A reference, as far as it is known before the hub is asked. `file` is tried first, then `quant`. `drafts`: it is for a
    drafter, no model."""

    repo: str
    quant: str = ""
    file: str = ""
    revision: str = ""
    projector: str = ""
    name: str = ""
    drafts: bool = False


def _without_network(ref: str, catalog: Catalog | None) -> LocalModel:
    try:
        return resolve(ref, catalog=catalog, offline=True)
    except ModelNotFoundError as e:
        raise DownloadError(f"{e.message}, and offline mode forbids fetching it", hint="leave --offline out") from e


def _wanted(ref: str, catalog: Catalog | None, choose: Choose | None) -> _PullTarget | LocalModel:
    if _is_local_only(ref):
        return resolve(ref, catalog=catalog)
    reference = names.parse(ref, hub_hosts=hub.hosts())
    if reference.repo:
        return _PullTarget(reference.repo, quant=reference.quant, file=reference.file, revision=reference.revision)
    known = catalog if catalog is not None else load_catalog()
    model = known.get(reference.name)
    if model is None:
        # Not the catalog's: a name on this disk needs no fetching, and resolve's error says what is near.
        return resolve(ref, catalog=known)
    packaged = [v for v in model.variants if v.repo.startswith("pypi:")]
    on_hub = tuple(v for v in model.variants if v not in packaged)
    if not on_hub:
        return resolve(ref, catalog=known)
    is_packaged = packaged and reference.quant in ("", packaged[0].quant)
    here = _of_package(ref, known) if is_packaged else None
    return here or _offered(reference, replace(model, variants=on_hub), choose)


def _offered(reference: names.ModelReference, offered: Model, choose: Choose | None) -> _PullTarget:
    """The variant of the catalog's model that was asked for, chosen, or is the usual one."""
    if reference.quant:
        listed = [v for v in offered.variants if names.same_quant(reference.quant, v.quant)]
        # A quant that the catalog does not list may still be in the repository.
        variant = listed[0] if listed else variants.usual_variant(offered)
    else:
        variant = choose(offered) if choose is not None else variants.usual_variant(offered)
    target = _PullTarget(variant.repo, projector=variant.mmproj_file, name=offered.id)
    if variant.is_folder:
        return target
    is_file = variant.files and variant.exact and reference.quant in ("", variant.quant)
    file = variant.files[0] if is_file else ""
    return replace(target, quant=reference.quant or variant.quant, file=file)


def _of_package(ref: str, catalog: Catalog) -> LocalModel | None:
    """The model where the Python package that carries it is installed: nothing to fetch."""
    try:
        found = resolve(ref, catalog=catalog)
    except ModelNotFoundError:
        return None
    return found if found.origin == "starter" else None


def _is_local_only(ref: str) -> bool:
    """A path, or a model that comes as a package: nothing to fetch."""
    if "://" in ref:
        return False
    try:
        return Path(ref).expanduser().exists() or ref.startswith(("/", "./", "../", "~"))
    except OSError:
        return False


def _described(listing: Listing, catalog: Catalog | None) -> Model:
    """The Model a repository holds: the catalog's, else what the header of its smallest GGUF says (read by range)."""
    known = (catalog if catalog is not None else load_catalog()).recognise(listing.repo)
    if known is not None:
        return known
    return variants.model_of(
        listing, variants.selections(listing), hint=f"name the variant you want: {listing.repo}:QUANT"
    )


# --- bringing it ----------------------------------------------------------------------------------------------------


def _bring(
    listing: Listing,
    selection: Selection,
    wanted: _PullTarget,
    say: Callable[[DownloadProgress], None],
    reserve_bytes: int,
    patience: Patience,
) -> LocalModel:
    cache = app_folders.hub_cache()
    folder = hf_cache.repo_folder(cache, listing.repo)
    files = [*selection.files, *([selection.projector] if selection.projector else [])]
    meter = DownloadMeter(selection.total_bytes, say)
    missing = [f for f in files if not _is_there(folder, listing, f)]
    _check_space(cache, folder, missing, reserve_bytes, listing.repo)
    if missing:
        address = hub.endpoint()
        with transfer.new_client(hub.headers(anonymous=listing.anonymous), patience, address) as client:
            for file in files:
                if file in missing:
                    model = file in selection.files and is_gguf(file.name) and not wanted.drafts
                    check = _check_kind if model else None
                    _bring_file(client, folder, listing, file, meter, patience, check)
                meter.finished(file.size_bytes)
                if file.name == _CONFIG and selection.format.is_folder:
                    _check_format(folder / "snapshots" / listing.commit / file.name, listing.repo)
    _write_ref(folder, listing, wanted.revision)
    say(DownloadProgress("done", selection.files[0].name, selection.total_bytes, selection.total_bytes))
    return _as_local(folder, listing, selection, wanted)


def _check_format(config: Path, repo: str) -> None:
    """Raises DownloadError for weights in another program's format, before they travel."""
    from localllm_catalog.from_hf import foreign_format

    foreign = foreign_format(json_store.read(config))
    if foreign:
        raise DownloadError(
            f"the weights of {repo} are in {foreign}, which neither MLX nor llama.cpp runs",
            hint="take a GGUF file of the model, or an MLX conversion (mlx-community has many)",
        )


def _is_there(folder: Path, listing: Listing, file: RepoFile) -> bool:
    pointer = folder / "snapshots" / listing.commit / file.name
    try:
        return pointer.stat().st_size == file.size_bytes and hf_cache.digest_of(pointer) in (file.digest, "")
    except OSError:
        return False


def _check_space(cache: Path, folder: Path, missing: list[RepoFile], reserve_bytes: int, repo: str) -> None:
    """Refuse before the first byte what would not fit. Partials count as brought."""
    need = 0
    for file in missing:
        blob = folder / "blobs" / file.digest
        if not blob.exists():
            partial = _partial(blob)
            need += file.size_bytes - (min(partial.stat().st_size, file.size_bytes) if partial.exists() else 0)
    if not need:
        return
    existing = next(p for p in (cache, *cache.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if need + reserve_bytes > free:
        raise DownloadError(
            f"{repo} needs {need / 1e9:.2f} GB more, and the disk of {cache} has {free / 1e9:.2f} GB free",
            hint="make room (`localllm models du`, `localllm models prune`), set HF_HOME to a bigger disk, or take a smaller quant",
        )


def _partial(blob: Path) -> Path:
    return blob.with_name(blob.name + ".incomplete")


def _bring_file(
    client: httpx.Client,
    folder: Path,
    listing: Listing,
    file: RepoFile,
    meter: DownloadMeter,
    patience: Patience,
    check: _CheckKind | None,
) -> None:
    """One file: its blob (fetched, or checked if another program left it there), then the link in the snapshot."""
    blob = folder / "blobs" / file.digest
    try:
        blob.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder, file.digest):
            if blob.exists() and not _keeps_its_name(blob, file, meter):
                _demote(blob)
            if not blob.exists():
                _fetch(client, blob, listing, file, meter, patience, check)
            _link(blob, folder / "snapshots" / listing.commit / file.name)
    except OSError as e:
        raise transfer.disk_trouble(e, blob) from e


def _keeps_its_name(blob: Path, file: RepoFile, meter: DownloadMeter) -> bool:
    """True if a blob we did not bring has the content its name promises (others check lengths only)."""
    if blob.stat().st_size != file.size_bytes:
        return False
    have = 0

    def count(n: int) -> None:
        nonlocal have
        have += n
        meter.report("verifying", file.name, have, file.digest)

    return store.digest_file(blob, file.digest, count) == file.digest


def _demote(blob: Path) -> None:
    """A blob with wrong content becomes a partial if it is only too short, and goes otherwise."""
    if blob.is_symlink():
        blob.unlink()  # the shared store's file is huggingface-hub's to remove
        return
    os.replace(blob, _partial(blob))


def _fetch(
    client: httpx.Client,
    blob: Path,
    listing: Listing,
    file: RepoFile,
    meter: DownloadMeter,
    patience: Patience,
    check: _CheckKind | None,
) -> None:
    partial = _partial(blob)
    url = hub.file_url(listing, file.name)

    checked = False

    def on_bytes(have: int, state: transfer.State) -> None:
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


def _check_kind(partial: Path, file: RepoFile) -> None:
    """Raises _NoModelError, and lets the bytes go, where what has arrived says that it is no model."""
    try:
        if names.is_first_part(file.name):
            file_kinds.check_is_model(partial)
    except ModelFileError as e:
        partial.unlink(missing_ok=True)
        raise _NoModelError(file.name, DownloadError(e.message.replace(partial.name, file.name, 1), hint=e.hint)) from e


@contextmanager
def _lock(folder: Path, digest: str) -> Iterator[None]:
    """huggingface-hub's own lock of this blob: two programs never fetch it at the same time."""
    from huggingface_hub.utils import WeakFileLock

    place = folder.parent / ".locks" / folder.name
    place.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(place / f"{digest}.lock"):
        yield


def _link(blob: Path, pointer: Path) -> None:
    """Point the snapshot's name at the blob, as huggingface-hub does: a relative link, or the file itself without links."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    if pointer.is_symlink() or pointer.exists():
        pointer.unlink()
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError:
        os.replace(blob, pointer)


def _write_ref(folder: Path, listing: Listing, revision: str) -> None:
    """Let `main` (or the branch asked for) name this commit, so that other tools find it offline."""
    name = revision or "main"
    if name == listing.commit:
        return
    ref = folder / "refs" / name
    try:
        ref.parent.mkdir(parents=True, exist_ok=True)
        if not ref.is_file() or ref.read_text(encoding="ascii", errors="replace") != listing.commit:
            partial = ref.with_name(f".{ref.name}.{os.getpid()}")
            partial.write_text(listing.commit, encoding="ascii")
            os.replace(partial, ref)
    except OSError as e:
        raise transfer.disk_trouble(e, ref) from e


def _as_local(folder: Path, listing: Listing, selection: Selection, wanted: _PullTarget) -> LocalModel:
    snapshot = folder / "snapshots" / listing.commit
    weights = tuple(snapshot / f.name for f in selection.files if f.name.lower().endswith((".gguf", ".safetensors")))
    is_folder = selection.format.is_folder
    return LocalModel(
        wanted.name or (listing.repo.partition("/")[2] if is_folder else names.stem_of(weights[0].name)),
        snapshot if is_folder else weights[0],
        selection.format,
        selection.weights_bytes,
        selection.quant,
        "hf-cache",
        listing.repo,
        weights,
        snapshot / selection.projector.name if selection.projector else None,
    )
