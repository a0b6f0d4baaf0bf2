"""Make the worker's options: the backend's LoadSpec from a Plan, and the engine's settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from localllm import paths
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.embedding import EmbeddingOptions
from localllm.library.types import LocalModel
from localllm.load.drafters_and_projector import ChosenDrafter, MediaProjector
from localllm.load.offload import offload_options
from localllm.memory.system import SystemMemory
from localllm.planner.types import DraftChoice, Plan, RunSettings
from localllm.settings import Settings
from localllm_backends.contract import KvType, LoadSpec, LoraAdapter

# Context in tokens if it was neither planned nor chosen and other machines hold layers too.
_UNPLANNED_CONTEXT = 8192


def run_settings(plan: Plan | None, settings: Settings) -> RunSettings:
    """Return the plan's settings, overridden by the user's settings.

    The backend rejects unsupported values with a reason. Without a plan, the backend's defaults
    apply.
    """
    if plan is not None:
        run = plan.settings
    else:
        slots = max(1, int(settings.value("parallel")))
        drafter = DraftChoice(settings.value("draft"))
        run = RunSettings(n_ctx=0, slots=slots, n_batch=0, n_outputs=0, drafter=drafter)
        run = offload_options(settings).applied_to(run)
    if settings.value("context"):
        run = replace(run, n_ctx=settings.value("context"))
    kv_type = settings.value("kv_type")
    if kv_type == "auto":
        return run
    return run.with_kv_type(kv_type)


def load_spec(
    path: str, run: RunSettings, *, n_threads: int = 0, n_mtp_layers: int = 0
) -> LoadSpec:
    """Convert RunSettings to the backend's LoadSpec. All conversions happen here.

    `n_mtp_layers`: draft heads in the file. llama.cpp counts them as layers after the model's own.
    """
    gpu_layers = _with_mtp_layers(run.placement.gpu_layers, n_mtp_layers)
    drafter = run.drafter
    return LoadSpec(
        path=path,
        n_ctx=run.n_ctx,
        n_seq_max=run.slots,
        n_batch=run.n_batch,
        n_threads=n_threads,
        kv_type_k=cast("KvType", run.kv_type_k),
        kv_type_v=cast("KvType", run.kv_type_v),
        n_outputs=run.n_outputs,
        n_rewind=run.n_rewind,
        mtp=drafter.is_mtp,
        drafter="" if drafter.companion is None else drafter.companion.path,
        drafter_optional=drafter.optional,
        placement=replace(run.placement, gpu_layers=gpu_layers),
    )


def spec_of(path: str, plan: Plan | None, settings: Settings) -> LoadSpec:
    """Return the LoadSpec for `plan` and `settings`, or for the file at `path` without a plan."""
    n_mtp_layers = 0
    if plan is not None and plan.variant.mtp_bytes:
        n_mtp_layers = plan.model.mtp_layers
    threads = settings.value("threads") or 0
    spec = load_spec(
        path, run_settings(plan, settings), n_threads=threads, n_mtp_layers=n_mtp_layers
    )
    starts_steps_early = settings.value("power") >= 100
    spec = replace(spec, wired=bool(settings.value("wired")), starts_steps_early=starts_steps_early)
    if settings.value("workers"):
        return _over_machines(spec, settings, n_mtp_layers)
    return spec


def _over_machines(spec: LoadSpec, settings: Settings, n_mtp_layers: int) -> LoadSpec:
    """Return `spec` with layers on other machines too.

    All layers go to the workers and this machine's accelerators, unless --gpu-layers gives a
    number. If the context was neither planned nor chosen, it is `_UNPLANNED_CONTEXT`.
    """
    requested = offload_options(settings)
    gpu_layers = -1
    if requested.gpu_layers is not None:
        gpu_layers = _with_mtp_layers(requested.gpu_layers, n_mtp_layers)
    # A planned split covers only this machine's GPUs.
    placement = replace(
        spec.placement,
        gpu_layers=gpu_layers,
        workers=tuple(settings.value("workers")),
        tensor_split=tuple(requested.tensor_split or ()),
        cards=(),
    )
    return replace(spec, placement=placement, n_ctx=spec.n_ctx or _UNPLANNED_CONTEXT)


def _with_mtp_layers(gpu_layers: int, n_mtp_layers: int) -> int:
    if gpu_layers > 0:
        return gpu_layers + n_mtp_layers
    return gpu_layers


# -- the worker's options --------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryShare:
    """The planned system memory of a model, and how many models share the memory for cached
    prefixes."""

    planned_bytes: int
    models: int = 1


def worker_options(
    local: LocalModel,
    plan: Plan | None,
    settings: Settings,
    drafter: ChosenDrafter,
    projector: MediaProjector,
    adapters: tuple[LoraAdapter, ...],
    share: MemoryShare,
) -> WorkerOptions:
    """Return the options of a worker that runs `plan`, or the files alone without a plan.

    They include the drafter, the projector and the adapters.
    """
    spec = replace(spec_of(str(local.path), plan, settings), adapters=adapters)
    if drafter.companion is not None and plan is None:
        spec = replace(
            spec, drafter=drafter.companion.path, drafter_optional=drafter.companion_found
        )
    if projector.file is not None:
        spec = replace(spec, projector=str(projector.file))
    mode = "mtp" if spec.mtp else drafter.mode
    draft_path = None
    if drafter.second is not None:
        draft_path = str(drafter.second.local.path)
    return WorkerOptions(
        spec,
        settings.value("backend"),
        _engine_settings(local, settings, mode, share),
        draft_path,
        paths.worker_log(),
        60.0 * settings.value("hang_min"),
    )


def pooled_options(
    local: LocalModel, settings: Settings, planned_bytes: int
) -> tuple[WorkerOptions, EmbeddingOptions]:
    """Return the options of an embedding model or a reranker, which have no Plan."""
    path = str(local.path)
    backend = settings.value("backend")
    hang_s = 60.0 * settings.value("hang_min")
    options = WorkerOptions(LoadSpec(path=path), backend, {}, None, paths.worker_log(), hang_s)
    embedding = EmbeddingOptions(
        path,
        backend,
        settings.value("context") or 0,
        settings.value("threads") or 0,
        log_path=options.log_path,
        planned_bytes=planned_bytes,
        headroom_bytes=headroom_bytes(settings),
        hang_s=hang_s,
    )
    return options, embedding


def _engine_settings(
    local: LocalModel, settings: Settings, draft: str, share: MemoryShare
) -> dict[str, object]:
    """Return the values of engine.EngineSettings that can be stored as JSON."""
    disk = {
        "disk_dir": str(paths.prefixes_dir()),
        "disk_bytes": int(settings.value("cache_disk_gb") * 1e9),
        "disk_free_bytes": int(settings.value("cache_disk_free_gb") * 1e9),
        "disk_daily_bytes": int(settings.value("cache_disk_daily_gb") * 1e9),
    }
    transfer = {
        "prefill_from": _servers(settings.value("prefill_from")),
        "kv_from": _servers(settings.value("kv_from")),
        "prefill_key": settings.value("prefill_key"),
        "prefill_from_tokens": settings.value("prefill_from_tokens"),
    }
    return {
        **disk,
        **transfer,
        "draft": draft,
        "cache_bytes": _cache_bytes(settings) // share.models,
        "model_name": local.name,
        "planned_bytes": share.planned_bytes,
        "headroom_bytes": headroom_bytes(settings),
        "yields_threads": not settings.value("threads"),
        "gap_s": settings.value("gap_ms") / 1e3,
        "power": settings.value("power") / 100,
    }


def _servers(urls: Sequence[str]) -> list[str]:
    return [url.rstrip("/").removesuffix("/v1") for url in urls]


def _cache_bytes(settings: Settings) -> int:
    """Memory for cached prefixes: as chosen, or 1/8 of the available memory, at most 8 GiB."""
    requested = settings.value("cache_ram_gb")
    if requested is not None:
        return int(requested * 1e9)
    available = SystemMemory().available_bytes() or 0
    return min(8 * 2**30, available // 8)


def headroom_bytes(settings: Settings) -> int | None:
    requested = settings.value("memory_headroom_gb")
    if requested is None:
        return None
    return int(requested * 1e9)
