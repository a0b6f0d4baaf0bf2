"""What the planner is asked with: for files on this disk their header, this machine, what was measured and what was chosen; for
`recommend` and `pull` a machine by its name, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from localllm.device.types import Device
    from localllm.library.types import LocalModel
    from localllm.load.drafter import ChosenDrafter
    from localllm.planner.placing import OffloadOptions
    from localllm.planner.plan import Overrides
    from localllm.planner.quality import KvPrecision
    from localllm.planner.types import Plan, Workload
    from localllm.settings import Settings
    from localllm_catalog.catalog import Catalog
    from localllm_catalog.types import Model, Purpose, Variant


# Below this a conversation is over before it began; a plan that can't have it does not fit.
LEAST_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """All that the planner is asked with for files on this disk, read and detected once; then planned for any context."""

    device: Device
    model: Model
    workload: Workload
    overrides: Overrides
    context_is_free: bool

    def plan(self, context: int = 0) -> Plan:
        """The plan with so many tokens of context (0: as chosen, or the purpose's), which is halved until the plan fits where
        nobody chose it."""
        plan = self._plan(context or self.workload.context)
        while plan.fits == "no" and self.context_is_free and plan.settings.n_ctx > LEAST_CONTEXT:
            plan = self._plan(plan.settings.n_ctx // 2)
        return plan

    def _plan(self, context: int) -> Plan:
        from localllm.planner.plan import plan_for

        workload = replace(self.workload, context=context)
        return plan_for(self.device, self.model, self.model.variants[0], workload, overrides=self.overrides)


def plan_inputs(
    local: LocalModel, settings: Settings, purpose: Purpose = "chat", drafter: ChosenDrafter | None = None
) -> PlanInputs | None:
    """What to plan `local` with on this machine; None where its header can't be read as a model (the engine then says what
    is wrong with it). `drafter`: what drafts."""
    from localllm.device.detect import detect, with_matrix_rates
    from localllm.library.catalog import load_catalog
    from localllm.load import measurements
    from localllm.planner import kernels
    from localllm.planner.plan import Overrides
    from localllm.planner.types import Workload

    catalog = load_catalog()
    model = described(local, catalog)
    if model is None or not model.variants:
        return None
    device = detect()
    types = kernels.types_to_time(device, model.variants[0])
    if types:
        # A second, the first time: a model of some size would take longer to lay its weights out for nothing.
        device = with_matrix_rates(device, measure=True, types=types)
    kv_type = settings.value("kv_type")
    overrides = Overrides(
        measured=measurements.for_planner(measurements.load(), device.name, {**catalog.by_id, model.id: model}),
        kv_type="" if kv_type == "auto" else kv_type,
        kv_evidence=_kv_evidence(local),
        slots=0 if settings["parallel"].automatic else settings.value("parallel"),
        draft=drafter.mode if drafter is not None and drafter.found else settings.value("draft"),
        draft_model=described(drafter.second, catalog) if drafter is not None and drafter.second is not None else None,
        companion=drafter.companion if drafter is not None else None,
        companion_found=drafter is not None and drafter.found,
        offload=_offload_here(settings, device),
    )
    workload = Workload(purpose, settings.value("context") or 0)
    return PlanInputs(device, model, workload, overrides, settings["context"].automatic)


def offload_options(settings: Settings) -> OffloadOptions:
    """Where the person insists on having layers and experts. Raises UsageError for what is no number."""
    from localllm.errors import UsageError
    from localllm.planner.placing import OffloadOptions

    def number(name: str) -> int | None:
        text = str(settings.value(name)).lower()
        if text in ("auto", "all"):
            return None if text == "auto" else -1
        if not text.isdecimal():
            raise UsageError(f"{name} is a number of layers, all or auto, not {text!r}", param=name)
        return int(text)

    parts = [part.strip() for part in str(settings.value("split") or "").split(",") if part.strip()]
    try:
        split = tuple(float(part) for part in parts)
    except ValueError:
        split = (-1.0,)
    if any(share < 0 for share in split) or (split and not any(split)):
        raise UsageError(f"split is each GPU's share, such as 3,1, not {settings.value('split')!r}", param="split")
    return OffloadOptions(number("gpu_layers"), number("cpu_moe"), split or None)


def _offload_here(settings: Settings, device: Device) -> OffloadOptions:
    """What is insisted on for this machine. Where others take layers too (`--with`), shares and counts of layers are of all
    of their devices, which the plan of this one knows nothing of."""
    from localllm.errors import UsageError

    asked, workers = offload_options(settings), settings.value("workers")
    if not workers:
        return check_offload(asked, device)
    there = len(workers) + (0 if device.accelerator == "cpu" else device.n_gpus)
    if asked.tensor_split and len(asked.tensor_split) > there:
        raise UsageError(
            f"split names {len(asked.tensor_split)} shares, and the layers can lie on {there} devices",
            hint="the workers' shares come first, in the order of --with, then those of this machine's GPUs",
            param="split",
        )
    return replace(asked, gpu_layers=None, tensor_split=None)


def check_offload(asked: OffloadOptions, device: Device) -> OffloadOptions:
    """`asked`, unless `device` has no place for it: then UsageError."""
    from localllm.errors import UsageError

    if device.accelerator == "cpu" and (asked.tensor_split or (asked.gpu_layers or 0) > 0):
        what = "gpu_layers" if (asked.gpu_layers or 0) > 0 else "split"
        hint = "leave it out, or name another machine with --device"
        raise UsageError(f"{what}: {device.name} has no GPU that layers could go to", hint=hint, param=what)
    if asked.tensor_split and len(asked.tensor_split) > device.n_gpus:
        n, gpus = len(asked.tensor_split), "one GPU" if device.n_gpus == 1 else f"{device.n_gpus} GPUs"
        raise UsageError(f"split names {n} shares, and {device.name} has {gpus}", param="split")
    return asked


def described(local: LocalModel, catalog: Catalog) -> Model | None:
    """The Model of files on this disk, with one Variant whose bytes are the files' own; None if unreadable."""
    from localllm.errors import ModelFileError
    from localllm.library.catalog import read_model

    try:
        return read_model(local.path, known=catalog.recognise(local.name, local.path.name))
    except ModelFileError:
        return None


