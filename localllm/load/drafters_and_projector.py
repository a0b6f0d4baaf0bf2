"""Choose the drafter and the image projector that are loaded with a model.

A drafter is n-gram lookup, the model's own draft heads, a second model, or a drafter trained for
the model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from localllm import json_store
from localllm.engine.messages import DRAFT_MODES
from localllm.errors import DoesNotFitError, ModelFileError, UnsupportedError
from localllm.library import hf_cache
from localllm.library.catalog import OpenedModel, open_model, read_header, readable_header
from localllm.library.resolve import resolve
from localllm.library.types import LocalModel
from localllm.planner.projector import projector_bytes, reads_sounds
from localllm.planner.types import CompanionDrafter
from localllm.settings import Settings
from localllm_backends.contract import BackendFailure
from localllm_backends.drafter_config import drafter_config
from localllm_catalog.catalog import Catalog
from localllm_catalog.gguf import GgufHeader

if TYPE_CHECKING:
    from localllm_backends.backend_type import BackendType

# Header keys of models with a sliding window or a recurrent state.
_STATE_KEYS = (
    "attention.sliding_window",
    "ssm.state_size",
    "full_attention_interval",
    "shortconv.l_cache",
)
_ASSISTANT = "gemma4-assistant"
# Entries of a folder that are looked at.
_MAX_ENTRIES = 1000
_DRAFTER_WORD = re.compile(r"[-_.](dflash|dspark|eagle-?3|speculator)")
_DRAFTER_ARCHITECTURES = ("eagle3", "dflash", _ASSISTANT)


@dataclass(frozen=True)
class ChosenDrafter:
    """The drafter that is loaded with a model.

    `mode`: the engine's drafting mode.
    `second`: a second model that drafts.
    `companion`: a trained drafter.
    `companion_found`: the companion was not requested by name but found next to the model or in its
    own file ("mtp"), so it may be left out.
    """

    mode: str = "auto"
    second: OpenedModel | None = None
    companion: CompanionDrafter | None = None
    companion_found: bool = False


def chosen_drafter(opened: OpenedModel, catalog: Catalog, settings: Settings) -> ChosenDrafter:
    """Resolve the `draft` setting for an opened model.

    Raises UnsupportedError if the model lacks the requested draft heads, or if the drafter was
    trained for another model. For a second model it raises what `library.resolve` raises.
    """
    draft = settings.value("draft")
    header = opened.header
    # The weights of an MLX folder are only known after it is loaded.
    if draft == "mtp" and header:
        heads = header.integer(f"{header.architecture}.nextn_predict_layers")
        if not heads:
            raise UnsupportedError(
                f"--draft mtp: {opened.local.name} has no MTP "
                "heads (no nextn_predict_layers in its header)",
                hint="use --draft auto, which drafts by n-gram "
                "lookup, or a model file with MTP heads",
            )
    if draft == "auto":
        return _automatic_drafter(opened, catalog)
    if draft in DRAFT_MODES:
        return ChosenDrafter(draft)
    companion = companion_at(Path(draft)) or _in_hub_cache(draft)
    if companion is not None:
        reason = _why_unfit(companion, opened)
        if reason is not None:
            hint = "use the drafter published for this model, or --draft auto"
            raise UnsupportedError(f"--draft {Path(draft).name}: {reason}", hint=hint)
        return ChosenDrafter(companion=companion)
    second_model = resolve(draft)
    return ChosenDrafter(second=open_model(second_model, catalog))


def companion_at(path: Path) -> CompanionDrafter | None:
    """Return the trained drafter in this file or folder, or None if it is of another kind or
    missing."""
    if path.is_dir():
        return _companion_in(path)
    if path.suffix != ".gguf" or not path.is_file():
        return None
    header = readable_header(path)
    if header is None or header.architecture not in _DRAFTER_ARCHITECTURES:
        return None
    kind = header.architecture
    target_width = header.integer("eagle3.target_hidden_size")
    target_width = target_width or header.integer(f"{kind}.embedding_length_out")
    target_width = target_width or header.integer(f"{kind}.embedding_length")
    return CompanionDrafter(
        kind=kind,
        path=str(path),
        file_bytes=path.stat().st_size,
        kv_elements=_kv_elements(header),
        width=target_width,
        block=header.integer(f"{kind}.block_size"),
    )


def _in_hub_cache(repo: str) -> CompanionDrafter | None:
    """Return the trained drafter of this repository, if it was downloaded, or None."""
    from localllm.library import app_folders, names

    if not names.safe_repo(repo):
        return None
    snapshots = hf_cache.repo_folder(app_folders.hub_cache(), repo) / "snapshots"
    for config in sorted(snapshots.glob("*/config.json")):
        companion = companion_at(config.parent)
        if companion is not None:
            return companion
    return None


def _companion_in(folder: Path) -> CompanionDrafter | None:
    """Return the trained drafter in a folder with config.json and safetensors, or None."""
    config = drafter_config(json_store.read(folder / "config.json"))
    weights = [file for file in folder.glob("model*.safetensors") if file.is_file()]
    if config is None or not weights:
        return None
    return CompanionDrafter(
        kind=config.kind,
        path=str(folder),
        file_bytes=sum(file.stat().st_size for file in weights),
        kv_elements=config.kv_elements,
        width=config.width,
        block=config.block,
        is_folder=True,
    )


def _kv_elements(header: GgufHeader) -> int:
    """Elements in the KV of a trained drafter, per token."""
    kind = header.architecture
    if kind == _ASSISTANT:
        return 0  # it reads the model's own KV
    n_heads = header.integer(f"{kind}.attention.head_count")
    n_kv_heads = header.integer(f"{kind}.attention.head_count_kv") or n_heads
    head_dim = header.integer(f"{kind}.attention.key_length")
    if not head_dim:
        head_dim = header.integer(f"{kind}.embedding_length") // max(1, n_heads)
    n_layers = max(1, header.integer(f"{kind}.block_count"))
    return 2 * n_kv_heads * head_dim * n_layers


def _why_unfit(companion: CompanionDrafter, opened: OpenedModel) -> str | None:
    """Return why this drafter can't belong to the model, or None if the headers show no
    conflict."""
    header = opened.header
    name = opened.local.name
    if opened.local.is_folder and not companion.is_folder:
        return "it is a GGUF file, which drafts only for a GGUF file"
    if companion.is_folder and not opened.local.is_folder:
        return "it is a folder of safetensors, which drafts only for a model in such a folder"
    width = 0
    if header is not None:
        width = header.integer(f"{header.architecture}.embedding_length")
    elif opened.model is not None:
        width = opened.model.hidden_size
    if width in (0, companion.width):
        return None
    return (
        "it was trained for a model with a hidden size "
        f"of {companion.width:,}, but {name} has {width:,}"
    )


def _automatic_drafter(opened: OpenedModel, catalog: Catalog) -> ChosenDrafter:
    """Return the smallest trained drafter that fits and is next to the model or was downloaded for
    it.

    On llama.cpp, models with sliding windows or recurrent states get no trained drafter, because
    their memory can only be stored in parts without one.
    """
    header = opened.header
    is_stateless = header is not None and not _is_stateful(header)
    local = opened.local
    if not (local.is_folder or is_stateless):
        return ChosenDrafter()
    if local.is_folder:
        files = _folders_beside(local)
    else:
        files = [path for kind, path in local.companions if kind == "drafter"]
    if not files:
        files = hf_cache.drafters_here((local.repo, local.name), catalog)
    fitting = []
    for file in files:
        companion = companion_at(file)
        if companion is not None and _why_unfit(companion, opened) is None:
            fitting.append(companion)
    if not fitting:
        return ChosenDrafter()
    smallest = min(fitting, key=attrgetter("file_bytes"))
    return ChosenDrafter(companion=smallest, companion_found=True)


def _is_stateful(header: GgufHeader) -> bool:
    """Return whether a model has sliding windows or recurrent states, by its header."""
    return any(f"{header.architecture}.{key}" in header.metadata for key in _STATE_KEYS)


def _folders_beside(local: LocalModel) -> list[Path]:
    """Return folders that may hold a drafter for the MLX model `local`.

    These are the folders in its own folder, and those next to it whose names begin alike, such as
    Qwen3-4B-DFlash-b16 next to Qwen3-4B-4bit.
    """
    folders = []
    try:
        folders = [path for path in islice(local.path.iterdir(), _MAX_ENTRIES) if path.is_dir()]
        for path in islice(local.path.parent.iterdir(), _MAX_ENTRIES):
            word = _DRAFTER_WORD.search(path.name.lower())
            if word and local.path.name.lower().startswith(path.name[: word.start()].lower()):
                folders.append(path)
    except OSError:
        return folders
    return folders


# -- media -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MediaProjector:
    """The projector that lets a model read images, sounds, or both.

    `file`: the file to load (None: no projector).
    `need_bytes`: the memory it needs.
    `why_not`: the reason if no projector is used ("" if the model has none).
    `audio`: it reads sounds.
    """

    file: Path | None = None
    need_bytes: int = 0
    why_not: str = ""
    audio: bool = False


def projector_for(local: LocalModel, engine: BackendType, settings: Settings) -> MediaProjector:
    """Return the projector of `local`, subject to the `images` setting and the engine.

    Raises UnsupportedError if images were requested but are not available.
    """
    images = settings.value("images")
    if local.is_folder:
        projector = _own_projector(local, engine, settings)
    else:
        projector = _projector_of(local, engine)
    if projector is None:
        if images == "on":
            raise UnsupportedError(
                f"--images on: there is no image projector for {local.name}",
                hint="`localllm pull` downloads one (a file "
                "mmproj-*.gguf) if the repository has it",
            )
        return MediaProjector()
    if images == "off":
        return MediaProjector(why_not="switched off (--images off)")
    if projector.why_not and images == "on":
        raise UnsupportedError(f"--images on: {projector.why_not}")
    return projector


def _own_projector(
    local: LocalModel, engine: BackendType, settings: Settings
) -> MediaProjector | None:
    """Return the projector in the model's own files, or None."""
    try:
        need_bytes = engine.image_bytes(str(local.path))
    except BackendFailure as e:
        return MediaProjector(why_not=str(e))
    if need_bytes and settings.value("workers"):
        return MediaProjector(
            why_not="several machines share this model, but only one could read images"
        )
    if need_bytes:
        return MediaProjector(local.path, need_bytes)
    return None


