"""One Variant on one Device as a Plan: which settings fit it, what they cost, and how fast that is. Pure.

The settings are made here and nowhere else, and travel whole: memory, speed, and the loader read the same value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from localllm.device.types import Device
from localllm.planner import memory, needs, quality, speed
from localllm.planner.facts import facts
from localllm.planner.needs import Need
from localllm.planner.speed import Measured
from localllm.planner.types import (
    DEFAULT_BATCH,
    DEFAULT_SLOTS,
    Drafter,
    Fits,
    MemoryNeed,
    Plan,
    Range,
    RunSettings,
    Workload,
    backend_for,
)
from localllm_catalog.types import Model, Variant

# Tokens of one step on a processor, where longer ones only make others wait.
CPU_BATCH = 256
# A plan this close to the limit leaves nothing for a longer prompt's buffers or another program: "tight".
_TIGHT_SHARE = 0.93
# In the contract's words, which both backends know: for MLX they mean 8 and 4 bits in its own groups.
_KV_TYPES = ("f16", "q8_0", "q4_0")
# Windowed caches and recurrent states cost memory per sequence, so those models get fewer by default.
_SLOTS_PER_SEQUENCE_STATE = 4
# Rows of logits a step may ask for: each sequence's own and its draft's, within what a step's buffer should cost.
_OUTPUTS_PER_SLOT = 16
_MOST_OUTPUTS = 64
# Beyond a prompt of this length its own speed is predicted for the first token, not that of the published figure.
_PREFILL_PROMPT_TOKENS = 2048
# Points taken off per point of uncertainty beyond a measured model's: an unrated newcomer does not outrank known ones.
_DOUBT = 1.25
_KNOWN_SPREAD = 1.5


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the person or the machine has fixed: measurements, engines at hand, and settings ("" / 0 / None = free).

    `draft`: "auto", "off", "ngram", "mtp" or the name of a second model, which is then given as `draft_model`.
    """

    measured: tuple[Measured, ...] = ()
    backends: tuple[str, ...] = ()
    kv_type: str = ""
    slots: int = 0
    draft: str = ""
    draft_model: Model | None = None


NOTHING_FIXED = Overrides()


def default_slots(model: Model, parallel: int = 1) -> int:
    """Sequences to hold: 8 where an idle one costs nothing, 4 where each has its own window or state."""
    return max(_SLOTS_PER_SEQUENCE_STATE if facts(model).is_stateful else DEFAULT_SLOTS, parallel)


def context_for(model: Model, workload: Workload) -> int:
    """Tokens to serve: what was asked, else the purpose's default within the model's native context, × parallel."""
    wanted = workload.context or min(needs.NEEDS[workload.purpose].context, model.native_context or 8192)
    return memory.padded_context(wanted * max(1, workload.parallel))


def settings_for(
    device: Device, model: Model, variant: Variant, workload: Workload, overrides: Overrides
) -> RunSettings:
    """How `variant` is run on `device`, before its KV type and its layers' places are settled by what fits."""
    slots = overrides.slots or default_slots(model, workload.parallel)
    drafter = _drafter(variant, overrides)
    return RunSettings(
        n_ctx=context_for(model, workload),
        slots=slots,
        n_batch=CPU_BATCH if device.accelerator == "cpu" else DEFAULT_BATCH,
        n_outputs=min(_MOST_OUTPUTS, slots * _OUTPUTS_PER_SLOT),
        n_rewind=memory.rewind_for_heads(model) if drafter.is_mtp else 0,
        drafter=drafter,
    )


def _drafter(variant: Variant, overrides: Overrides) -> Drafter:
    second = overrides.draft_model
    pair = draft_pair(second, variant) if second is not None else None
    return Drafter(overrides.draft or "auto", pair)


def draft_pair(small: Model, variant: Variant) -> tuple[Model, Variant] | None:
    """`small` in the files that would draft for `variant`, on the same engine; None where it has none."""
    files = [v for v in small.variants if backend_for(v) == backend_for(variant)]
    return (small, typical(files)) if files else None


