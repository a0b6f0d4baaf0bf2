"""One Variant on one Device as a Plan: which settings fit it, what they cost, and how fast that is. Pure.

The settings are made here and nowhere else, and travel whole: memory, speed, and the loader read the same value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from localllm.device.types import Device
from localllm.planner import (
    decode_cost,
    drafting,
    kernels,
    memory,
    needs,
    places,
    placing,
    prefill_cost,
    quality,
    speed,
)
from localllm.planner.needs import SPLIT_COST, Need, score
from localllm.planner.placing import FREE, OffloadOptions
from localllm.planner.projector import listed_bytes
from localllm.planner.quality import KvPrecision
from localllm.planner.speed import Measured
from localllm.planner.streams import facts
from localllm.planner.types import (
    DEFAULT_BATCH,
    DEFAULT_SLOTS,
    TIGHT_SHARE,
    USUAL,
    CompanionDrafter,
    DraftChoice,
    Fits,
    MemoryNeed,
    Plan,
    Range,
    RunSettings,
    Workload,
    backend_of,
)
from localllm_backends.placement import Placement
from localllm_catalog.types import Model, Variant

# Tokens of one step on a processor at most: a prompt alone is read in such steps, beside others in shorter ones.
CPU_BATCH = 512
# Windowed caches and recurrent states cost memory per sequence, so those models get fewer by default.
_SLOTS_PER_SEQUENCE_STATE = 4
# Rows of logits a step may ask for: each sequence's own and its draft's, within what a step's buffer should cost.
_OUTPUTS_PER_SLOT = 16
_MOST_OUTPUTS = 64
# Beyond a prompt of this length its own speed is predicted for the first token, not that of the published figure.
_PREFILL_PROMPT_TOKENS = 2048
# An answer that is this much slower at most is the price of reading prompts in larger steps beside system memory.
_AS_FAST = 0.97


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the person or the machine has fixed: measurements, engines at hand, and settings ("" / 0 / None = free).

    `kv_evidence`: what KV types were measured to cost on the very model that is planned.
    `draft`: "auto", "off", "ngram", "mtp" or the name of a second model, which is then given as `draft_model`;
    `companion`: a drafter trained for the model, found beside it or asked for. `offload`: where somebody insists on
    having layers and experts. `sees`: its image projector is loaded too.
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
        spare=memory.spare_sequences(model, variant, heads=drafter.reads_along),
        n_batch=CPU_BATCH if device.accelerator == "cpu" else DEFAULT_BATCH,
        n_outputs=min(_MOST_OUTPUTS, slots * _OUTPUTS_PER_SLOT),
        n_rewind=memory.rewind_for(model, drafter) if backend_of(variant).snapshots else 0,
        drafter=drafter,
        placement=Placement(
            tables="disk" if _has_tables(model, variant) else USUAL.placement.tables,
            weights="read" if device.accelerator == "rocm" and backend_of(variant).splits else USUAL.placement.weights,
            layout=kernels.layout(device, model, variant, workload),
        ),
        projector_bytes=listed_bytes(model, variant) if overrides.sees else 0,
        scores_at_once=backend_of(variant).scores_at_once,
    )


def _has_tables(model: Model, variant: Variant) -> bool:
    """True where the files hold tables that are better left on the disk."""
    return places.disk_bytes(model, variant, USUAL) > 0


def _drafter(variant: Variant, overrides: Overrides) -> DraftChoice:
    second = overrides.draft_model
    pair = draft_pair(second, variant) if second is not None else None
    companion = overrides.companion if backend_of(variant).draft_heads else None
    return DraftChoice(overrides.draft or "auto", pair, companion, overrides.companion_found)


def draft_pair(small: Model, variant: Variant) -> tuple[Model, Variant] | None:
    """`small` in the files that would draft for `variant`, on the same engine; None where it has none."""
    files = [v for v in small.variants if backend_of(v) == backend_of(variant)]
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
    """yes / tight (needs more than is free now, or nearly all of what may be loaded) / split (part in host memory) / no."""
    if not placing.fits(device, need):
        return "no"
    if split:
        return "split"
    most = min(need.limit_bytes, device.memory.loadable_bytes)
    if not placing.is_free(device, need) or need.total_bytes > TIGHT_SHARE * most:
        return "tight"
    return "yes"


_Settled = tuple[RunSettings, MemoryNeed, Fits]
_UNKNOWN = MemoryNeed(0, 0, 0, 0, 0, 0, 0)


def _whole(device: Device, model: Model, variant: Variant, settings: RunSettings, offload: OffloadOptions) -> _Settled:
    """`settings` whole on their cards, and whether they fit there."""
    used = places.used(device, settings.placement)
    tried = placing.over_cards(used, model, variant, offload.over(settings))
    need = memory.need(model, variant, tried, used)
    return tried, need, verdict(used, need, split=tried.placement.is_split and device.kind == "discrete")


def _best(
    device: Device,
    model: Model,
    variant: Variant,
    by_kv_type: Sequence[RunSettings],
    purpose: Need,
    offload: OffloadOptions,
    planned: Callable[[_Settled], Plan],
    read: Callable[[Plan], Plan],
) -> Plan | None:
    """Of all ways `settings` fit, the plan that has the best score, of several cards the fastest that are free: with each KV type,
    whole on each choice of cards, or divided with system memory, each with the steps that it is best `read` in. None where
    none fits.

    They are looked at in the order of what they could be at best: with room to spare, nothing in system memory, and prompts
    in steps that cost no points. What is behind the best so far is not looked at."""
    free = offload.tensor_split is None and by_kv_type[0].placement.split_mode == "layer"
    chosen = placing.choices(device) if free else ((),)
    splits = device.kind == "discrete" and device.host is not None and backend_of(variant).splits
    ways: list[tuple[Plan, Plan, RunSettings, bool]] = []

    def rank(plan: Plan) -> tuple[float, float, float]:
        if len(chosen) == 1:
            return 0, plan.score, plan.decode_tok_s.value
        return (
            placing.is_free(places.used(device, plan.settings.placement), plan.memory),
            plan.decode_tok_s.value,
            plan.score,
        )

    for cards in chosen:
        kinds = [settings.placed(cards=cards) if cards else settings for settings in by_kv_type]
        top = planned((kinds[0], _UNKNOWN, "yes"))
        saved = 0.0 if device.accelerator == "cpu" else needs.prompt_lost(top, purpose)
        for way, divided in [(way, False) for way in kinds] + [(kinds[min(1, len(kinds) - 1)], True)] * splits:
            cost = quality.kv_cost(way.kv_type) - quality.kv_cost(kinds[0].kv_type) + divided * SPLIT_COST
            ways.append((replace(top, score=top.score + saved - cost), top, way, divided))
    best: Plan | None = None
    for most, top, way, divided in sorted(ways, key=lambda one: (not one[3], rank(one[0])), reverse=True):
        if best is not None and rank(most) <= rank(best):
            continue
        if divided:
            found = placing.best_split(device, model, variant, way, offload)
            if found is None:
                continue
            plan = planned((found, memory.need(model, variant, found, device), "split"))
        else:
            settled = _whole(device, model, variant, way, offload)
            if settled[2] == "no":
                continue
            plan = _held(top, settled, purpose) if settled[0].placement == top.settings.placement else planned(settled)
        best = max((best or plan, read(plan)), key=rank)
    return best


def _held(top: Plan, settled: _Settled, purpose: Need) -> Plan:
    """`top`, which lies in the same places and answers as fast, as it was `settled`."""
    settings, need, fits = settled
    cost = quality.kv_cost(settings.kv_type) - quality.kv_cost(top.settings.kv_type)
    plan = replace(top, settings=settings, memory=need, fits=fits, quality=top.quality - cost)
    return replace(plan, score=score(plan, purpose))


def _in_larger_steps(
    device: Device,
    model: Model,
    variant: Variant,
    settled: _Settled,
    prompt_tokens: int,
    offload: OffloadOptions,
) -> _Settled:
    """What was `settled`, with a larger micro-batch where that pays for such a prompt and changes nothing else; of a
    mixture that is divided, experts may make room for it as long as an answer comes about as fast."""
    settings, need, fits = settled
    device = places.used(device, settings.placement)
    if fits == "yes":
        return (*with_larger_micro_batch(device, model, variant, settings, need, prompt_tokens), "yes")
    if fits != "split" or model.experts is None or not offload.is_free:
        return settled
    rate = speed.decode(device, model, variant, settings).value
    for size in larger_micro_batches(device, model, variant, settings, prompt_tokens):
        start = replace(settings.placed(experts_on_host=0, tensor_split=()), n_batch=size)
        found = placing.best_split(device, model, variant, start, offload)
        if found is not None and speed.decode(device, model, variant, found).value >= _AS_FAST * rate:
            return found, memory.need(model, variant, found, device), "split"
    return settled


def _pinned(device: Device, settings: RunSettings, need: MemoryNeed) -> RunSettings:
    """`settings` with weights that are read where CUDA has part of them in system memory and that is free: llama.cpp then keeps them
    in pinned buffers, which prompts' steps are copied to the card from faster than from a mapped file (it says so itself,
    src/llama-model-loader.cpp; where the driver pins no more it takes ordinary memory)."""
    usual = settings.placement.weights == USUAL.placement.weights
    if (
        device.accelerator != "cuda"
        or device.host is None
        or not usual
        or need.host_bytes > device.host.available_bytes
    ):
        return settings
    return settings.placed(weights="read")


def _kv_types(device: Device, variant: Variant, workload: Workload, overrides: Overrides) -> tuple[str, ...]:
    """KV types to try in order, in the contract's words: for MLX they mean 8 and 4 bits in its own groups."""
    mixed = backend_of(variant).mixed_kv and device.accelerator == "cpu"
    return quality.ladder(workload.purpose, overrides.kv_evidence, mixed=mixed)


