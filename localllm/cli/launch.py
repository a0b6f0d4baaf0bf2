"""From a MODEL and settings to something that can be served: the one place that turns a Plan into worker options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.errors import DoesNotFitError
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.engine.client import WorkerOptions
    from localllm.library.resolve import LocalModel
    from localllm.planner.types import Plan
    from localllm_catalog.types import Purpose


@dataclass(frozen=True)
class Launch:
    """A model ready to be loaded: `name` for clients, the worker's options, and the Plan they came from."""

    name: str
    local: LocalModel
    options: WorkerOptions
    plan: Plan | None


def prepare(reference: str | None, settings: Settings, purpose: Purpose = "chat") -> Launch:
    """Resolve MODEL, plan it on this machine for `purpose`, and make worker options that run exactly that plan.

    Raises ModelNotFoundError, ModelFileError, DoesNotFitError or UsageError.
    """
    from localllm import paths
    from localllm.engine.client import WorkerOptions
    from localllm.library.resolve import resolve
    from localllm_backends.contract import LoadSpec

    local = resolve(reference or settings.value("model"), offline=bool(settings.value("offline")))
    plan = plan_local(local, settings, purpose)
    kv_type = settings.value("kv_type")
    if kv_type == "auto":
        kv_type = plan.kv_type if plan is not None else "f16"
    context = settings.value("context")
    if context is None and plan is not None:
        context = plan.n_ctx
    spec = LoadSpec(
        path=str(local.path),
        n_ctx=context or 0,
        n_seq_max=plan.slots if plan is not None else max(1, int(settings.value("parallel"))),
        n_batch=plan.n_ubatch if plan is not None else 0,
        n_outputs=plan.n_outputs if plan is not None else 0,
        n_threads=settings.value("threads") or 0,
        kv_type_k=kv_type,
        kv_type_v=kv_type,
        n_gpu_layers=plan.n_gpu_layers if plan is not None else -1,
    )
    log = paths.private_dir(paths.log_dir()) / "worker.log"
    engine: dict[str, object] = {
        "cache_bytes": cache_bytes(settings),
        "disk_dir": str(paths.cache_dir() / "prefixes"),
        "disk_bytes": int(settings.value("cache_disk_gb") * 1e9),
    }
    return Launch(local.name, local, WorkerOptions(spec, settings.value("backend"), engine, log), plan)


def cache_bytes(settings: Settings) -> int:
    """Memory for cached prefixes: what was asked for, else an eighth of what is available now, at most 8 GiB."""
    import psutil

    asked = settings.value("cache_ram_gb")
    if asked is not None:
        return int(asked * 1e9)
    return int(min(8 * 2**30, psutil.virtual_memory().available // 8))


def plan_local(local: LocalModel, settings: Settings, purpose: Purpose) -> Plan | None:
    """The Plan for files on this disk; None when their header says too little to plan by (the engine then decides).

    Raises DoesNotFitError when even the smallest context can't fit.
    """
    from localllm.cli.planning import plan_file

    plan = plan_file(local, settings, purpose)
    if plan is not None and plan.fits == "no":
        need, limit = plan.memory.total_bytes, plan.memory.limit_bytes
        raise DoesNotFitError(
            f"{local.name} needs {need / 1e9:.1f} GB with a context of {plan.n_ctx:,} tokens, "
            f"and this machine has {limit / 1e9:.1f} GB usable"
        )
    return plan
