"""From a MODEL and settings to something that can be served: the one place that turns a Plan into worker options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from localllm.errors import DoesNotFitError
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.engine.client import WorkerOptions
    from localllm.engine.embedding import EmbeddingOptions
    from localllm.engine.messages import Sampling
    from localllm.library.resolve import LocalModel
    from localllm.planner.types import Plan, RunSettings
    from localllm_backends.contract import KvType, LoadSpec
    from localllm_catalog.types import Purpose


# Models that share a machine give up context for each other down to this many tokens, and then take turns.
_LEAST_SHARED_CONTEXT = 4096
# The memory guard lowers a context nobody chose no further.
_LEAST_CONTEXT = 2048
_EMBEDDING_BUFFERS_BYTES = 250_000_000
# llama.h, enum llama_pooling_type: mean, CLS and last token (0 is none, 4 ranks).
_POOLINGS = (1, 2, 3)


@dataclass(frozen=True)
class Launch:
    """A model ready to be loaded: `name` for clients, the worker's options, and the Plan they came from."""

    name: str
    local: LocalModel
    options: WorkerOptions
    plan: Plan | None
    embedding: EmbeddingOptions | None = None

    @property
    def needs_bytes(self) -> int:
        """What it takes while loaded: as planned, or its files' size where there is no plan (an embedding model: and
        a quarter GB for its buffers, an assumption that models of up to 2,048 tokens stay below)."""
        if self.plan is not None:
            return self.plan.memory.total_bytes
        return self.local.size_bytes + (_EMBEDDING_BUFFERS_BYTES if self.embedding is not None else 0)


def own_sampling(plan: Plan | None) -> Sampling:
    """What a request that names no sampling gets: what the model's maker recommends, and where nobody says, ours."""
    from localllm.engine.messages import Sampling

    if plan is None:
        return Sampling()
    stated = plan.model.sampling
    names = ("temperature", "top_p", "top_k", "min_p", "repeat_penalty")
    return Sampling(**{name: value for name in names if (value := getattr(stated, name)) is not None})


def prepare_all(references: Sequence[str | None], settings: Settings) -> list[Launch]:
    """Prepare models that share this machine, the first one for coding, a further one that can fill in for
    autocomplete. Contexts nobody chose are halved, the largest first, until all fit at once; where that is not enough
    each keeps what it would have alone, and they take turns. Raises as `prepare` does."""
    alone = [prepare(r, settings, "coding", of=len(references)) for r in references]
    for i, launch in enumerate(alone[1:], 1):
        if _fills_in(launch):
            alone[i] = prepare(references[i], settings, "autocomplete", of=len(references))
    planned = [i for i, a in enumerate(alone) if a.plan is not None]
    if len(alone) == 1 or not planned or not settings["context"].automatic:
        return alone
    limit = min(a.plan.memory.limit_bytes for a in alone if a.plan is not None)
    shared = list(alone)
    while sum(s.needs_bytes for s in shared) > limit:
        at = max(planned, key=lambda i: shared[i].options.spec.n_ctx)
        smaller = shared[at].options.spec.n_ctx // 2
        if smaller < _LEAST_SHARED_CONTEXT:
            return alone
        purpose: Purpose = "autocomplete" if at and _fills_in(shared[at]) else "coding"
        lowered = prepare(references[at], settings.lowered("context", smaller), purpose, of=len(references))
        if lowered.options.spec.n_ctx >= shared[at].options.spec.n_ctx:
            return alone
        shared[at] = lowered
    return shared


def _fills_in(launch: Launch) -> bool:
    return launch.plan is not None and bool(launch.plan.model.fim)


def _headroom(settings: Settings) -> int | None:
    asked = settings.value("memory_headroom_gb")
    return None if asked is None else int(asked * 1e9)


def free_for_models(headroom: int | None = None) -> int | None:
    """Bytes of the system's memory that the memory guard lets models have now: all but `headroom` bytes (None: by the
    machine's size). None if the system does not say, or the guard is off."""
    from localllm.engine.memory_guard import SystemMemory, headroom_bytes, process_and_children

    system = SystemMemory(process_and_children)
    available = system.available_bytes()
    if headroom is None:
        headroom = headroom_bytes(system.total_bytes)
    return None if available is None or not headroom else max(0, available - headroom)


