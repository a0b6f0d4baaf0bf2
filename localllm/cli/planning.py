"""Plans for files on this disk: reads their header, detects this machine, asks the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localllm.device.types import Device
    from localllm.library.resolve import LocalModel
    from localllm.planner.speed import Measured
    from localllm.planner.types import Plan
    from localllm.settings import Settings
    from localllm_catalog.types import Model, Purpose

# Below this a conversation is over before it began; a plan that can't have it does not fit.
_LEAST_CONTEXT = 2048


def plan_file(local: LocalModel, settings: Settings, purpose: Purpose = "chat") -> Plan | None:
    """The Plan that runs `local` here for `purpose`; None where its header can't be read as a model (the engine then
    says what is wrong with it). A context nobody chose is halved until the plan fits."""
    from localllm.device.detect import detect
    from localllm.planner.recommend import Overrides, plan_for
    from localllm.planner.types import Workload

    model = describe(local)
    if model is None or not model.variants:
        return None
    device = detect()
    kv_type = settings.value("kv_type")
    overrides = Overrides(
        measured=_measured(device, model),
        kv_type="" if kv_type == "auto" else kv_type,
        slots=0 if settings["parallel"].automatic else settings.value("parallel"),
        draft=settings.value("draft"),
    )
    workload = Workload(purpose, settings.value("context") or 0)
    plan = plan_for(device, model, model.variants[0], workload, overrides=overrides)
    while plan.fits == "no" and settings["context"].automatic and plan.n_ctx > _LEAST_CONTEXT:
        workload = replace(workload, context=plan.n_ctx // 2)
        plan = plan_for(device, model, model.variants[0], workload, overrides=overrides)
    return plan


def describe(local: LocalModel) -> Model | None:
    """The Model of files on this disk, with one Variant whose bytes are the files' own; None if unreadable."""
    import json

    from localllm.cli.recommend import load_catalog
    from localllm_catalog import from_gguf, from_hf, gguf
    from localllm_catalog.errors import CatalogError

    try:
        known = load_catalog().recognise(local.name, local.path.name)
        if local.format == "gguf":
            return from_gguf.model_from_gguf(gguf.read(local.path), known=known)
        config = json.loads((local.path / "config.json").read_text(encoding="utf-8"))
        files = {f.name: f.stat().st_size for f in local.path.glob("*.safetensors")}
        return from_hf.model_from_config(config, files, known=known)
    except (CatalogError, OSError, ValueError):
        return None


def _measured(device: Device, model: Model) -> tuple[Measured, ...]:
    from localllm.cli import measurements
    from localllm.cli.recommend import load_catalog

    models = {**load_catalog().by_id, model.id: model}
    return measurements.for_planner(measurements.load(), device.name, models)
