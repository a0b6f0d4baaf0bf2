"""Find models and machines by name for `recommend`, `pull` and the chat's models screen."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from localllm.device.types import Device
    from localllm.library.types import LocalModel
    from localllm.planner.starting_settings import Overrides
    from localllm.planner.types import Plan
    from localllm_catalog.catalog import Catalog
    from localllm_catalog.types import Model, Variant


def device_named(name: str | None, memory: float | None, bandwidth: float | None) -> Device:
    """Return the machine called `name` (None: this one), with another memory or bandwidth if given.

    Raises DeviceNotFoundError.
    """
    from localllm.device.detect import detect
    from localllm.device.name_lookup import resolve
    from localllm.device.overrides import overridden

    if name is not None:
        return resolve(name, memory_gb=memory, bandwidth_gbps=bandwidth)
    return overridden(detect(), memory_gb=memory, bandwidth_gbps=bandwidth)


def machine_of(
    name: str | None, memory_gb: float | None, catalog: Catalog
) -> tuple[Device, Overrides]:
    """Return a machine (None: this one) and the overrides for plans on it.

    `memory_gb` replaces its memory size if given. Raises DeviceNotFoundError.
    """
    device = device_named(name, memory_gb, None)
    return device, overrides_for(device, catalog)


def overrides_for(device: Device, catalog: Catalog) -> Overrides:
    """Return the speeds measured on `device`, and the engines of this installation."""
    from localllm.load import measurements
    from localllm.planner.starting_settings import Overrides
    from localllm_backends import registry

    records = [] if device.simulated else measurements.load()
    measured = measurements.for_planner(records, device.name, catalog.by_id)
    return Overrides(measured=measured, backends=tuple(registry.backends()))


def of_quant(plans: list[Plan], quant: str) -> list[Plan]:
    """Filter `plans` by quant ("" = all).

    Raises ModelNotFoundError if this machine's engines read only other quants of the model.
    """
    from localllm.errors import ModelNotFoundError
    from localllm.library.names import same_quant

    found = [p for p in plans if not quant or same_quant(quant, p.variant.quant)]
    if plans and not found:
        listed = ", ".join(dict.fromkeys(p.variant.quant for p in plans))
        raise ModelNotFoundError(
            f"no engine for this machine reads {plans[0].model.name} in {quant}",
            hint=f"it reads {listed}",
        )
    return found


def variant_choice(ref: str) -> Callable[[Model], Variant] | None:
    """Return the function that chooses a variant for `ref`, or None.

    Only models of the catalog can be planned before they are downloaded.
    """
    from localllm.library.catalog import load_catalog
    from localllm.library.installed_names import catalog_model

    model, _ = catalog_model(ref, load_catalog())
    if model is not None:
        return best_variant
    return None


def best_variant(model: Model) -> Variant:
    """The best variant of `model` that fits this machine, else the smallest."""
    from localllm.device.detect import detect
    from localllm.errors import DoesNotFitError
    from localllm.planner.recommend import variants_of
    from localllm.planner.starting_settings import Overrides
    from localllm.planner.types import Workload
    from localllm_backends import registry

    plans = variants_of(
        detect(), model, Workload(), overrides=Overrides(backends=tuple(registry.backends()))
    )
    if not plans:
        raise DoesNotFitError(
            f"no engine installed here runs any published variant of {model.name}"
        )
    fitting = [p for p in plans if p.fits != "no"]
    if not fitting:
        least = min(p.memory.total_bytes for p in plans)
        raise DoesNotFitError(
            f"{model.name} needs at least {least / 1e9:.1f} GB, and this machine has "
            f"{plans[0].memory.limit_bytes / 1e9:.1f} GB usable",
            hint="name a variant to fetch it all the same: localllm pull "
            f"{model.id}:{plans[0].variant.quant}",
        )
    best = max(fitting, key=attrgetter("score", "variant.quant"))
    return best.variant


def installed_names(
    plans: Sequence[Plan], catalog: Catalog, there: list[LocalModel] | None = None
) -> dict[tuple[str, str], str]:
    """Map (model id, quant) of the plans to the names of installed models.

    `there` lists the installed models (None: search the disk).
    """
    from localllm.library.installed_names import InstalledNames
    from localllm.model_names import find

    installed = InstalledNames(there, catalog)
    if not installed.models:
        return {}
    found = {}
    for model_id, quant in {(p.model.id, p.variant.quant) for p in plans}:
        local = find(f"{model_id}:{quant}", installed.rules).first
        if local is not None:
            found[model_id, quant] = local.name
    return found


def image_readers(models: Sequence[Model]) -> tuple[Model, ...]:
    """Keep the models that can read images, with only the variants whose engine supports images."""
    from localllm.planner.projector import reads_images

    seeing = (
        replace(m, variants=tuple(v for v in m.variants if reads_images(m, v))) for m in models
    )
    return tuple(model for model in seeing if model.variants)


def image_facts(model: Model) -> str:
    """Describe image input: tokens per image, and the projector's file if the catalog lists one.

    Returns "" if the model reads no images.
    """
    if "image" not in model.modality:
        return ""
    facts = "tokens an image: not known before it is loaded"
    if model.image_tokens:
        facts = str(model.image_tokens)
    file = next((v for v in model.variants if v.mmproj_file), None)
    if file is not None:
        facts += f"; {file.mmproj_file}, {file.mmproj_bytes / 1e9:.1f} GB"
    return facts
