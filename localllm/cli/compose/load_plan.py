"""From a MODEL and settings to something that can be served: the one place that turns a Plan into worker options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from localllm.cli.compose.projector import Eyes, blind, eyes_of
from localllm.errors import DoesNotFitError
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.cli.compose.presets import Preset
    from localllm.engine.messages import Sampling
    from localllm.engine.worker.client import WorkerOptions
    from localllm.engine.worker.embedding import EmbeddingOptions
    from localllm.library.resolve import LocalModel
    from localllm.planner.types import Plan, RunSettings
    from localllm_backends.contract import KvType, LoadSpec
    from localllm_catalog.types import Purpose


# Models that share a machine give up context for each other down to this many tokens, and then take turns.
_LEAST_SHARED_CONTEXT = 4096
# The memory guard lowers a context nobody chose no further.
_LEAST_CONTEXT = 2048
_EMBEDDING_BUFFERS_BYTES = 250_000_000
# llama.h, enum llama_pooling_type: mean, CLS and last token make vectors, 4 ranks (0 is none).
_POOLINGS = {1: "embeds", 2: "embeds", 3: "embeds", 4: "ranks"}


@dataclass(frozen=True)
class Launch:
    """A model ready to be loaded: `name` for clients, the worker's options, and the Plan they came from. `preset`: the
    one of config.toml that it was named by."""

    name: str
    local: LocalModel
    options: WorkerOptions
    plan: Plan | None
    embedding: EmbeddingOptions | None = None
    preset: Preset | None = None
    ranks: bool = False
    eyes: Eyes = field(default_factory=Eyes)

    @property
    def needs_bytes(self) -> int:
        """What it takes while loaded: as planned, or its files' size where there is no plan (an embedding model: and
        a quarter GB for its buffers, an assumption that models of up to 2,048 tokens stay below)."""
        if self.plan is not None:
            return self.plan.memory.total_bytes + self.eyes.need_bytes
        return (
            self.eyes.need_bytes
            + self.local.size_bytes
            + (_EMBEDDING_BUFFERS_BYTES if self.embedding is not None else 0)
        )


def own_sampling(plan: Plan | None, *, thinks: bool = True) -> Sampling:
    """What a request that names no sampling gets: what the model's maker recommends (where the request switches reasoning
    off, unless it `thinks`: for that), and where nobody says, ours."""
    from localllm.engine.messages import Sampling

    if plan is None:
        return Sampling()
    stated, without = plan.model.sampling, plan.model.sampling_non_thinking
    names = ("temperature", "top_p", "top_k", "min_p", "repeat_penalty")
    said = {name: getattr(stated, name) for name in names}
    if not thinks and without is not None:
        said |= {name: value for name in names if (value := getattr(without, name)) is not None}
    return Sampling(**{name: value for name, value in said.items() if value is not None})


def prepare_all(
    references: Sequence[str | None], settings: Settings, own: Sequence[Settings] | None = None
) -> list[Launch]:
    """Prepare models that share this machine, the first one for coding, a further one that can fill in for
    autocomplete. Contexts nobody chose are halved, the largest first, until all fit at once; where that is not enough
    each keeps what it would have alone, and they take turns. `own`: each one's settings, where they differ. Raises as
    `prepare` does."""
    each = own or [settings] * len(references)
    alone = [prepare(r, s, "coding", of=len(references)) for r, s in zip(references, each, strict=True)]
    for i, launch in enumerate(alone[1:], 1):
        if _fills_in(launch):
            alone[i] = prepare(references[i], each[i], "autocomplete", of=len(references))
    planned = [i for i, a in enumerate(alone) if a.plan is not None and each[i]["context"].automatic]
    if len(alone) == 1 or not planned:
        return alone
    limit = min(a.plan.memory.limit_bytes for a in alone if a.plan is not None)
    shared = list(alone)
    while sum(s.needs_bytes for s in shared) > limit:
        at = max(planned, key=lambda i: shared[i].options.spec.n_ctx)
        smaller = shared[at].options.spec.n_ctx // 2
        if smaller < _LEAST_SHARED_CONTEXT:
            return alone
        purpose: Purpose = "autocomplete" if at and _fills_in(shared[at]) else "coding"
        lowered = prepare(references[at], each[at].lowered("context", smaller), purpose, of=len(references))
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
    from localllm.engine.host.memory import SystemMemory, headroom_bytes, process_and_children

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
    from localllm.library.resolve import resolve

    local = resolve(reference or settings.value("model"), offline=bool(settings.value("offline")))
    return prepare_local(local, settings, purpose, of=of)


def prepare_local(
    local: LocalModel, settings: Settings, purpose: Purpose = "chat", *, of: int = 1, spare_bytes: int = 0
) -> Launch:
    """`prepare` for files on this disk. `spare_bytes`: what others would give back to make room. Raises as it does."""
    from localllm import paths
    from localllm.engine.worker import backends
    from localllm.engine.worker.client import WorkerOptions

    # Said now, before anything is planned: no backend runs these files, or its package is missing.
    backends.for_path(str(local.path), settings.value("backend"))
    use = pooled_use(local)
    if use is not None:
        return replace(_embedding(local, settings), ranks=use == "ranks")
    draft, second = _drafting(settings)
    if draft == "mtp":
        _check_draft_heads(local)
    plan = _planned_with_workers(local, settings, purpose, second)
    free = free_for_models(_headroom(settings))
    free = None if free is None else free + spare_bytes
    eyes, whole = eyes_of(local, settings, draft), plan
    beside = None if free is None else free - eyes.need_bytes
    plan, planned = _within_free(local, settings, purpose, second, whole, beside)
    if eyes.projector is not None and (left := _left_bytes(plan, planned, free)) < eyes.need_bytes:
        eyes = blind(eyes, settings, left)
        plan, planned = _within_free(local, settings, purpose, second, whole, free)
    heads = plan.model.mtp_layers if plan is not None and plan.variant.mtp_bytes else 0
    run, threads = run_settings(plan, settings), settings.value("threads") or 0
    spec = load_spec(str(local.path), run, n_threads=threads, n_mtp_layers=heads)
    spec = replace(spec, projector=str(eyes.projector) if eyes.projector is not None and not spec.mtp else "")
    if settings.value("workers"):
        spec, planned = _with_workers(spec, settings, heads), 0
    log = paths.private_dir(paths.log_dir()) / "worker.log"
    engine: dict[str, object] = {
        "draft": draft,
        "cache_bytes": cache_bytes(settings) // of,
        "disk_dir": str(paths.prefixes_dir()),
        "disk_bytes": int(settings.value("cache_disk_gb") * 1e9),
        "disk_free_bytes": int(settings.value("cache_disk_free_gb") * 1e9),
        "disk_daily_bytes": int(settings.value("cache_disk_daily_gb") * 1e9),
        "model_name": local.name,
        "kv_evidence_dir": str(paths.kv_evidence_dir()),
        "planned_bytes": planned + eyes.need_bytes if planned else 0,
        "headroom_bytes": _headroom(settings),
        "gives_way": not threads,
    }
    draft_path = str(second.path) if second else None
    hang_s = 60.0 * settings.value("hang_min")
    options = WorkerOptions(spec, settings.value("backend"), engine, draft_path, log, hang_s)
    return Launch(local.name, local, options, plan, eyes=eyes)


def _planned_with_workers(
    local: LocalModel, settings: Settings, purpose: Purpose, second: LocalModel | None
) -> Plan | None:
    """The plan on this machine; None where it does not fit, but other machines take layers of it too: what they have is
    not planned for, llama.cpp splits the model by what each device has free."""
    try:
        return plan_local(local, settings, purpose, second)
    except DoesNotFitError:
        if not settings.value("workers"):
            raise
        return None


def _with_workers(spec: LoadSpec, settings: Settings, heads: int) -> LoadSpec:
    """`spec` with layers on other machines: all of them on those and this one's accelerators, unless --gpu-layers says
    how many. A context that nobody planned or chose is no larger than one that is shared."""
    from localllm.cli.compose.file_plan import wish

    asked = wish(settings)
    layers = -1 if asked.gpu_layers is None else asked.gpu_layers + (heads if asked.gpu_layers > 0 else 0)
    # A split that was planned is of this machine's GPUs alone.
    placement = replace(
        spec.placement,
        gpu_layers=layers,
        workers=tuple(settings.value("workers")),
        tensor_split=tuple(asked.tensor_split or ()),
    )
    return replace(spec, placement=placement, n_ctx=spec.n_ctx or 2 * _LEAST_SHARED_CONTEXT)


def run_settings(plan: Plan | None, settings: Settings) -> RunSettings:
    """The plan's settings with what was chosen by hand as it was chosen (the backend refuses, with the reason, what it
    can't do); without a plan the backend's defaults."""
    from localllm.cli.compose.file_plan import wish
    from localllm.planner.types import Drafter, RunSettings

    if plan is not None:
        run = plan.settings
    else:
        slots, drafter = max(1, int(settings.value("parallel"))), Drafter(settings.value("draft"))
        run = RunSettings(n_ctx=0, slots=slots, n_batch=0, n_outputs=0, drafter=drafter)
        run = wish(settings).over(run)
    if settings.value("context"):
        run = replace(run, n_ctx=settings.value("context"))
    kv_type = settings.value("kv_type")
    return run if kv_type == "auto" else run.with_kv_type(kv_type)


def load_spec(path: str, run: RunSettings, *, n_threads: int = 0, n_mtp_layers: int = 0) -> LoadSpec:
    """What a backend is told to load, from how the model is to be run: the one place that makes one from the other.
    `n_mtp_layers`: draft heads in the file, which llama.cpp counts as layers behind the model's own."""
    from localllm_backends.contract import LoadSpec

    placement, layers = run.placement, run.placement.gpu_layers
    if layers > 0:
        placement = replace(placement, gpu_layers=layers + n_mtp_layers)
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
        placement=placement,
    )