def max_context(device: Device, plan: Plan) -> int:
    """The longest context, in tokens, that fits the hard limit with this plan's settings (0 = not even 256)."""
    ways = [plan.settings]
    if plan.settings.placement.cards:  # a longer one would be given all cards
        ways.append(plan.settings.placed(cards=(), tensor_split=()))
    return max(_longest(device, plan.model, plan.variant, settings) for settings in ways)


def _longest(device: Device, model: Model, variant: Variant, settings: RunSettings) -> int:
    used = places.used(device, settings.placement)
    low, high = 0, (model.native_context or 131072) // memory.CONTEXT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        longer = placing.over_cards(used, model, variant, replace(settings, n_ctx=middle * memory.CONTEXT_STEP))
        need = memory.need(model, variant, longer, used)
        low, high = (middle, high) if verdict(used, need) != "no" else (low, middle - 1)
    return low * memory.CONTEXT_STEP


# --- the plan -------------------------------------------------------------------------------------------------------


def plan_for(
    device: Device,
    model: Model,
    variant: Variant,
    workload: Workload,
    *,
    overrides: Overrides = NOTHING_FIXED,
    rough: bool = False,
) -> Plan:
    """The best Plan for exactly this variant, whether or not it fits (`fits` says).

    Of all KV types, choices of cards and divisions with system memory that fit, the one with the best score. `rough`: what that
    score depends on, for choosing between files: `decode_tok_s_full` is then that of an empty context, and steps are larger
    only where prompts cost points.
    """
    wanted = settings_for(device, model, variant, workload, overrides)
    types = (overrides.kv_type,) if overrides.kv_type else _kv_types(device, variant, workload, overrides)
    types = tuple(k for k in types if memory.kv_type_allowed(model, k, backend_of(variant))) or ("f16",)
    purpose, offload = needs.need_of(workload), overrides.offload
    prompt = min(purpose.prompt_tokens, wanted.n_ctx // max(1, workload.parallel))

    def larger(settled: _Settled) -> _Settled:
        return _in_larger_steps(device, model, variant, settled, prompt, offload)

    def planned(settled: _Settled, *, rough: bool = True) -> Plan:
        return _planned(device, model, variant, settled, workload, overrides, rough=rough)

    def read(plan: Plan) -> Plan:
        if device.accelerator == "cpu" or not needs.prompt_lost(plan, purpose):
            return plan
        settled = larger((plan.settings, plan.memory, plan.fits))
        return plan if settled[0] == plan.settings else max(plan, planned(settled), key=lambda p: p.score)

    best = _best(device, model, variant, [wanted.with_kv_type(k) for k in types], purpose, offload, planned, read)
    if best is None:
        tried = offload.over(wanted.with_kv_type(types[0]))
        return planned((tried, memory.need(model, variant, tried, device), "no"), rough=rough)
    if rough:
        return best
    settled = best.settings, best.memory, best.fits
    return planned(larger(settled) if best.settings.n_batch == wanted.n_batch else settled, rough=False)


def _planned(
    device: Device,
    model: Model,
    variant: Variant,
    settled: _Settled,
    workload: Workload,
    overrides: Overrides,
    *,
    rough: bool,
) -> Plan:
    """The Plan of what was `settled`, with its speeds and its score."""
    settings, need, fits = settled
    if fits == "split" and not rough:
        settings = _pinned(device, settings, need)
    speeds = _speeds(device, model, variant, settings, workload, overrides.measured, rough=rough)
    rating = quality.rate(model, workload.purpose)
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
        quality_spread=rating.spread,
        is_rated=rating.is_evidence,
        makers_own=rating.makers_own,
        kv_bytes_per_1k=memory.kv_bytes_per_1k_tokens(model, settings.kv_type),
        kv_why=quality.why(settings.kv_type, workload.purpose, overrides.kv_evidence),
        draft_gain=speed.draft_gain(device, (model, variant), second) if second is not None else 1.0,
    )
    drafted = drafting.for_purpose(device, plan, workload)
    plan = plan if drafted is None else replace(plan, drafting=drafted)
    return replace(plan, score=score(plan, needs.need_of(workload)))


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
    *,
    rough: bool,
) -> _Speeds:
    """Decode with the context empty and full, prefill, and the wait for the first token with and without a cache."""
    purpose = needs.need_of(workload)
    per_request = settings.n_ctx // max(1, workload.parallel)
    prompt = min(purpose.prompt_tokens, per_request)
    decode = speed.decode(device, model, variant, settings, measured=measured)
    full = decode
    if not rough:
        full = speed.decode(device, model, variant, settings, depth=per_request, measured=measured)

    def prefill(tokens: int) -> Range:
        return speed.prefill(device, model, variant, settings, prompt_tokens=tokens, measured=measured)

    usual = prefill(min(_PREFILL_PROMPT_TOKENS, prompt))
    over_prompt = prefill(prompt) if prompt > _PREFILL_PROMPT_TOKENS else usual
    cached = None
    if purpose.cached_tokens:
        cached = speed.ttft(over_prompt, decode, prompt, cached_tokens=purpose.cached_tokens)
    return _Speeds(decode, full, usual, speed.ttft(over_prompt, decode, prompt), cached)


