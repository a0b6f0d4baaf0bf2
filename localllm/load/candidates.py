"""Find models and machines by name for `recommend`, `pull` and the chat's models screen."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from localllm import paths

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from localllm.device.types import Device
    from localllm.library.types import LocalModel
    from localllm.planner.speed import Measured
    from localllm.planner.starting_settings import Overrides
    from localllm.planner.types import Plan
    from localllm_catalog.catalog import Catalog
    from localllm_catalog.types import Model, Variant


def device_named(name: str | None, memory: float | None, bandwidth: float | None) -> Device:
    """Return the machine called `name` (None: this one), with another memory or bandwidth if given.

    Raises DeviceNotFoundError.
    """
    if name is not None:
        from localllm.device.name_lookup import resolve

        described = resolve(name, memory_gb=memory, bandwidth_gbps=bandwidth)
        return _with_setup_accelerator(described)
    from localllm.device.detect import detect
    from localllm.device.overrides import overridden

    return overridden(detect(), memory_gb=memory, bandwidth_gbps=bandwidth)


# Cards that only ROCm drives.
_ROCM_ONLY_CARDS = "Instinct"


def _with_setup_accelerator(device: Device) -> Device:
    """Return a described machine with the accelerator of the build that `localllm setup` installs.

    Where two builds drive the same GPU, that is the one that needs only the installed driver.
    """
    from localllm.device.accelerators import KINDS

    accelerator = KINDS[device.accelerator].lighter
    if accelerator is None or _ROCM_ONLY_CARDS in device.name:
        return device
    cards = tuple(replace(card, accelerator=accelerator) for card in device.cards)
    return replace(device, accelerator=accelerator, cards=cards)


def device_and_overrides(
    name: str | None, memory_gb: float | None, catalog: Catalog
) -> tuple[Device, Overrides]:
    """Return a machine (None: this one) and the overrides for plans on it.

    `memory_gb` replaces its memory size if given. Raises DeviceNotFoundError.
    """
    device = device_named(name, memory_gb, None)
    return device, overrides_for(device, catalog)


def overrides_for(device: Device, catalog: Catalog) -> Overrides:
    """Return the speeds measured on `device`, the engines of this installation, and the models that
    its llama.cpp can't read."""
    from localllm.planner.starting_settings import Overrides
    from localllm_backends import registry

    engines = tuple(registry.backends())
    by_others = figures_of_others(device, catalog.by_id)
    if device.simulated:
        return Overrides(measured=by_others, backends=engines)
    from localllm.load import measurements, readable_models

    measured = measurements.for_planner(measurements.load(), device.name, catalog.by_id)
    measured += by_others
    too_new = readable_models.too_new(catalog.models)
    return Overrides(measured=measured, backends=engines, too_new=too_new)


def figures_of_others(device: Device, models: Mapping[str, Model]) -> tuple[Measured, ...]:
    """Return the speeds that others measured on machines like `device`, if this machine has any."""
    if not paths.shared_rows_file().exists():  # the import takes longer than most plans
        return ()
    from localllm.load import measured_by_others

    return measured_by_others.for_planner(device, models)


def plans_of_quant(plans: list[Plan], quant: str) -> list[Plan]:
    """Filter `plans` by quant ("" = all).

    Raises ModelNotFoundError if this machine's engines read only other quants of the model.
    """
    from localllm.errors import ModelNotFoundError
    from localllm.library.names import same_quant

    matching = [p for p in plans if not quant or same_quant(quant, p.variant.quant)]
    if plans and not matching:
        readable_quants = ", ".join(dict.fromkeys(p.variant.quant for p in plans))
        raise ModelNotFoundError(
            f"no engine for this machine can read {plans[0].model.name} in {quant}",
            hint=f"readable variants: {readable_quants}",
        )
    return matching


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
            f"no engine installed here can run any published variant of {model.name}"
        )
    fitting = [p for p in plans if p.fits != "no"]
    if not fitting:
        min_bytes = min(p.memory.total_bytes for p in plans)
        raise DoesNotFitError(
            f"{model.name} needs at least {min_bytes / 1e9:.1f} GB, but this machine has "
            f"{plans[0].memory.limit_bytes / 1e9:.1f} GB usable",
            hint="give a variant to download it anyway: localllm pull "
            f"{model.id}:{plans[0].variant.quant}",
        )
    best = max(fitting, key=attrgetter("score", "variant.quant"))
    return best.variant


def installed_names(
    plans: Sequence[Plan], catalog: Catalog, installed_models: list[LocalModel] | None = None
) -> dict[tuple[str, str], str]:
    """Map (model id, quant) of the plans to the names of installed models.

    `installed_models` lists the installed models (None: search the disk).
    """
    from localllm.library.installed_names import InstalledNames
    from localllm.model_names import find

    installed = InstalledNames(installed_models, catalog)
    if not installed.models:
        return {}
    names = {}
    for model_id, quant in {(p.model.id, p.variant.quant) for p in plans}:
        local = find(f"{model_id}:{quant}", installed.rules).first
        if local is not None:
            names[model_id, quant] = local.name
    return names


def image_readers(models: Sequence[Model]) -> tuple[Model, ...]:
    """Keep the models that can read images, with only the variants whose engine supports images."""
    from localllm.planner.projector import reads_images

    return _readers(models, reads_images)


def audio_readers(models: Sequence[Model]) -> tuple[Model, ...]:
    """Keep the models that can read sounds, with only the variants whose engine supports audio."""
    from localllm.planner.projector import reads_audio

    return _readers(models, reads_audio)


def _readers(
    models: Sequence[Model], can_read: Callable[[Model, Variant], bool]
) -> tuple[Model, ...]:
    readers = []
    for model in models:
        variants = tuple(v for v in model.variants if can_read(model, v))
        if variants:
            readers.append(replace(model, variants=variants))
    return tuple(readers)


def media_readers(models: Sequence[Model], overrides: Overrides) -> tuple[Model, ...]:
    """Keep the models and variants that read the media that are wanted."""
    readers = tuple(models)
    if overrides.sees:
        readers = image_readers(readers)
    if overrides.hears:
        readers = audio_readers(readers)
    return readers


def projector_facts(plan: Plan) -> str:
    """Describe what a plan's projector reads, its size, and the tokens per image."""
    from localllm.planner.projector import reads_audio

    facts = image_facts(plan.model)
    media = ["images"] if facts else []
    if reads_audio(plan.model, plan.variant):
        media.append("sounds")
    size = plan.memory.projector_bytes / 1e9
    text = f"{' and '.join(media)}: {size:.1f} GB for the projector"
    return f"{text}; {facts}" if facts else text


def image_facts(model: Model) -> str:
    """Describe image input: tokens per image, and the projector's file if the catalog lists one.

    Returns "" if the model reads no images.
    """
    if "image" not in model.modality:
        return ""
    facts = "tokens per image: unknown until it is loaded"
    if model.image_tokens:
        facts = str(model.image_tokens)
    with_projector = next((v for v in model.variants if v.mmproj_file), None)
    if with_projector is not None:
        facts += f"; {with_projector.mmproj_file}, {with_projector.mmproj_bytes / 1e9:.1f} GB"
    return facts