def memory_for_models() -> tuple[int, Callable[[], int]]:
    """(bytes models may take together on this machine, a function that says how many of them are available now: of a
    pool that the system lives in too, what the memory guard will let them have)."""
    from localllm.device.detect import detect

    device = detect()

    def available() -> int:
        free = detect().memory.available_bytes
        shared = None if device.kind == "discrete" else free_for_models()
        return free if shared is None else min(free, shared)

    return device.memory.limit_bytes, available


def prepare(reference: str | None, settings: Settings, purpose: Purpose = "chat", *, of: int = 1) -> Launch:
    """Resolve MODEL, plan it on this machine for `purpose`, and make worker options that run exactly that plan. `of`
    models share the memory for cached prefixes.

    Raises ModelNotFoundError, ModelFileError, BackendMissingError, DoesNotFitError or UsageError.
    """
    from localllm import paths
    from localllm.engine import backends
    from localllm.engine.client import WorkerOptions
    from localllm.library.resolve import resolve

    local = resolve(reference or settings.value("model"), offline=bool(settings.value("offline")))
    # Said now, before anything is planned: no backend runs these files, or its package is missing.
    backends.for_path(str(local.path), settings.value("backend"))
    if makes_embeddings(local):
        return _embedding(local, settings)
    draft, second = _drafting(settings)
    if draft == "mtp":
        _check_draft_heads(local)
    plan = plan_local(local, settings, purpose, second)
    plan, planned = _within_free(local, settings, purpose, second, plan)
    spec = load_spec(str(local.path), run_settings(plan, settings), n_threads=settings.value("threads") or 0)
    log = paths.private_dir(paths.log_dir()) / "worker.log"
    engine: dict[str, object] = {
        "draft": draft,
        "cache_bytes": cache_bytes(settings) // of,
        "disk_dir": str(paths.cache_dir() / "prefixes"),
        "disk_bytes": int(settings.value("cache_disk_gb") * 1e9),
        "planned_bytes": planned,
        "headroom_bytes": _headroom(settings),
    }
    options = WorkerOptions(spec, settings.value("backend"), engine, str(second.path) if second else None, log)
    return Launch(local.name, local, options, plan)


def run_settings(plan: Plan | None, settings: Settings) -> RunSettings:
    """The plan's settings with what was chosen by hand as it was chosen (the backend refuses, with the reason, what it
    can't do); without a plan the backend's defaults."""
    from localllm.planner.types import Drafter, RunSettings

    if plan is not None:
        run = plan.settings
    else:
        slots, drafter = max(1, int(settings.value("parallel"))), Drafter(settings.value("draft"))
        run = RunSettings(n_ctx=0, slots=slots, n_batch=0, n_outputs=0, drafter=drafter)
    if settings.value("context"):
        run = replace(run, n_ctx=settings.value("context"))
    kv_type = settings.value("kv_type")
    return run if kv_type == "auto" else run.with_kv_type(kv_type)


def load_spec(path: str, run: RunSettings, *, n_threads: int = 0) -> LoadSpec:
    """What a backend is told to load, from how the model is to be run: the one place that makes one from the other."""
    from localllm_backends.contract import LoadSpec

    return LoadSpec(
        path=path,
        n_ctx=run.n_ctx,
        n_seq_max=run.slots,
        n_batch=run.n_batch,
        n_threads=n_threads,
        kv_type_k=cast("KvType", run.kv_type_k),
        kv_type_v=cast("KvType", run.kv_type_v),
        flash_attention=run.flash_attention,
        n_gpu_layers=run.n_gpu_layers,
        n_outputs=run.n_outputs,
        n_rewind=run.n_rewind,
        mtp=run.drafter.is_mtp,
    )