MICRO_BATCHES = (DEFAULT_BATCH, 1024, 2048, 4096)
# A doubling that makes a prompt less than this faster is not worth its memory: it is less than the prediction is worth.
_PAYS = 1.05
# Share of what an accelerator may hold that larger steps may take of it, and of the context that one step may fill.
_SHARE_OF_MEMORY = 1 / 16
_SHARE_OF_CONTEXT = 1 / 4
# Intel's Vulkan driver loses its Arc in steps of 2,048 tokens (github.com/ggml-org/llama.cpp/issues/27638).
_MOST_ON_ARC = 1024
# Where buffers grow as steps need them, what takes no more than this for a moment need not pay: each step costs a pause, which a
# small model on a fast device feels.
_NEXT_TO_NOTHING = 1 / 100


def larger_micro_batches(
    device: Device, model: Model, variant: Variant, settings: RunSettings, prompt_tokens: int
) -> Sequence[int]:
    """Micro-batches larger than `settings` has that pay for a prompt of so many tokens on `device`, the largest first.

    A micro-batch reads all weights once: the more tokens share that, the faster is prefill, and the larger are a step's
    buffers. A processor is bound by arithmetic long before."""
    if device.accelerator == "cpu":
        return ()
    hardware = decode_cost.hardware_of(device, backend_of(variant).name)
    held = prefill_cost.prefill_terms(
        model, variant, hardware, prompt_tokens=prompt_tokens, n_batch=settings.n_batch
    ).total_s
    found: list[int] = []
    for size in MICRO_BATCHES:
        if size <= settings.n_batch:
            continue
        if (
            size > _MOST_ON_ARC
            and device.accelerator == "vulkan"
            and re.search(r"\barc\b", f"{device.name} {device.match}".lower())
        ):
            break
        if size > min(prompt_tokens, settings.n_ctx * _SHARE_OF_CONTEXT):
            break
        each = prefill_cost.prefill_terms(model, variant, hardware, prompt_tokens=prompt_tokens, n_batch=size).total_s
        if held < each * _PAYS:
            break
        found.insert(0, size)
        held = each
    return found


def with_larger_micro_batch(
    device: Device, model: Model, variant: Variant, settings: RunSettings, need: MemoryNeed, prompt_tokens: int
) -> tuple[RunSettings, MemoryNeed]:
    """`settings` of a plan that fits with room to spare, and its `need`, with the largest micro-batch that pays and takes
    little; as they are where none does."""
    sizes = [(n, _SHARE_OF_MEMORY) for n in larger_micro_batches(device, model, variant, settings, prompt_tokens)]
    if device.accelerator != "cpu" and backend_of(variant).buffers == "grown":
        most = min(prompt_tokens, int(settings.n_ctx * _SHARE_OF_CONTEXT))
        sizes += [(n, _NEXT_TO_NOTHING) for n in (2048, 1024) if settings.n_batch < n <= most]
    for size, share in sizes:
        tried = replace(settings, n_batch=size)
        taken = memory.need(model, variant, tried, device)
        if taken.total_bytes - need.total_bytes <= share * need.limit_bytes and verdict(device, taken) == "yes":
            return tried, taken
    return settings, need
