"""From a MODEL reference to files on this disk: a path, a name, a catalog id, a repository, or the
best at hand."""

from __future__ import annotations

import difflib
import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localllm import json_store
from localllm.errors import ModelFileError, ModelNotFoundError, UsageError
from localllm.library import file_kinds, folders, names, starter, store
from localllm.library.catalog import load_catalog, read_header
from localllm.library.types import LocalModel
from localllm.memory.system import SystemMemory
from localllm_catalog.names import Format

if TYPE_CHECKING:
    from localllm_catalog.catalog import Catalog
    from localllm_catalog.types import Model

_STARTER_NAMES = (starter.NAME, "smollm2-135m", "starter")
# Weights above this share of memory leave too little for a context and for everything else that
# runs.
_SENSIBLE_SHARE = 0.5
_NOT_CHAT = re.compile(
    "embed|rerank|reward|whisper|ocr-|-base|draft|guard|assistant-mtp", re.IGNORECASE
)


def resolve(ref: str | None, *, catalog: Catalog | None = None) -> LocalModel:
    """The files that `ref` means; None = the best model at hand (the biggest sensible chat model,
    else the starter).

    Looks at this disk only. Raises ModelNotFoundError saying what is near and how to fetch it,
    ModelFileError for a path that is no model, UsageError for a malformed reference.
    """
    if ref is None:
        return _best_at_hand()
    ref = ref.strip()
    names.check_said(ref)
    packaged = store.packaged() if ref.lower() in _STARTER_NAMES else []
    found = packaged[0] if packaged else by_path(ref)
    if found is None:
        reference = names.parse(ref)
        installed = store.scan()
        candidates = _matching(reference, installed)
        if candidates:
            found = best_of(candidates)
        else:
            found = _by_catalog(reference, installed, catalog)
    names.check_readable(found.name, found.path.name)
    return found


def find(ref: str, *, catalog: Catalog | None = None) -> list[LocalModel]:
    """Every installed model that answers to `ref` (a name, catalog id, repository, or path); never
    empty.

    Raises as `resolve` does.
    """
    installed = store.scan()
    at = by_path(ref.strip()) if "://" not in ref else None
    if at is not None:
        # A path into a store is that store's model, with what it knows of it (a published hash).
        return [next((m for m in installed if m.path.resolve() == at.path.resolve()), at)]
    reference = names.parse(ref)
    found = _matching(reference, installed)
    if not found and not reference.repo:
        found = _of_model(_catalog_model(reference, catalog), reference.quant, installed)
    return found or [resolve(ref, catalog=catalog)]


def matching(
    ref: str, installed: list[LocalModel], *, catalog: Catalog | None = None
) -> list[LocalModel]:
    """Those of `installed` that `ref` names: a name, file name, repository or catalog id, each also
    with `:quant`. For names that strangers send: no path and no address is looked at, and what
    nothing answers to is an empty list."""
    if "://" in ref:
        return []
    try:
        reference = names.parse(ref)
    except UsageError:
        return []
    found = _matching(reference, installed)
    return found or _of_model(_catalog_model(reference, catalog), reference.quant, installed)


def _catalog_model(reference: names.ModelReference, catalog: Catalog | None) -> Model | None:
    known = catalog if catalog is not None else load_catalog()
    if reference.repo:
        return known.recognise(reference.repo)
    return known.get(reference.name)


def _of_model(model: Model | None, quant: str, installed: list[LocalModel]) -> list[LocalModel]:
    """Those of `installed` that are variants of `model`, in that quant if one is given: from one of
    its repositories, or called as it is."""
    if model is None:
        return []
    repos = {v.repo.lower() for v in model.variants} | {model.hf_repo.lower()}
    called = {names.bare(n) for n in (model.id, model.name, model.hf_repo)}
    of_quant = [m for m in installed if not quant or names.same_quant(quant, m.quant)]
    return [m for m in of_quant if m.repo.lower() in repos or called & _bare_names(m)]


def _bare_names(local: LocalModel) -> set[str]:
    return {names.bare(name) for name in (local.name, local.repo, local.path.name)}


# --- a path ---------------------------------------------------------------------------------------