def _within_free(
    local: LocalModel, settings: Settings, purpose: Purpose, second: LocalModel | None, plan: Plan | None
) -> tuple[Plan | None, int]:
    """(the plan, what it takes of the system's memory). A context nobody chose is halved until the memory guard would
    let it load now; what still is too large is refused when it is loaded, as others may have gone by then."""
    from localllm.device.detect import detect

    discrete = detect().kind == "discrete"

    def takes(plan: Plan | None) -> int:
        # A graphics card's own memory ends in an error when it is full; the system's ends in swapping.
        if plan is None:
            return 0 if discrete else local.size_bytes
        return plan.memory.host_bytes if discrete else plan.memory.total_bytes

    free = free_for_models(_headroom(settings))
    while plan is not None and free is not None and takes(plan) > free and settings["context"].automatic:
        settings = settings.lowered("context", max(plan.settings.n_ctx // 2, _LEAST_CONTEXT))
        smaller = plan_local(local, settings, purpose, second)
        if smaller is None or smaller.settings.n_ctx >= plan.settings.n_ctx:
            break
        plan = smaller
    return plan, takes(plan)


def _drafting(settings: Settings) -> tuple[str, LocalModel | None]:
    """(the engine's drafting mode, the second model that drafts or None) for the `draft` setting."""
    from localllm.engine.messages import DRAFT_MODES
    from localllm.library.resolve import resolve

    draft = settings.value("draft")
    if draft in DRAFT_MODES:
        return draft, None
    return "auto", resolve(draft, offline=bool(settings.value("offline")))


def _check_draft_heads(local: LocalModel) -> None:
    """UnsupportedError where `--draft mtp` asks for draft heads that the model does not have; said by its header."""
    from localllm.errors import ModelFileError, UnsupportedError
    from localllm.library.catalog import read_header

    hint = "use --draft auto, which drafts from the text itself, or a model whose file carries draft heads"
    if local.format != "gguf":
        raise UnsupportedError("draft heads (--draft mtp) run on llama.cpp only, from a GGUF file", hint=hint)
    try:
        header = read_header(local.path)
    except ModelFileError:
        return  # the engine says what is wrong with it
    if not header.metadata.get(f"{header.architecture}.nextn_predict_layers"):
        why = f"{local.name} has no draft heads: its header names none (nextn_predict_layers)"
        raise UnsupportedError(f"--draft mtp: {why}", hint=hint)


def makes_embeddings(local: LocalModel) -> bool:
    """True for files whose header names a pooling: they make vectors, not text."""
    from localllm.errors import ModelFileError
    from localllm.library.catalog import read_header

    if local.format != "gguf":
        return False
    try:
        header = read_header(local.path)
    except ModelFileError:
        return False  # the engine says what is wrong with it
    return header.metadata.get(f"{header.architecture}.pooling_type") in _POOLINGS


def _embedding(local: LocalModel, settings: Settings) -> Launch:
    from localllm import paths
    from localllm.engine.client import WorkerOptions
    from localllm.engine.embedding import EmbeddingOptions
    from localllm_backends.contract import LoadSpec

    log = paths.private_dir(paths.log_dir()) / "worker.log"
    context, threads = settings.value("context") or 0, settings.value("threads") or 0
    options = EmbeddingOptions(
        str(local.path),
        settings.value("backend"),
        context,
        threads,
        log_path=log,
        planned_bytes=local.size_bytes + _EMBEDDING_BUFFERS_BYTES,
        headroom_bytes=_headroom(settings),
    )
    return Launch(local.name, local, WorkerOptions(LoadSpec(path=str(local.path))), None, options)


def cache_bytes(settings: Settings) -> int:
    """Memory for cached prefixes: what was asked for, else an eighth of what is available now, at most 8 GiB."""
    import psutil

    asked = settings.value("cache_ram_gb")
    if asked is not None:
        return int(asked * 1e9)
    return int(min(8 * 2**30, psutil.virtual_memory().available // 8))


def plan_local(
    local: LocalModel, settings: Settings, purpose: Purpose, second: LocalModel | None = None
) -> Plan | None:
    """The Plan for files on this disk, with `second` to draft for them; None when their header says too little to plan
    by (the engine then decides).

    Raises DoesNotFitError when even the smallest context can't fit.
    """
    from localllm.cli.planning import plan_file

    plan = plan_file(local, settings, purpose, second)
    if plan is not None and plan.fits == "no":
        need, limit = plan.memory.total_bytes, plan.memory.limit_bytes
        raise DoesNotFitError(
            f"{local.name} needs {need / 1e9:.1f} GB with a context of {plan.settings.n_ctx:,} tokens, "
            f"and this machine has {limit / 1e9:.1f} GB usable"
        )
    return plan
