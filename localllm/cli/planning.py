"""Plans for files on this disk: reads their header, detects this machine, asks the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localllm.device.types import Device
    from localllm.library.types import LocalModel
    from localllm.planner.speed import Measured
    from localllm.planner.types import Plan
    from localllm.settings import Settings
    from localllm_catalog.catalog import Catalog
    from localllm_catalog.types import Model, Purpose

# Below this a conversation is over before it began; a plan that can't have it does not fit.
_LEAST_CONTEXT = 2048


def plan_file(
    local: LocalModel, settings: Settings, purpose: Purpose = "chat", draft: LocalModel | None = None
) -> Plan | None:
    """The Plan that runs `local` here for `purpose`; None where its header can't be read as a model (the engine then
    says what is wrong with it). A context nobody chose is halved until the plan fits. `draft`: the model that drafts."""
    from localllm.device.detect import detect
    from localllm.library.catalog import load_catalog
    from localllm.planner.plan import Overrides, plan_for
    from localllm.planner.types import Workload

    catalog = load_catalog()
    model = described(local, catalog)
    if model is None or not model.variants:
        return None
    device = detect()
    kv_type = settings.value("kv_type")
    overrides = Overrides(
        measured=_measured(device, model, catalog),
        kv_type="" if kv_type == "auto" else kv_type,
        slots=0 if settings["parallel"].automatic else settings.value("parallel"),
        draft=settings.value("draft"),
        draft_model=described(draft, catalog) if draft is not None else None,
    )
    workload = Workload(purpose, settings.value("context") or 0)
    plan = plan_for(device, model, model.variants[0], workload, overrides=overrides)
    while plan.fits == "no" and settings["context"].automatic and plan.settings.n_ctx > _LEAST_CONTEXT:
        workload = replace(workload, context=plan.settings.n_ctx // 2)
        plan = plan_for(device, model, model.variants[0], workload, overrides=overrides)
    return plan


def described(local: LocalModel, catalog: Catalog) -> Model | None:
    """The Model of files on this disk, with one Variant whose bytes are the files' own; None if unreadable."""
    from localllm.errors import ModelFileError
    from localllm.library.catalog import read_model

    try:
        return read_model(local.path, known=catalog.recognise(local.name, local.path.name))
    except ModelFileError:
        return None


def _measured(device: Device, model: Model, catalog: Catalog) -> tuple[Measured, ...]:
    from localllm.cli import measurements

    return measurements.for_planner(measurements.load(), device.name, {**catalog.by_id, model.id: model})