def by_path(ref: str) -> LocalModel | None:
    """The model at a path, or None if `ref` is no path. `PATH:QUANT` is the file at PATH, which
    must be of that quant, or the one of that quant in the folder PATH. Raises ModelNotFoundError
    and ModelFileError for a path to none."""
    if not _exists(ref):
        path_alone, colon, quant = ref.rpartition(":")
        if colon and not set(quant) & {"/", "\\"} and is_path(path_alone) and _exists(path_alone):
            return _of_quant(Path(path_alone).expanduser(), quant)
        if is_path(ref):
            raise ModelNotFoundError(
                f"there is no file {ref!r}", hint="check the path, or see `localllm models list`"
            )
        return None
    path = Path(ref).expanduser()
    if path.is_dir():
        return _by_folder(path)
    if path.name.startswith("._"):
        file_kinds.check_is_model(path)
    whole = names.raw_part_of(path.name)
    if whole:
        raise ModelFileError(f"{path.name} is a raw part of {whole}", hint=names.join_hint(whole))
    split = names.split_of(path.name)
    if split is not None and split[1] != 1:
        path = path.with_name(names.split_parts(path.name)[0])
    found = next((m for m in folders.ggufs(_files_of(path.parent), "path") if m.path == path), None)
    if found is not None:
        return found
    if split is not None:
        raise ModelFileError(
            f"{path.name} is one of {split[2]} parts, and not all of them are there",
            hint=f"look in {path.parent}",
        )
    file_kinds.check_is_model(path)
    # A file of another name (an Ollama blob): whether it is a model is the backend's to say.
    return LocalModel(
        names.shown(path.stem or path.name),
        path,
        Format.GGUF,
        path.stat().st_size,
        names.quant_of(path.name),
        "path",
        "",
        (path,),
    )


def _files_of(folder: Path) -> list[Path]:
    return next((files for _, files in folders.walk(folder, 0)), [])


def is_path(ref: str) -> bool:
    """True for what looks like a path, or is one."""
    looks_like_one = (
        ref.startswith((".", "/", "~"))
        or "\\" in ref
        or (ref.lower().endswith(".gguf") and "/" in ref)
    )
    return "://" not in ref and (looks_like_one or _exists(ref))


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, the home of nobody ("~x"), a NUL
        return False


def _of_quant(path: Path, quant: str) -> LocalModel:
    if path.is_dir():
        there = folders.ggufs(_files_of(path), "path")
    else:
        there = [m for m in [by_path(str(path))] if m is not None]
    chosen = [m for m in there if m.quant.upper() == quant.upper()]
    if len(chosen) == 1:
        return chosen[0]
    quants = ", ".join(dict.fromkeys(m.quant or "of an unknown quant" for m in there)) or (
        "no GGUF file"
    )
    raise ModelNotFoundError(
        f"{path} is not {quant}: there is {quants}", hint="name the file alone"
    )


def _by_folder(folder: Path) -> LocalModel:
    files = _files_of(folder)
    found = folders.mlx(folder, files, "path", folder.resolve().name)
    if found is not None:
        return found
    ggufs = folders.ggufs(files, "path")
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        listed = ", ".join(m.path.name for m in ggufs[:5])
        raise ModelFileError(
            f"{folder} holds {len(ggufs)} models", hint=f"name one of them: {listed}"
        )
    raise ModelFileError(
        f"{folder} is not a model",
        hint="an MLX folder holds config.json and all its .safetensors; else name a .gguf file",
    )


# --- a name ---------------------------------------------------------------------------------------


def _matching(reference: names.ModelReference, installed: list[LocalModel]) -> list[LocalModel]:
    """Installed models that a reference names, by the strictest rule that finds any."""
    text = reference.text.lower()
    exact = [m for m in installed if text in _spellings(m)]
    if exact:
        return exact
    # "Tiny-Q8_0" means no other quant, as "tiny:Q8_0" doesn't.
    quant = reference.quant or ("" if reference.repo else names.quant_of(reference.name))
    of_quant = [m for m in installed if not quant or names.same_quant(quant, m.quant)]
    if reference.repo:
        same = [m for m in of_quant if m.repo.lower() == reference.repo.lower()]
        if reference.file:
            stem = names.stem_of(reference.file)
            same = [m for m in same if names.stem_of(m.path.name) == stem]
        return same
    wanted = names.bare(reference.name)
    return [m for m in of_quant if wanted and wanted in _bare_names(m)]