def _within_free(
    local: LocalModel,
    settings: Settings,
    purpose: Purpose,
    second: LocalModel | None,
    plan: Plan | None,
    free: int | None,
) -> tuple[Plan | None, int]:
    """(the plan, what it takes of the system's memory). A context nobody chose is halved until the memory guard would
    let it load in `free` bytes; what still is too large is refused when it is loaded, as others may have gone by then."""
    from localllm.device.detect import detect

    discrete = detect().kind == "discrete"

    def takes(plan: Plan | None) -> int:
        # A graphics card's own memory ends in an error when it is full; the system's ends in swapping.
        if plan is None:
            return 0 if discrete else local.size_bytes
        return plan.memory.host_bytes if discrete else plan.memory.total_bytes

    while plan is not None and free is not None and takes(plan) > free and settings["context"].automatic:
        settings = settings.lowered("context", max(plan.settings.n_ctx // 2, _LEAST_CONTEXT))
        smaller = plan_local(local, settings, purpose, second)
        if smaller is None or smaller.settings.n_ctx >= plan.settings.n_ctx:
            break
        plan = smaller
    return plan, takes(plan)


def _left_bytes(plan: Plan | None, planned: int, free: int | None) -> int:
    """What is left beside the model where its projector would be: of the accelerator's pool, and of what is free."""
    left = plan.memory.limit_bytes - plan.memory.total_bytes if plan is not None and plan.memory.limit_bytes else None
    apart = plan is not None and plan.memory.host_bytes > 0
    beside = None if free is None or apart else free - planned
    return min(n for n in (left, beside, 1 << 62) if n is not None)


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


def pooled_use(local: LocalModel) -> str | None:
    """What files make whose header names a pooling or classes: "embeds" (vectors) or "ranks" (scores); None for text."""
    from localllm.errors import ModelFileError
    from localllm.library.catalog import read_header

    if local.format != "gguf":
        return None
    try:
        header = read_header(local.path)
    except ModelFileError:
        return None  # the engine says what is wrong with it
    if header.metadata.get(f"{header.architecture}.classifier.output_labels"):
        return "ranks"
    pooling = header.metadata.get(f"{header.architecture}.pooling_type")
    return _POOLINGS.get(pooling) if isinstance(pooling, int) else None


def _embedding(local: LocalModel, settings: Settings) -> Launch:
    from localllm import paths
    from localllm.engine.worker.client import WorkerOptions
    from localllm.engine.worker.embedding import EmbeddingOptions
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
        hang_s=60.0 * settings.value("hang_min"),
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
    from localllm.cli.compose.file_plan import plan_file

    plan = plan_file(local, settings, purpose, second)
    if plan is not None and plan.fits == "no":
        need, limit = plan.memory.total_bytes, plan.memory.limit_bytes
        raise DoesNotFitError(
            f"{local.name} needs {need / 1e9:.1f} GB with a context of {plan.settings.n_ctx:,} tokens, "
            f"and this machine has {limit / 1e9:.1f} GB usable"
        )
    return plan