def _projector_of(local: LocalModel, engine: BackendType) -> MediaProjector | None:
    """Return the projector in a separate file next to the model, or None."""
    if local.mmproj is None:
        return None
    why_not = engine.reads_images()
    if why_not is not None:
        return MediaProjector(why_not=why_not)
    if local.mmproj_fault:
        return MediaProjector(why_not=f"{local.mmproj.name}: {local.mmproj_fault}")
    try:
        header = read_header(local.mmproj)
        size = local.mmproj.stat().st_size
    except (ModelFileError, OSError) as e:
        return MediaProjector(why_not=str(e))
    need_bytes = projector_bytes(header.metadata, size)
    return MediaProjector(local.mmproj, need_bytes, audio=reads_sounds(header.metadata))


def without_projector(
    projector: MediaProjector, settings: Settings, free_bytes: int
) -> MediaProjector:
    """Return no projector, because only `free_bytes` remain after the model is loaded.

    Raises DoesNotFitError if images were requested.
    """
    why_not = (
        f"the image projector needs {projector.need_bytes / 1e9:.1f} GB, but only "
        f"{max(0, free_bytes) / 1e9:.1f} GB are left"
    )
    if settings.value("images") == "on":
        raise DoesNotFitError(
            f"--images on: {why_not}",
            hint="use a smaller --context, or a smaller quant of the model",
        )
    return MediaProjector(why_not=why_not)
