"""Inputs of the planner for an installed model: header, machine, measurements and settings."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from typing import cast

from localllm import paths
from localllm.device import detect
from localllm.device.types import Device
from localllm.library.catalog import OpenedModel
from localllm.library.types import LocalModel
from localllm.load import kv_evidence, measurements, readable_models
from localllm.load.candidates import figures_of_others
from localllm.load.drafters_and_projector import ChosenDrafter
from localllm.load.offload import requested_offload
from localllm.planner import kernels
from localllm.planner.plan import plan_for
from localllm.planner.quality import KvPrecision
from localllm.planner.starting_settings import Overrides
from localllm.planner.types import Plan, Workload
from localllm.settings import Settings
from localllm_backends.fingerprints import fingerprint
from localllm_catalog.catalog import Catalog
from localllm_catalog.types import Model, Purpose

# Minimum context in tokens. A shorter one is useless, so a plan that can't have it does not fit.
MIN_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Inputs of the planner for an installed model, read once and used to plan any context."""

    device: Device
    model: Model
    workload: Workload
    overrides: Overrides
    context_is_free: bool

    def plan(self, fits: Callable[[Plan], bool]) -> Plan:
        """Plan with the requested context, or the purpose's default.

        If the context was not chosen, it is halved until the plan fits and `fits` returns True, or
        the minimum is reached.
        """
        plan = self._plan(self.workload.context)
        if not self.context_is_free:
            return plan
        while plan.settings.n_ctx > MIN_CONTEXT:
            if plan.fits != "no" and fits(plan):
                break
            plan = self._plan(max(plan.settings.n_ctx // 2, MIN_CONTEXT))
        return plan

    def _plan(self, context: int) -> Plan:
        workload = replace(self.workload, context=context)
        variant = self.model.variants[0]
        return plan_for(self.device, self.model, variant, workload, overrides=self.overrides)


def plan_inputs(
    opened: OpenedModel,
    catalog: Catalog,
    settings: Settings,
    purpose: Purpose,
    drafter: ChosenDrafter,
) -> PlanInputs | None:
    """Return the planner's inputs for an opened model, or None if its header is not a model's.

    Raises EngineTooOldError if the installed llama.cpp can't read its architecture.
    """

    if opened.header is not None:
        readable_models.check(opened.header.architecture, opened.local.name)
    model = opened.model
    if model is None or not model.variants:
        return None
    device = detect.detect()
    types = kernels.types_to_time(device, model.variants[0])
    if types:
        # This takes about a second, only the first time. Otherwise a large model would spend longer
        # on repacking its weights needlessly.
        device = detect.with_matrix_rates(device, measure=True, types=types)
    # A dict of all models would build those that the catalog has not built yet.
    built_on_demand = cast("MutableMapping[str, Model]", catalog.by_id)
    models = ChainMap({model.id: model}, built_on_demand)
    slots = 0
    if not settings["parallel"].automatic:
        slots = settings.value("parallel")
    kv_type = settings.value("kv_type")
    measured = measurements.for_planner(measurements.load(), device.name, models)
    measured += figures_of_others(device, models)
    overrides = Overrides(
        measured=measured,
        kv_type="" if kv_type == "auto" else kv_type,
        kv_evidence=_kv_evidence(opened.local),
        slots=slots,
        draft=settings.value("draft"),
        draft_model=None if drafter.second is None else drafter.second.model,
        companion=drafter.companion,
        companion_found=drafter.companion_found,
        offload=requested_offload(settings, device),
    )
    workload = Workload(purpose, settings.value("context") or 0)
    return PlanInputs(device, model, workload, overrides, settings["context"].automatic)


def _kv_evidence(local: LocalModel) -> tuple[KvPrecision, ...]:
    """Return the measured precision loss of KV types for exactly these files."""
    folder = paths.kv_evidence_dir()
    if local.path.suffix != ".gguf" or not folder.is_dir():
        return ()
    file = kv_evidence.file_for(folder, fingerprint(local.path))
    precisions = []
    for measured in kv_evidence.read(file).found:
        name = measured.k if measured.k == measured.v else f"{measured.k}/{measured.v}"
        precisions.append(KvPrecision(name, measured.mean_kl, measured.flips))
    return tuple(precisions)
