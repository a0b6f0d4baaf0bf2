"""From a Plan to what a backend is told to load."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from localllm.load.plan_inputs import offload_options

if TYPE_CHECKING:
    from localllm.planner.types import Plan, RunSettings
    from localllm.settings import Settings
    from localllm_backends.contract import KvType, LoadSpec

# A context that nobody planned or chose, where other machines take layers too.
_UNPLANNED_CONTEXT = 8192


def run_settings(plan: Plan | None, settings: Settings) -> RunSettings:
    """The plan's settings with what was chosen by hand as it was chosen (the backend refuses, with the reason, what it
    can't do); without a plan the backend's defaults."""
    from localllm.planner.types import DraftChoice, RunSettings

    if plan is not None:
        run = plan.settings
    else:
        slots, drafter = max(1, int(settings.value("parallel"))), DraftChoice(settings.value("draft"))
        run = RunSettings(n_ctx=0, slots=slots, n_batch=0, n_outputs=0, drafter=drafter)
        run = offload_options(settings).applied_to(run)
    if settings.value("context"):
        run = replace(run, n_ctx=settings.value("context"))
    kv_type = settings.value("kv_type")
    return run if kv_type == "auto" else run.with_kv_type(kv_type)


def load_spec(path: str, run: RunSettings, *, n_threads: int = 0, n_mtp_layers: int = 0) -> LoadSpec:
    """What a backend is told to load, from how the model is to be run: the one place that makes one from the other.
    `n_mtp_layers`: draft heads in the file, which llama.cpp counts as layers behind the model's own."""
    from localllm_backends.contract import LoadSpec

    placement = replace(run.placement, gpu_layers=_with_heads(run.placement.gpu_layers, n_mtp_layers))
    return LoadSpec(
        path=path,
        n_ctx=run.n_ctx,
        n_seq_max=run.slots,
        n_batch=run.n_batch,
        n_threads=n_threads,
        kv_type_k=cast("KvType", run.kv_type_k),
        kv_type_v=cast("KvType", run.kv_type_v),
        flash_attention=run.flash_attention,
        n_outputs=run.n_outputs,
        n_rewind=run.n_rewind,
        mtp=run.drafter.is_mtp,
        drafter=run.drafter.companion.path if run.drafter.companion is not None else "",
        drafter_optional=run.drafter.optional,
        placement=placement,
    )


def spec_of(path: str, plan: Plan | None, settings: Settings) -> LoadSpec:
    """What runs `plan`, or the file at `path` without one, by `settings`."""
    heads = plan.model.mtp_layers if plan is not None and plan.variant.mtp_bytes else 0
    threads = settings.value("threads") or 0
    spec = load_spec(path, run_settings(plan, settings), n_threads=threads, n_mtp_layers=heads)
    spec = replace(spec, wired=bool(settings.value("wired")), looks_ahead=settings.value("power") >= 100)
    return _over_machines(spec, settings, heads) if settings.value("workers") else spec


def _over_machines(spec: LoadSpec, settings: Settings, heads: int) -> LoadSpec:
    """`spec` with layers on other machines: all of them on those and this one's accelerators, unless --gpu-layers says
    how many. A context that nobody planned or chose is no larger than one that is shared."""
    asked = offload_options(settings)
    # A split that was planned is of this machine's GPUs alone.
    placement = replace(
        spec.placement,
        gpu_layers=-1 if asked.gpu_layers is None else _with_heads(asked.gpu_layers, heads),
        workers=tuple(settings.value("workers")),
        tensor_split=tuple(asked.tensor_split or ()),
        cards=(),
    )
    return replace(spec, placement=placement, n_ctx=spec.n_ctx or _UNPLANNED_CONTEXT)


def _with_heads(gpu_layers: int, heads: int) -> int:
    return gpu_layers + heads if gpu_layers > 0 else gpu_layers