def _spellings(model: LocalModel) -> set[str]:
    spelled = {
        model.name,
        model.path.name,
        f"{model.name}.gguf",
        f"{model.repo}:{model.quant}",
        f"{model.name}:{model.quant}",
    }
    if model.origin == "ollama" and model.name.endswith(":latest"):
        spelled.add(model.name.removesuffix(":latest"))
    return {s.lower() for s in spelled}


def _by_catalog(
    reference: names.ModelReference, installed: list[LocalModel], catalog: Catalog | None
) -> LocalModel:
    known = catalog if catalog is not None else load_catalog()
    model = _catalog_model(reference, known)
    if model is not None and not reference.repo:
        candidates = _of_model(model, reference.quant, installed)
        if candidates:
            return replace(best_of(candidates), name=model.id)
        names.check_quant(model, reference.quant)
    if model is not None or reference.repo:
        raise _not_installed(reference, model, installed)
    by_lower = {m.name.lower(): m.name for m in installed}
    close = difflib.get_close_matches(reference.name.lower(), by_lower, n=2, cutoff=0.55)
    near = dict.fromkeys([*known.suggest(reference.name), *(by_lower[c] for c in close)])
    hint = (
        "see `localllm models list` for what is installed and `localllm recommend` for what to "
        "fetch"
    )
    if near:
        hint = f"did you mean {', '.join(near)}?"
    raise ModelNotFoundError(f"no model is called {reference.text!r}", hint=hint)


def _not_installed(
    reference: names.ModelReference, model: Model | None, installed: list[LocalModel]
) -> ModelNotFoundError:
    """What a model that is known, or is named with its repository, has on this disk instead."""
    what = model.name if model is not None else reference.repo
    quant = f" in {reference.quant}" if reference.quant else ""
    others = {m.quant or m.name for m in _of_model(model, "", installed)}
    hint = f"fetch it: `localllm pull {reference.text}`"
    if others:
        hint += f"; installed: {', '.join(sorted(others))}"
    return ModelNotFoundError(f"{what}{quant} is not on this disk", hint=hint)


# --- the best -------------------------------------------------------------------------------------


def _best_at_hand() -> LocalModel:
    """The biggest installed model that leaves half the memory free and has a chat template; else
    the starter."""
    candidates = [m for m in store.scan() if not _NOT_CHAT.search(m.name)]
    best = next(filter(_can_chat, _sensible(candidates)), None)
    if best is None:
        raise ModelNotFoundError(
            "no chat model is installed",
            hint="see `localllm recommend` for what fits here, then `localllm pull ID`",
        )
    return best


def best_of(candidates: list[LocalModel]) -> LocalModel:
    """One of several that answer to a name: the biggest sensible one this machine can run, else the
    smallest."""
    smallest = min(candidates, key=lambda m: (m.is_folder, m.size_bytes))
    return next(iter(_sensible(candidates)), smallest)


def _sensible(models: list[LocalModel]) -> list[LocalModel]:
    """Those that can run here and leave half of what is available now for a context and for
    whatever else runs, the biggest first."""
    has_mlx = importlib.util.find_spec("mlx_lm") is not None
    limit_bytes = (SystemMemory().available_bytes() or 0) * _SENSIBLE_SHARE
    fitting = [m for m in models if m.size_bytes <= limit_bytes and (has_mlx or not m.is_folder)]
    return sorted(fitting, key=lambda m: -m.size_bytes)


def _can_chat(model: LocalModel) -> bool:
    """True if the files carry a chat template and make text."""
    if model.origin == "starter":
        return True
    if model.is_folder:
        config = json_store.read(model.path / "tokenizer_config.json")
        return bool(config.get("chat_template")) or (model.path / "chat_template.jinja").is_file()
    try:
        header = read_header(model.path)
    except ModelFileError:
        return False
    return (
        bool(header.text("tokenizer.chat_template")) and file_kinds.of_header(model.path) == "model"
    )