def _kv_evidence(local: LocalModel) -> tuple[KvPrecision, ...]:
    """What KV types were measured to cost on these very files."""
    from localllm import paths
    from localllm.engine.host import kv_evidence
    from localllm.planner.quality import KvPrecision
    from localllm_backends.llamacpp.weights import fingerprint

    folder = paths.kv_evidence_dir()
    if local.path.suffix != ".gguf" or not folder.is_dir():
        return ()
    found = kv_evidence.read(kv_evidence.file_for(folder, fingerprint(local.path))).found
    return tuple(KvPrecision(f.k if f.k == f.v else f"{f.k}/{f.v}", f.mean_kl, f.flips) for f in found)


def device_named(name: str | None, memory: float | None, bandwidth: float | None) -> Device:
    """A machine by its name, or this one, as if it had other memory or bandwidth where they are given. Raises DeviceNotFoundError."""
    from localllm.device.detect import detect
    from localllm.device.named import overridden, resolve

    if name is not None:
        return resolve(name, memory_gb=memory, bandwidth_gbps=bandwidth)
    return overridden(detect(), memory_gb=memory, bandwidth_gbps=bandwidth)


def machine_of(name: str | None, memory_gb: float | None, catalog: Catalog) -> tuple[Device, Overrides]:
    """A machine (None: this one), with another memory where one is given, and what is known of speeds on it. Raises
    DeviceNotFoundError."""
    device = device_named(name, memory_gb, None)
    return device, overrides_for(device, catalog)


def overrides_for(device: Device, catalog: Catalog) -> Overrides:
    """What is known of speeds on `device`, and which engines this installation has."""
    from localllm.load import measurements
    from localllm.planner.plan import Overrides
    from localllm_backends import registry

    own = [] if device.simulated else [r for r in measurements.load() if r.machine == device.name]
    records = measurements.for_machine(device.name, own)
    where = "here" if own else "by others"
    measured = measurements.for_planner(records, device.name, catalog.by_id, where=where)
    return Overrides(measured=measured, backends=registry.names())


def of_quant(plans: list[Plan], quant: str) -> list[Plan]:
    """Those of `plans` in the quant asked for ("" = all). Raises ModelNotFoundError where this machine reads only others."""
    from localllm.errors import ModelNotFoundError
    from localllm.library.names import same_quant

    found = [p for p in plans if not quant or same_quant(quant, p.variant.quant)]
    if plans and not found:
        listed = ", ".join(dict.fromkeys(p.variant.quant for p in plans))
        raise ModelNotFoundError(
            f"no engine for this machine reads {plans[0].model.name} in {quant}", hint=f"it reads {listed}"
        )
    return found


def variant_choice(ref: str) -> Callable[[Model], Variant] | None:
    """How a variant is chosen for `ref`: only of a model of the catalog is enough known to plan by before it is fetched."""
    from localllm.library.catalog import load_catalog

    return best_variant if load_catalog().get(ref.partition(":")[0]) is not None else None


def best_variant(model: Model) -> Variant:
    """The variant of `model` that the planner would run here: the best that fits, else the smallest."""
    from localllm.device.detect import detect
    from localllm.errors import DoesNotFitError
    from localllm.planner.plan import Overrides
    from localllm.planner.recommend import variants_of
    from localllm.planner.types import Workload
    from localllm_backends import registry

    plans = variants_of(detect(), model, Workload(), overrides=Overrides(backends=registry.names()))
    if not plans:
        raise DoesNotFitError(f"no engine installed here runs any published variant of {model.name}")
    fitting = [p for p in plans if p.fits != "no"]
    if not fitting:
        least = min(p.memory.total_bytes for p in plans)
        raise DoesNotFitError(
            f"{model.name} needs at least {least / 1e9:.1f} GB, and this machine has "
            f"{plans[0].memory.limit_bytes / 1e9:.1f} GB usable",
            hint=f"name a variant to fetch it all the same: localllm pull {model.id}:{plans[0].variant.quant}",
        )
    return max(fitting, key=lambda p: (p.score, p.variant.quant)).variant


def installed_names(plans: Sequence[Plan], catalog: Catalog) -> dict[tuple[str, str], str]:
    """Names on this disk of the plans' models that are there, by id and quant."""
    from localllm.library import store
    from localllm.library.resolve import matching

    there = store.scan()
    found = {}
    for key in {(p.model.id, p.variant.quant) for p in plans} if there else ():
        if locals_ := matching(f"{key[0]}:{key[1]}", there, catalog=catalog):
            found[key] = locals_[0].name
    return found
