"""Decides what a reference needs from the hub, before the hub is contacted."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.library import names, store, variants
from localllm.library.catalog import load_catalog
from localllm.library.installed_names import catalog_model
from localllm.library.names import ModelReference
from localllm.library.resolve import is_path, resolve
from localllm.library.types import LocalModel
from localllm.library.variants import Choose

if TYPE_CHECKING:
    from localllm_catalog.catalog import Catalog
    from localllm_catalog.types import Model


def wanted(ref: str, catalog: Catalog | None, choose: Choose | None) -> ModelReference | LocalModel:
    """The reference to request from the hub, or the model if it is already on this disk.

    The reference's `file` takes precedence over its `quant`. Raises UsageError, ModelNotFoundError.
    """
    if is_path(ref):
        return resolve(ref, catalog=catalog)
    reference = names.parse(ref)
    if reference.repo:
        return replace(reference, name="")
    if catalog is None:
        catalog = load_catalog()
    model, quant = catalog_model(ref, catalog)
    if model is None:
        # A name on this disk needs no download, and resolve's error lists similar names.
        return resolve(ref, catalog=catalog)
    packaged = [v for v in model.variants if v.repo.startswith("pypi:")]
    on_hub = tuple(v for v in model.variants if v not in packaged)
    if not on_hub:
        return resolve(ref, catalog=catalog)
    packaged_models = store.packaged()
    if packaged_models and packaged and quant in ("", packaged[0].quant):
        return packaged_models[0]
    return _offered(replace(reference, quant=quant), replace(model, variants=on_hub), choose)


def _offered(reference: ModelReference, offered: Model, choose: Choose | None) -> ModelReference:
    """The catalog model's variant: the requested one, the chosen one, or the usual one."""
    listed = [v for v in offered.variants if names.same_quant(reference.quant, v.quant)]
    if reference.quant and listed:
        variant = listed[0]
    elif choose is not None and not reference.quant:
        variant = choose(offered)
    else:
        # A quant that the catalog does not list may still be in the repository.
        variant = variants.usual_variant(offered.variants)
    target = replace(
        reference, repo=variant.repo, projector=variant.mmproj_file, name=offered.id, quant=""
    )
    if variant.is_folder:
        return target
    target = replace(target, quant=reference.quant or variant.quant)
    if variant.files and variant.exact and reference.quant in ("", variant.quant):
        return replace(target, file=variant.files[0])
    return target