def typical(variants: Sequence[Variant]) -> Variant:
    """The variant people ask about: Q4_K_M or its like, else the one nearest to 4.8 bits."""
    for quant in ("Q4_K_M", "UD-Q4_K_M", "MXFP4", "UD-Q4_K_XL", "4bit"):
        for variant in variants:
            if variant.quant == quant:
                return variant
    ordered = sorted(variants, key=lambda v: v.file_bytes)
    return ordered[len(ordered) // 2]


# --- does it fit ----------------------------------------------------------------------------------------------------


def verdict(device: Device, need: MemoryNeed, *, split: bool = False) -> Fits:
    """yes / tight (needs more than is free now, or nearly all) / split (part in host memory) / no."""
    pool = device.memory
    if need.total_bytes > pool.limit_bytes:
        return "no"
    if need.host_bytes and device.host is not None and need.host_bytes > device.host.limit_bytes:
        return "no"
    if split:
        return "split"
    if need.total_bytes > pool.available_bytes or need.total_bytes > _TIGHT_SHARE * pool.limit_bytes:
        return "tight"
    return "yes"


def _settle(
    device: Device, model: Model, variant: Variant, settings: RunSettings, kv_type: str
) -> tuple[RunSettings, MemoryNeed, Fits]:
    """`settings` as they fit: whole with the least quantised KV type that does, else split over two memories, else not.

    `kv_type`: the only one to consider ("" = any).
    """
    wanted = (kv_type,) if kv_type else _KV_TYPES
    kinds = tuple(k for k in wanted if memory.kv_type_allowed(model, k, backend_for(variant))) or ("f16",)
    for kind in kinds:
        tried = settings.with_kv_type(kind)
        need = memory.need(model, variant, tried, device)
        fits = verdict(device, need)
        if fits != "no":
            return tried, need, fits
    if device.kind == "discrete" and device.host is not None and variant.format == "gguf":
        tried = _offloaded(device, model, variant, settings.with_kv_type(kinds[min(1, len(kinds) - 1)]))
        need = memory.need(model, variant, tried, device)
        fits = verdict(device, need, split=True)
        if fits != "no":
            return tried, need, fits
    tried = settings.with_kv_type(kinds[0])
    return tried, memory.need(model, variant, tried, device), "no"


def _offloaded(device: Device, model: Model, variant: Variant, settings: RunSettings) -> RunSettings:
    """`settings` with the most layers that a discrete card holds beside host memory (0 = not even one)."""
    low, high = 0, len(model.layers) + 1
    while low < high:
        middle = (low + high + 1) // 2
        need = memory.need(model, variant, replace(settings, n_gpu_layers=middle), device)
        low, high = (middle, high) if need.total_bytes <= device.memory.limit_bytes else (low, middle - 1)
    return replace(settings, n_gpu_layers=low)


def max_context(device: Device, plan: Plan) -> int:
    """The longest context, in tokens, that fits the hard limit with this plan's settings (0 = not even 256)."""
    low, high = 0, (plan.model.native_context or 131072) // memory.CONTEXT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        longer = replace(plan.settings, n_ctx=middle * memory.CONTEXT_STEP)
        need = memory.need(plan.model, plan.variant, longer, device)
        low, high = (middle, high) if verdict(device, need) != "no" else (low, middle - 1)
    return low * memory.CONTEXT_STEP


# --- the plan -------------------------------------------------------------------------------------------------------


def plan_for(
    device: Device, model: Model, variant: Variant, workload: Workload, *, overrides: Overrides = NOTHING_FIXED
) -> Plan:
    """The best Plan for exactly this variant, whether or not it fits (`fits` says).

    KV is f16 when that fits, else the least quantised type that does; on a discrete card with host memory, layers
    that do not fit go to the host.
    """
    wanted = settings_for(device, model, variant, workload, overrides)
    settings, need, fits = _settle(device, model, variant, wanted, overrides.kv_type)
    purpose = needs.need_of(workload)
    speeds = _speeds(device, model, variant, settings, workload, overrides.measured)
    rating = quality.rate(model)
    lost = quality.format_cost(model, variant) + quality.kv_cost(settings.kv_type)
    second = settings.drafter.second
    plan = Plan(
        model=model,
        variant=variant,
        settings=settings,
        fits=fits,
        memory=need,
        decode_tok_s=speeds.decode,
        decode_tok_s_full=speeds.full,
        prefill_tok_s=speeds.prefill,
        ttft_s=speeds.ttft,
        ttft_cached_s=speeds.cached,
        load_s=speed.load_time(variant),
        quality=round(rating.points - lost, 2),
        quality_basis=rating.basis,
        kv_bytes_per_1k=memory.kv_bytes_per_1k_tokens(model, settings.kv_type),
        draft_gain=speed.draft_gain(device, (model, variant), second) if second is not None else 1.0,
    )
    return replace(plan, score=round(score(plan, purpose), 4))


@dataclass(frozen=True, slots=True)
class _Speeds:
    decode: Range
    full: Range
    prefill: Range
    ttft: Range
    cached: Range | None


def _speeds(
    device: Device,
    model: Model,
    variant: Variant,
    settings: RunSettings,
    workload: Workload,
    measured: Sequence[Measured],
) -> _Speeds:
    """Decode with the context empty and full, prefill, and the wait for the first token with and without a cache."""
    purpose = needs.need_of(workload)
    per_request = settings.n_ctx // max(1, workload.parallel)
    prompt = min(purpose.prompt_tokens, per_request)
    decode = speed.decode(device, model, variant, settings, measured=measured)
    full = speed.decode(device, model, variant, settings, depth=per_request, measured=measured)

    def prefill(tokens: int) -> Range:
        return speed.prefill(device, model, variant, settings, prompt_tokens=tokens, measured=measured)

    usual = prefill(min(_PREFILL_PROMPT_TOKENS, prompt))
    over_prompt = prefill(prompt) if prompt > _PREFILL_PROMPT_TOKENS else usual
    cached = None
    if purpose.cached_tokens:
        cached = speed.ttft(over_prompt, decode, prompt, cached_tokens=purpose.cached_tokens)
    return _Speeds(decode, full, usual, speed.ttft(over_prompt, decode, prompt), cached)


def score(plan: Plan, need: Need) -> float:
    """Points: quality, less 5 for every halving of speed below what feels good, plus up to 3 for spare speed.

    The wait for the first token counts the same way at 2 points a doubling; a plan that fits only tightly loses 2,
    one split over two memories 1 more than its speed says.
    """
    points = plan.quality
    points -= _DOUBT * max(0.0, quality.rate(plan.model).spread - _KNOWN_SPREAD)
    rate = plan.decode_tok_s.value
    doublings = math.log2(rate / need.good_tok_s)
    points += 5.0 * doublings if doublings < 0 else min(3.0, 1.0 * doublings)
    wait = plan.ttft_cached_s or plan.ttft_s
    points -= 2.0 * max(0.0, math.log2(wait.value / need.ttft_good_s))
    if plan.fits == "tight":
        points -= 2.0
    if plan.fits == "split":
        points -= 1.0
    return points
