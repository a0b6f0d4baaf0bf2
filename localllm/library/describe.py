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
        wanted_reference = names.parse(reference)
        found = _of_catalog(wanted_reference, catalog) if wanted_reference.repo else None
        if found is not None:
            return found, wanted_reference.quant
        installed = find(reference, InstalledNames(store.scan(), catalog).rules).models
        if installed:
            local = resolve.best_of(installed)
    if local is not None:
        return read_model(local.path, known=catalog.recognise(local.name, local.path.name)), ""
    if not wanted_reference.repo:
        closest = catalog.suggest(wanted_reference.name)
        if closest:
            hint = f"did you mean {', '.join(closest)}?"
        else:
            hint = "see `localllm models list`, or give a repository: org/name"
        raise ModelNotFoundError(
            f"no model in the catalog or on this disk is called {reference!r}", hint=hint
        )
    if offline or hub.is_offline():
        named = (
            f"{wanted_reference.repo} in {wanted_reference.quant}"
            if wanted_reference.quant
            else wanted_reference.repo
        )
        raise ModelNotFoundError(
            f"neither the catalog nor this disk has {named}",
            hint="omit --offline and unset HF_HUB_OFFLINE to look it up on the hub",
        )
    return _of_hub(wanted_reference, catalog), wanted_reference.quant


def _of_catalog(wanted_reference: names.ModelReference, catalog: Catalog) -> Model | None:
    """The model with those files that the catalog lists in this repository.

    None if the catalog does not know the requested file or quant. A model's own repository, with
    its unconverted weights, means all of the model's files.
    """
    repo = wanted_reference.repo.lower()
    if wanted_reference.revision:
        return None
    for model in catalog.models:
        selections = tuple(
            v
            for v in model.variants
            if v.repo.lower() == repo and _matches_reference(v, wanted_reference)
        )
        if selections:
            return replace(model, variants=selections)
        if (
            model.hf_repo.lower() == repo
            and not wanted_reference.file
            and any(_matches_reference(v, wanted_reference) for v in model.variants)
        ):
            return model
    return None


def _matches_reference(variant: Variant, wanted_reference: names.ModelReference) -> bool:
    if wanted_reference.file:
        stem = names.stem_of(wanted_reference.file)
        return any(names.stem_of(file) == stem for file in variant.files)
    return not wanted_reference.quant or names.same_quant(wanted_reference.quant, variant.quant)


def _of_hub(wanted_reference: names.ModelReference, catalog: Catalog) -> Model:
    """The current files of a repository, with the sizes of its listing.

    Shapes come from the catalog if it recognises the name, else from a header or a config.
    """
    listing = hub.list_files(wanted_reference.repo, wanted_reference.revision)
    selections = variants.selections(listing)
    if wanted_reference.file or wanted_reference.quant:
        wanted = variants.pick(
            listing,
            file=wanted_reference.file,
            quant=wanted_reference.quant,
            described=None,
            choose=None,
        )
        selections = [
            s
            for s in selections
            if s.quant == wanted.quant and (not wanted_reference.file or s == wanted)
        ]
    if not selections:
        # raises the error that explains why no file is usable
        variants.pick(listing, described=None, choose=None)
    known = catalog.recognise(listing.repo)
    # For an unknown model, only the header of the smallest file is fetched.
    if known is not None:
        model = known
    elif selections[0].format.is_folder:
        model = _of_config(listing, selections[0])
    else:
        model = variants.model_of(listing, selections)
    found = tuple(
        variants.listed(s, listing)
        for s in selections
        if known is None or wanted_reference.file or catalog_update.is_of(known, s)
    )
    if not found:
        raise DownloadError(
            f"{listing.repo} has no files of {model.name}",
            hint="give the address of one of its files",
        )
    return replace(model, variants=found)


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
