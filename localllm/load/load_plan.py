"""LoadPlan: everything needed to load one model. It is made once and then passed on unchanged.

1. `library.resolve` finds the files, and `library.catalog` reads them once.
2. `plan_inputs` collects the planner's inputs, and `planner.plan` makes the Plan.
3. `options` makes the options for the worker process and its backend.
4. A `Supervisor` passes them to the worker process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from localllm.device import detect
from localllm.device.cards import with_released_bytes, with_share
from localllm.device.types import Device
from localllm.engine.worker import backends
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.embedding import EmbeddingOptions
from localllm.errors import DoesNotFitError, ModelFileError, UnsupportedError
from localllm.library import file_kinds
from localllm.library.catalog import load_catalog, open_model
from localllm.library.resolve import resolve
from localllm.library.types import LocalModel
from localllm.load import readable_models
from localllm.load.adapters import adapter_named, with_adapter_bytes
from localllm.load.drafters_and_projector import (
    MediaProjector,
    chosen_drafter,
    projector_for,
    without_projector,
)
from localllm.load.options import MemoryShare, headroom_bytes, pooled_options, worker_options
from localllm.load.plan_inputs import PlanInputs, plan_inputs
from localllm.memory.system import free_for_models
from localllm.memory.verdict import has_room
from localllm.planner.types import Plan
from localllm.settings import Settings
from localllm_catalog import kinds
from localllm_catalog.types import Purpose

# Estimated buffers of an embedding model: enough for models of up to 2,048 tokens.
_EMBEDDING_BUFFERS_BYTES = 250_000_000
# The second attempt after a load ran out of memory uses this share of the planned memory. If less
# memory is available by then, it uses this share of the available memory.
_RETRY_SHARE = 0.9


def _no_smaller_plan() -> LoadPlan | None:
    return None


@dataclass(frozen=True)
class LoadPlan:
    """A model that is ready to be loaded.

    `name`: the name for clients.
    `options`: the options of the worker, made from `plan`.
    `plan`: None if the header lacks data for planning.
    `device`: the machine that it was planned for.
    `embedding`: the options of an embedding model, or of a reranker if `ranks`.
    `smaller`: makes a LoadPlan with less memory after a load ran out of it (None: can't be
    reduced).
    """

    name: str
    local: LocalModel
    options: WorkerOptions
    plan: Plan | None
    embedding: EmbeddingOptions | None = None
    ranks: bool = False
    projector: MediaProjector = field(default_factory=MediaProjector)
    smaller: Callable[[], LoadPlan | None] = _no_smaller_plan
    device: Device | None = None

    @property
    def needs_bytes(self) -> int:
        """Bytes the model needs while loaded: as planned, or the size of its files without a
        plan."""
        if self.plan is not None:
            return self.plan.memory.total_bytes + self.projector.need_bytes
        buffers = 0
        if self.embedding is not None:
            buffers = _EMBEDDING_BUFFERS_BYTES
        return self.projector.need_bytes + self.local.size_bytes + buffers

    @property
    def fills_in(self) -> bool:
        """True if the model can complete code between a prefix and a suffix."""
        return self.plan is not None and bool(self.plan.model.fim)


def resolved(reference: str | None, settings: Settings) -> LocalModel:
    """Find the files of MODEL, or of the `model` setting. Raises ModelNotFoundError and
    ModelFileError."""
    return resolve(reference or settings.value("model"))


def load_plan_named(
    reference: str | None, settings: Settings, purpose: Purpose = "chat"
) -> LoadPlan:
    """Make the LoadPlan of MODEL.

    Raises ModelNotFoundError, ModelFileError, BackendMissingError, DoesNotFitError or UsageError.
    """
    return make_load_plan(resolved(reference, settings), settings, purpose)


def make_load_plan(
    local: LocalModel,
    settings: Settings,
    purpose: Purpose = "chat",
    *,
    n_models: int = 1,
    spare_bytes: int = 0,
    ran_out: Plan | None = None,
) -> LoadPlan:
    """Plan an installed model on this machine, and make the worker options for exactly that plan.

    `n_models`: the number of models that share the memory for cached prefixes.
    `spare_bytes`: memory that other models would release to make room.
    `ran_out`: an earlier plan that ran out of memory; the new plan uses a tenth less.

    Raises the same errors as `load_plan_named`.
    """
    # Fail before planning if no backend runs these files, or if its package is missing.
    backend = backends.for_path(str(local.path), settings.value("backend"))
    catalog = load_catalog()
    opened = open_model(local, catalog)
    _check_makes_text(local)
    header = opened.header
    kind = "model"
    if header:
        kind = kinds.of_header(header.metadata, len(header.tensors))
    if header and kind != "model":
        readable_models.check(header.architecture, local.name)
        return _plan_of_pooling_model(local, settings, ranks=kind == "reranker")
    adapters = tuple(
        adapter_named(named, opened, backend.declaration) for named in settings.value("lora")
    )
    opened = replace(opened, model=with_adapter_bytes(opened.model, adapters))
    drafter = chosen_drafter(opened, catalog, settings)
    projector = projector_for(local, backend, settings)
    inputs = plan_inputs(opened, catalog, settings, purpose, drafter)
    if inputs is not None:
        inputs = replace(inputs, device=_device_with(inputs.device, spare_bytes, ran_out))
    memory_fit = _MemoryFit(local, inputs, settings, spare_bytes)
    plan, projector = memory_fit.planned(projector)
    memory_share = MemoryShare(memory_fit.planned_bytes(plan, projector), n_models)
    options = worker_options(local, plan, settings, drafter, projector, adapters, memory_share)
    load = LoadPlan(local.name, local, options, plan, projector=projector, device=memory_fit.device)
    if ran_out is not None:
        return load
    return replace(load, smaller=partial(_retry_plan, local, settings, purpose, n_models, plan))


def _check_makes_text(local: LocalModel) -> None:
    """Raise ModelFileError for an MLX folder that makes embeddings or scores: MLX makes text."""
    kind = "model"
    if local.is_folder:
        kind = file_kinds.of_folder(local.path)
    if kind != "model":
        kind_text = {"embedding": "an embedding model"}.get(kind, f"a {kind}")
        raise ModelFileError(
            f"{local.name} is {kind_text}, which can't be run from an MLX folder",
            hint="pull a GGUF file of this model",
        )


def _device_with(device: Device, released_bytes: int, ran_out: Plan | None) -> Device:
    """Return `device` with the memory that other models would release.

    If the plan `ran_out` ran out of memory, the device's memory is limited to less than that plan
    used.
    """
    if released_bytes:
        device = with_released_bytes(device, released_bytes)
    if ran_out is not None:
        max_bytes = _RETRY_SHARE * min(ran_out.memory.total_bytes, device.usable_bytes)
        device = with_share(device, max_bytes / device.usable_bytes)
    return device


def _retry_plan(
    local: LocalModel, settings: Settings, purpose: Purpose, n_models: int, ran_out: Plan | None
) -> LoadPlan | None:
    if ran_out is None:
        return None
    try:
        load = make_load_plan(local, settings, purpose, n_models=n_models, ran_out=ran_out)
    except DoesNotFitError:
        return None
    if load.plan is not None:
        return load
    return None


# -- the plan that fits ----------------------------------------------------------------------------

_UNLIMITED = 1 << 62


class _MemoryFit:
    """Free system memory for a model (`free_bytes`, None: unknown), and the plan that fits in
    it."""

    def __init__(
        self,
        local: LocalModel,
        inputs: PlanInputs | None,
        settings: Settings,
        spare_bytes: int = 0,
    ) -> None:
        self._local = local
        self._inputs = inputs
        self._settings = settings
        if inputs is not None:
            self.device = inputs.device
        else:
            self.device = detect.detect()
        free_bytes = free_for_models(headroom_bytes(settings))
        if free_bytes is not None:
            free_bytes += spare_bytes
        self.free_bytes = free_bytes

    def system_bytes(self, plan: Plan | None) -> int:
        """Bytes of system memory that the plan needs, without the memory of a card or carve-out."""
        if self.device.kind == "discrete":
            return 0 if plan is None else plan.memory.host_bytes
        total_bytes = self._local.size_bytes
        if plan is not None:
            total_bytes = plan.memory.total_bytes
        return max(0, total_bytes - self.device.memory.carve_out_bytes)

    def planned_bytes(self, plan: Plan | None, projector: MediaProjector) -> int:
        """Bytes of system memory, including `projector`.

        Returns 0 if other machines hold part of the model, because their share is not known here.
        """
        if self._settings.value("workers"):
            return 0
        n_bytes = self.system_bytes(plan)
        if n_bytes == 0:
            return 0
        return n_bytes + projector.need_bytes

    def planned(self, projector: MediaProjector) -> tuple[Plan | None, MediaProjector]:
        """Return the plan, and the projector if the plan leaves enough memory for it."""
        plan = self._plan(projector.need_bytes)
        left_bytes = self._bytes_left(plan)
        if projector.file is None or left_bytes >= projector.need_bytes:
            return plan, projector
        return self._plan(0), without_projector(projector, self._settings, left_bytes)

    def _plan(self, projector_bytes: int) -> Plan | None:
        """Return the plan whose context is reduced until the memory guard would accept the load.

        `projector_bytes` are needed in addition to the model. A plan that is still too large is
        rejected at load time, because other models may be unloaded by then.

        Returns None if the header lacks data for planning. Also returns None if the plan does not
        fit but other machines hold layers too (`--with`). Their memory is unknown here, and
        llama.cpp splits the model by each device's free memory. Raises DoesNotFitError if even the
        smallest context does not fit.
        """
        if self._inputs is None:
            return None

        def fits(plan: Plan) -> bool:
            if self.free_bytes is None:
                return True
            needed_bytes = self.system_bytes(plan) + projector_bytes
            return has_room(needed_bytes, self.free_bytes)

        plan = self._inputs.plan(fits)
        if plan.fits != "no":
            return plan
        if self._settings.value("workers"):
            return None
        planned_bytes = plan.memory.total_bytes
        limit_bytes = plan.memory.limit_bytes
        raise DoesNotFitError(
            f"{self._local.name} needs {planned_bytes / 1e9:.1f} GB with a context of "
            f"{plan.settings.n_ctx:,} tokens, but this machine has "
            f"{limit_bytes / 1e9:.1f} GB usable "
            f"({'; '.join(self.device.accounts)})"
        )

    def _bytes_left(self, plan: Plan | None) -> int:
        """Bytes left for the projector after the model is loaded.

        This is the minimum over the accelerator's pool and the free system memory.
        """
        limits = [_UNLIMITED]
        if plan is not None and plan.memory.limit_bytes:
            limits.append(plan.memory.limit_bytes - plan.memory.total_bytes)
        if self.free_bytes is not None and (plan is None or plan.memory.host_bytes <= 0):
            limits.append(self.free_bytes - self.system_bytes(plan))
        return min(limits)


# -- embedding models and rerankers ----------------------------------------------------------------


def _plan_of_pooling_model(local: LocalModel, settings: Settings, *, ranks: bool) -> LoadPlan:
    if settings.value("lora"):
        output = "scores" if ranks else "embeddings"
        raise UnsupportedError(
            f"{local.name} generates {output}, but adapters work only with text models",
            hint="set `lora` in the table of the adapter's model",
        )
    planned_bytes = _MemoryFit(local, None, settings).system_bytes(None) + _EMBEDDING_BUFFERS_BYTES
    options, embedding = pooled_options(local, settings, planned_bytes)
    return LoadPlan(local.name, local, options, None, embedding, ranks)
