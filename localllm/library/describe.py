"""From a user's name for a model to its description.

The name is a catalog id, path, repository, address, or the name of a model on this disk. The hub is
contacted only for a repository unknown to the catalog and this disk. It then sends the listing and
one header.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.errors import DownloadError, ModelNotFoundError
from localllm.library import (
    catalog_update,
    hub,
    names,
    remote_header,
    resolve,
    store,
    variants,
)
from localllm.library.catalog import read_model
from localllm.library.installed_names import InstalledNames, catalog_model
from localllm.model_names import find

if TYPE_CHECKING:
    from localllm.library.hub import Listing
    from localllm.library.variants import Selection
    from localllm_catalog.catalog import Catalog
    from localllm_catalog.types import Model, Variant

_CONFIG = "config.json"
_LARGEST_CONFIG = 4 << 20


def describe(reference: str, catalog: Catalog, *, offline: bool = False) -> tuple[Model, str]:
    """The named model, with the matching files as its variants, and the requested quant.

    The quant is "" if any will do. Raises ModelNotFoundError (also for a missing quant),
    ModelFileError, DownloadError and UsageError.
    """
    reference = reference.strip()
    known, quant = catalog_model(reference, catalog)
    if known is not None:
        names.check_quant(known, quant)
        return known, quant
    local = resolve.by_path(reference)
    if local is None:
        asked = names.parse(reference)
        found = _of_catalog(asked, catalog) if asked.repo else None
        if found is not None:
            return found, asked.quant
        here = find(reference, InstalledNames(store.scan(), catalog).rules).models
        if here:
            local = resolve.best_of(here)
    if local is not None:
        return read_model(local.path, known=catalog.recognise(local.name, local.path.name)), ""
    if not asked.repo:
        near = catalog.suggest(asked.name)
        if near:
            hint = f"did you mean {', '.join(near)}?"
        else:
            hint = "see `localllm models list`, or name a repository: org/name"
        raise ModelNotFoundError(
            f"neither the catalog nor this disk has a model {reference!r}", hint=hint
        )
    if offline or hub.is_offline():
        named = f"{asked.repo} in {asked.quant}" if asked.quant else asked.repo
        raise ModelNotFoundError(
            f"neither the catalog nor this disk knows {named}",
            hint="without --offline and HF_HUB_OFFLINE the hub is asked",
        )
    return _of_hub(asked, catalog), asked.quant


def _of_catalog(asked: names.ModelReference, catalog: Catalog) -> Model | None:
    """The model with those files that the catalog lists in this repository.

    None if the catalog does not know the requested file or quant. A model's own repository, with
    its unconverted weights, means all of the model's files.
    """
    repo = asked.repo.lower()
    if asked.revision:
        return None
    for model in catalog.models:
        there = tuple(v for v in model.variants if v.repo.lower() == repo and _is_asked(v, asked))
        if there:
            return replace(model, variants=there)
        if (
            model.hf_repo.lower() == repo
            and not asked.file
            and any(_is_asked(v, asked) for v in model.variants)
        ):
            return model
    return None


def _is_asked(variant: Variant, asked: names.ModelReference) -> bool:
    if asked.file:
        stem = names.stem_of(asked.file)
        return any(names.stem_of(file) == stem for file in variant.files)
    return not asked.quant or names.same_quant(asked.quant, variant.quant)


def _of_hub(asked: names.ModelReference, catalog: Catalog) -> Model:
    """The current files of a repository, with the sizes of its listing.

    Shapes come from the catalog if it recognises the name, else from a header or a config.
    """
    listing = hub.list_files(asked.repo, asked.revision)
    there = variants.selections(listing)
    if asked.file or asked.quant:
        wanted = variants.pick(
            listing, file=asked.file, quant=asked.quant, described=None, choose=None
        )
        there = [s for s in there if s.quant == wanted.quant and (not asked.file or s == wanted)]
    if not there:
        # raises the error that explains why no file is usable
        variants.pick(listing, described=None, choose=None)
    known = catalog.recognise(listing.repo)
    # For an unknown model, only the header of the smallest file is fetched.
    if known is not None:
        whole = known
    elif there[0].format.is_folder:
        whole = _of_config(listing, there[0])
    else:
        whole = variants.model_of(listing, there)
    found = tuple(
        variants.listed(s, listing)
        for s in there
        if known is None or asked.file or catalog_update.is_of(known, s)
    )
    if not found:
        raise DownloadError(
            f"{listing.repo} holds no files of {whole.name}",
            hint="name one of its files by its address",
        )
    return replace(whole, variants=found)


def _of_config(listing: Listing, selection: Selection) -> Model:
    from localllm_catalog import from_hf
    from localllm_catalog.errors import CatalogError

    file = listing.get(_CONFIG)
    if file is None or file.size_bytes > _LARGEST_CONFIG:
        raise DownloadError(f"{listing.repo} has no {_CONFIG} that could be read")
    try:
        with remote_header.opener(anonymous=listing.anonymous) as open_source:
            source = open_source(hub.file_url(listing, _CONFIG))
            text = source.read(0, file.size_bytes).decode("utf-8", "replace")
        sizes = {f.name: f.size_bytes for f in selection.files if f.name.endswith(".safetensors")}
        return from_hf.model_from_config(json.loads(text), sizes, repo=listing.repo)
    except (CatalogError, ValueError) as e:
        raise DownloadError(
            f"{listing.repo} can't be read as a model: {e}", hint=getattr(e, "hint", None)
        ) from e
