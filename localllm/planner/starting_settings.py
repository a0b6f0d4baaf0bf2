"""Settings to start planning a file from: those that follow from the request and from what is
fixed. Pure.

plan.py then settles the KV type, the step size and the placement of layers by what fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from localllm.device.accelerators import KINDS
from localllm.device.types import Device
from localllm.planner import kernels, kv_sizes, layer_bytes, memory, scoring
from localllm.planner.bytes_per_token import facts
from localllm.planner.placement_search import FREE, OffloadOptions
from localllm.planner.projector import listed_bytes
from localllm.planner.quality import KvPrecision
from localllm.planner.speed import Measured
from localllm.planner.types import (
    DEFAULT_SLOTS,
    USUAL,
    CompanionDrafter,
    DraftChoice,
    RunSettings,
    Workload,
    backend_of,
)
from localllm_backends.placement import Placement
from localllm_catalog.types import Model, Variant

# Windowed caches and recurrent states cost memory per sequence, so those models get fewer sequences
# by default.
_SLOTS_PER_SEQUENCE_STATE = 4
# Rows of logits that a step may request for each sequence and its draft, and the limit on all of
# them. The limit bounds the step's buffer.
_OUTPUTS_PER_SLOT = 16
_MAX_OUTPUTS = 64
# Purposes with short turns, which are quickly read again.
_SHORT_TURNS = ("chat", "reasoning")


@dataclass(frozen=True, slots=True)
class Overrides:
    """Settings, measurements and engines that the user or the machine has fixed ("" / 0 / None =
    free).

    - `measured`: measurements on this machine.
    - `backends`: available engines.
    - `kv_evidence`: measured cost of KV types on this very model.
    - `draft`: "auto", "off", "ngram", "mtp" or the name of a second model, which is then also given
      as `draft_model`.
    - `companion`: a trained drafter for the model, requested or found next to it.
    - `companion_found`: it was found, not requested.
    - `offload`: fixed placement of layers and experts.
    - `sees`, `hears`: the projector is loaded too, for images or sounds.
    - `too_new`: the models (id, reason) whose GGUF files this machine's llama.cpp can't read.
    """

    measured: tuple[Measured, ...] = ()
    backends: tuple[str, ...] = ()
    kv_type: str = ""
    kv_evidence: tuple[KvPrecision, ...] = ()
    slots: int = 0
    draft: str = ""
    draft_model: Model | None = None
    companion: CompanionDrafter | None = None
    companion_found: bool = False
    offload: OffloadOptions = FREE
    sees: bool = False
    hears: bool = False
    too_new: tuple[tuple[str, str], ...] = ()


NO_OVERRIDES = Overrides()


def context_for(model: Model, workload: Workload) -> int:
    """Return the tokens of context to serve, × parallel. This is the requested context, else the
    purpose's default within the model's native context."""
    purpose_ctx = scoring.NEEDS[workload.purpose].context
    requested_ctx = workload.context or min(purpose_ctx, model.native_context or 8192)
    return kv_sizes.pad(requested_ctx * max(1, workload.parallel))


def settings_for(
    device: Device, model: Model, variant: Variant, workload: Workload, overrides: Overrides
) -> RunSettings:
    """Return the settings of `variant` on `device` before plan.py settles the KV type and the
    placement."""
    backend = backend_of(variant)
    # 8 slots if an idle one is free, 4 if each has its own window or state.
    default_slots = _SLOTS_PER_SEQUENCE_STATE if facts(model).is_stateful else DEFAULT_SLOTS
    slots = overrides.slots or max(default_slots, workload.parallel)
    drafter = _drafter(variant, overrides)
    settings = RunSettings(
        n_ctx=context_for(model, workload),
        slots=slots,
        spare=memory.spare_sequences(model, variant, heads=drafter.reads_hidden_states),
        n_outputs=min(_MAX_OUTPUTS, slots * _OUTPUTS_PER_SLOT),
        drafter=drafter,
        n_rewind=memory.rewind_for(model, drafter) if backend.snapshots else 0,
        placement=Placement(layout=kernels.layout(device, model, variant, workload)),
        scores_at_once=backend.scores_at_once,
    )
    if layer_bytes.disk_bytes(model, variant, USUAL):
        settings = settings.placed(tables="disk")
    if KINDS[device.accelerator].reads_weights and backend.splits:
        settings = settings.placed(weights="read")
    if overrides.sees or overrides.hears:
        settings = replace(settings, projector_bytes=listed_bytes(model, variant))
    return settings


def _drafter(variant: Variant, overrides: Overrides) -> DraftChoice:
    draft_files = None
    if overrides.draft_model is not None:
        draft_files = draft_pair(overrides.draft_model, variant)
    companion = overrides.companion if backend_of(variant).trained_drafters else None
    return DraftChoice(overrides.draft or "auto", draft_files, companion, overrides.companion_found)


def rereads_turns(model: Model, variant: Variant, settings: RunSettings) -> bool:
    """Return whether our llama.cpp backend must read a conversation again at each turn.

    With draft heads or a drafter, it has no spare sequence, and keeps a model with windows or
    states only as a full snapshot. A turn that drops the previous thoughts no longer matches it.
    """
    if not backend_of(variant).spare_sequence:
        return False
    return settings.drafter.reads_hidden_states and facts(model).is_stateful


def available_drafts(
    device: Device, model: Model, variant: Variant, workload: Workload, overrides: Overrides
) -> Overrides | None:
    """Return `overrides` with the drafter to use without a request: one that was found, else heads
    in the file. Returns None without a usable drafter.

    Heads gain no speed on a CPU. A model with windows or states gets them only for one stream with
    short turns (`rereads_turns`).
    """
    if overrides.companion_found:
        return overrides
    if overrides.draft not in ("", "auto") or overrides.companion is not None:
        return None
    has_heads = model.mtp_layers and variant.mtp_bytes and backend_of(variant).draft_heads
    if not has_heads or device.accelerator == "cpu":
        return None
    if facts(model).is_stateful:
        n_streams = max(overrides.slots, workload.parallel)
        if n_streams > 1 or workload.purpose not in _SHORT_TURNS:
            return None
    return replace(overrides, draft="mtp", companion_found=True)


def draft_pair(small: Model, variant: Variant) -> tuple[Model, Variant] | None:
    """Return `small` with its files that could draft for `variant` on the same engine. Returns None
    without such files."""
    files = [v for v in small.variants if backend_of(v) == backend_of(variant)]
    if not files:
        return None
    return small, typical(files)


def typical(variants: Sequence[Variant]) -> Variant:
    """Return the variant that users most often mean: Q4_K_M or similar, else the one of median
    size."""
    usual = ("Q4_K_M", "UD-Q4_K_M", "MXFP4", "UD-Q4_K_XL", "4bit")
    listed = [v for v in variants if v.quant in usual]
    if listed:
        return min(listed, key=lambda v: usual.index(v.quant))
    ordered = sorted(variants, key=attrgetter("file_bytes"))
    return ordered[len(ordered) // 2]
