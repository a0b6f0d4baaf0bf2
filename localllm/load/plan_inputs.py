"""What the planner is asked with for files on this disk: their header, this machine, what was
measured and what was chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from localllm import paths
from localllm.device import detect
from localllm.device.types import Device
from localllm.errors import UsageError
from localllm.library.catalog import OpenedModel
from localllm.library.types import LocalModel
from localllm.load import kv_evidence, measurements
from localllm.load.companions import ChosenDrafter
from localllm.planner import kernels
from localllm.planner.placing import OffloadOptions
from localllm.planner.plan import plan_for
from localllm.planner.quality import KvPrecision
from localllm.planner.starting_settings import Overrides
from localllm.planner.types import Plan, Workload
from localllm.settings import Settings
from localllm_backends.fingerprints import fingerprint
from localllm_catalog.catalog import Catalog
from localllm_catalog.types import Model, Purpose

# Below this a conversation is over before it began; a plan that can't have it does not fit.
LEAST_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """All that the planner is asked with for files on this disk, read and detected once; then
    planned for any context."""

    device: Device
    model: Model
    workload: Workload
    overrides: Overrides
    context_is_free: bool

    def plan(self, holds: Callable[[Plan], bool] = lambda _: True) -> Plan:
        """The plan with the context asked for, or the purpose's; where nobody chose it, it is
        halved until the plan fits and `holds`. The smallest one where none does."""
        plan = self._plan(self.workload.context)
        while (
            self.context_is_free
            and plan.settings.n_ctx > LEAST_CONTEXT
            and (plan.fits == "no" or not holds(plan))
        ):
            plan = self._plan(max(plan.settings.n_ctx // 2, LEAST_CONTEXT))
        return plan

    def _plan(self, context: int) -> Plan:
        workload = replace(self.workload, context=context)
        return plan_for(
            self.device, self.model, self.model.variants[0], workload, overrides=self.overrides
        )


def plan_inputs(
    opened: OpenedModel,
    catalog: Catalog,
    settings: Settings,
    purpose: Purpose,
    drafter: ChosenDrafter,
) -> PlanInputs | None:
    """What to plan an opened model with on this machine; None where its header can't be read as a
    model. `drafter`: what drafts."""

    model = opened.model
    if model is None or not model.variants:
        return None
    device = detect.detect()
    types = kernels.types_to_time(device, model.variants[0])
    if types:
        # A second, the first time: a model of some size would take longer to lay its weights out
        # for nothing.
        device = detect.with_matrix_rates(device, measure=True, types=types)
    kv_type = settings.value("kv_type")
    overrides = Overrides(
        measured=measurements.for_planner(
            measurements.load(), device.name, {**catalog.by_id, model.id: model}
        ),
        kv_type="" if kv_type == "auto" else kv_type,
        kv_evidence=_kv_evidence(opened.local),
        slots=0 if settings["parallel"].automatic else settings.value("parallel"),
        draft=settings.value("draft"),
        draft_model=drafter.second.model if drafter.second is not None else None,
        companion=drafter.companion,
        companion_found=drafter.found,
        offload=_offload_here(settings, device),
    )
    workload = Workload(purpose, settings.value("context") or 0)
    return PlanInputs(device, model, workload, overrides, settings["context"].automatic)


def offload_options(settings: Settings) -> OffloadOptions:
    """Where the person insists on having layers and experts. Raises UsageError for what is no
    number."""

    def number(name: str) -> int | None:
        text = str(settings.value(name)).lower()
        if text == "auto":
            return None
        if text == "all":
            return -1
        if not text.isdecimal():
            raise UsageError(f"{name} is a number of layers, all or auto, not {text!r}", param=name)
        return int(text)

    parts = [part.strip() for part in str(settings.value("split") or "").split(",") if part.strip()]
    try:
        split = tuple(float(part) for part in parts)
    except ValueError:
        split = (-1.0,)
    if any(share < 0 for share in split) or (split and not any(split)):
        raise UsageError(
            f"split is each GPU's share, such as 3,1, not {settings.value('split')!r}",
            param="split",
        )
    return OffloadOptions(number("gpu_layers"), number("cpu_moe"), split or None)


def _offload_here(settings: Settings, device: Device) -> OffloadOptions:
    """What is insisted on for this machine. Where others take layers too (`--with`), shares and
    counts of layers are of all of their devices, which the plan of this one knows nothing of."""

    asked = offload_options(settings)
    workers = settings.value("workers")
    if not workers:
        return check_offload(asked, device)
    there = len(workers) + (0 if device.accelerator == "cpu" else device.n_gpus)
    if asked.tensor_split and len(asked.tensor_split) > there:
        raise UsageError(
            f"split names {len(asked.tensor_split)} shares, and the layers can lie on {there} "
            "devices",
            hint="the workers' shares come first, in the order of --with, then those of this "
            "machine's GPUs",
            param="split",
        )
    return replace(asked, gpu_layers=None, tensor_split=None)


def check_offload(asked: OffloadOptions, device: Device) -> OffloadOptions:
    """`asked`, unless `device` has no place for it: then UsageError."""

    if device.accelerator == "cpu" and (asked.tensor_split or (asked.gpu_layers or 0) > 0):
        what = "gpu_layers" if (asked.gpu_layers or 0) > 0 else "split"
        hint = "leave it out, or name another machine with --device"
        raise UsageError(
            f"{what}: {device.name} has no GPU that layers could go to", hint=hint, param=what
        )
    if asked.tensor_split and len(asked.tensor_split) > device.n_gpus:
        n = len(asked.tensor_split)
        gpus = "one GPU" if device.n_gpus == 1 else f"{device.n_gpus} GPUs"
        raise UsageError(f"split names {n} shares, and {device.name} has {gpus}", param="split")
    return asked


def _kv_evidence(local: LocalModel) -> tuple[KvPrecision, ...]:
    """What KV types were measured to cost on these very files."""
    folder = paths.kv_evidence_dir()
    if local.path.suffix != ".gguf" or not folder.is_dir():
        return ()
    found = kv_evidence.read(kv_evidence.file_for(folder, fingerprint(local.path))).found
    return tuple(
        KvPrecision(f.k if f.k == f.v else f"{f.k}/{f.v}", f.mean_kl, f.flips) for f in found
    )
