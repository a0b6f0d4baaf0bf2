"""From a Device, the models and a Workload to ranked Plans: every variant × KV type × offload, at most eight picks.

Pure and deterministic: the same inputs give the same Plans in the same order. Ranking is a sum of points on the
quality index (localllm/planner/quality.py): the model's rating, minus what format and KV type cost, minus what a
speed below the purpose's good speed costs, plus a little for spare speed and recency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from localllm.device.types import Device
from localllm.planner import drafting, engines, memory, needs, quality, speed, why
from localllm.planner.facts import facts
from localllm.planner.needs import Need
from localllm.planner.speed import Measured
from localllm.planner.types import Fits, MemoryNeed, Plan, Recommendation, Rejected, Workload
from localllm_catalog.types import Model, Variant

MAX_PICKS = 8
_PER_FAMILY = 2
_MOST_LOST_POINTS = 3.0
# Points taken off per point of uncertainty beyond a measured model's: an unrated newcomer does not outrank known ones.
_DOUBT = 1.25
_KNOWN_SPREAD = 1.5
# A plan this close to the limit leaves nothing for a longer prompt's buffers or another program: "tight".
_TIGHT_SHARE = 0.93
# In the contract's words, which both backends know: for MLX they mean 8 and 4 bits in its own groups.
_KV_TYPES = ("f16", "q8_0", "q4_0")
# Windowed caches and recurrent states cost memory per sequence, so those models get fewer by default.
_SLOTS_PER_SEQUENCE_STATE = 4


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the person or the machine has fixed: measurements, engines at hand, and settings ("" / 0 / None = free)."""

    measured: tuple[Measured, ...] = ()
    backends: tuple[str, ...] = ()
    kv_type: str = ""
    slots: int = 0
    draft: str = ""
    quant: str = ""
    disk_bytes_s: float = 0.0
    prefix_cache_bytes: int = 0
    mmproj: bool = False


def backends_of(device: Device) -> tuple[str, ...]:
    """Engines that exist for this kind of machine: llama.cpp everywhere, MLX on Apple GPUs."""
    return ("llamacpp", "mlx") if device.accelerator == "metal" else ("llamacpp",)


def backend_for(variant: Variant) -> str:
    """The engine a variant's files are made for."""
    return "mlx" if variant.format == "mlx" else "llamacpp"


def default_slots(model: Model, parallel: int = 1) -> int:
    """Sequences to hold: 8 where an idle one costs nothing, 4 where each has its own window or state."""
    return max(_SLOTS_PER_SEQUENCE_STATE if facts(model).is_stateful else memory.DEFAULT_SLOTS, parallel)


def context_for(model: Model, workload: Workload) -> int:
    """Tokens to serve: what was asked, else the purpose's default within the model's native context, × parallel."""
    wanted = workload.context or min(needs.NEEDS[workload.purpose].context, model.native_context or 8192)
    return memory.padded_context(wanted * max(1, workload.parallel))


def _ubatch(device: Device) -> int:
    return memory.CPU_UBATCH if device.accelerator == "cpu" else memory.DEFAULT_UBATCH


def memory_for(
    device: Device,
    model: Model,
    variant: Variant,
    *,
    n_ctx: int,
    kv_type: str,
    slots: int,
    n_gpu_layers: int = -1,
    overrides: Overrides = Overrides(),
    draft: tuple[Model, Variant] | None = None,
) -> MemoryNeed:
    """The plan's memory with the settings our backends really use."""
    return memory.need(
        model,
        variant,
        n_ctx=n_ctx,
        kv_type_k=kv_type,
        kv_type_v=kv_type,
        slots=slots,
        n_ubatch=_ubatch(device),
        n_outputs=min(64, slots * 16),
        device=device,
        backend=backend_for(variant),
        n_gpu_layers=n_gpu_layers,
        mmproj=overrides.mmproj,
        draft=draft,
        own_heads=overrides.draft == "mtp",
        prefix_cache_bytes=overrides.prefix_cache_bytes,
    )


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


def _offload_layers(device: Device, model: Model, variant: Variant, n_ctx: int, kv_type: str, slots: int) -> int:
    """The most layers a discrete card holds beside host memory; -1 = all of them, 0 = not even one."""
    n_layers = len(model.layers)
    low, high = 0, n_layers + 1
    while low < high:
        middle = (low + high + 1) // 2
        need = memory_for(device, model, variant, n_ctx=n_ctx, kv_type=kv_type, slots=slots, n_gpu_layers=middle)
        low, high = (middle, high) if need.total_bytes <= device.memory.limit_bytes else (low, middle - 1)
    return low


def plan_for(
    device: Device,
    model: Model,
    variant: Variant,
    workload: Workload,
    *,
    overrides: Overrides = Overrides(),
    models: Sequence[Model] = (),
) -> Plan:
    """The best Plan for exactly this variant, whether or not it fits (`fits` says). `models`: where drafts are found.

    KV is f16 when that fits, else the least quantised type that does; on a discrete card with host memory, layers
    that do not fit go to the host.
    """
    backend = backend_for(variant)
    n_ctx = context_for(model, workload)
    slots = overrides.slots or default_slots(model, workload.parallel)
    draft = _named_draft(overrides.draft, backend, models)
    kv_type, need, fits, layers = _settle(device, model, variant, n_ctx, slots, draft, overrides)
    plan = _finish(
        device, model, variant, workload, backend, n_ctx, slots, kv_type, need, fits, layers, overrides=overrides
    )
    if draft is None:
        return plan
    gain = speed.draft_gain(device, (model, variant), draft, backend=backend)
    return replace(plan, draft_gain=gain)


def _settle(
    device: Device,
    model: Model,
    variant: Variant,
    n_ctx: int,
    slots: int,
    draft: tuple[Model, Variant] | None,
    overrides: Overrides,
) -> tuple[str, MemoryNeed, Fits, int]:
    """(KV type, memory, verdict, GPU layers): the first that fits whole, else split over two memories, else not."""
    wanted = (overrides.kv_type,) if overrides.kv_type else _KV_TYPES
    kinds = tuple(k for k in wanted if memory.kv_type_allowed(model, k, backend_for(variant))) or ("f16",)

    def with_kv(kv_type: str, layers: int = -1) -> MemoryNeed:
        return memory_for(
            device, model, variant, n_ctx=n_ctx, kv_type=kv_type, slots=slots, n_gpu_layers=layers, overrides=overrides,
            draft=draft,
        )  # fmt: skip

    for kv_type in kinds:
        need = with_kv(kv_type)
        fits = verdict(device, need)
        if fits != "no":
            return kv_type, need, fits, -1
    if device.kind == "discrete" and device.host is not None and variant.format == "gguf":
        kv_type = kinds[min(1, len(kinds) - 1)]
        layers = _offload_layers(device, model, variant, n_ctx, kv_type, slots)
        need = with_kv(kv_type, layers)
        fits = verdict(device, need, split=True)
        if fits != "no":
            return kv_type, need, fits, layers
    return kinds[0], with_kv(kinds[0]), "no", -1


def _named_draft(name: str, backend: str, models: Sequence[Model]) -> tuple[Model, Variant] | None:
    """The draft model called `name` ("auto", "ngram", "mtp" and "off" need no second model)."""
    small = next((m for m in models if m.id == name), None)
    variants = [v for v in small.variants if backend_for(v) == backend] if small is not None else []
    return (small, _typical(variants)) if small is not None and variants else None


def _finish(
    device: Device,
    model: Model,
    variant: Variant,
    workload: Workload,
    backend: str,
    n_ctx: int,
    slots: int,
    kv_type: str,
    need: MemoryNeed,
    fits: Fits,
    n_gpu_layers: int,
    *,
    overrides: Overrides,
) -> Plan:
    share = 1.0 if n_gpu_layers < 0 else n_gpu_layers / (len(model.layers) + 1)
    purpose = needs.need_of(workload)
    measured = overrides.measured
    decode = speed.decode(
        device, model, variant, backend=backend, kv_type=kv_type, device_share=share, measured=measured
    )
    per_request = n_ctx // max(1, workload.parallel)
    full = speed.decode(
        device, model, variant, backend=backend, depth=per_request, kv_type=kv_type, device_share=share,
        measured=measured,
    )  # fmt: skip
    prompt = min(purpose.prompt_tokens, per_request)
    prefill = speed.prefill(
        device, model, variant, backend=backend, prompt_tokens=min(2048, prompt), device_share=share, measured=measured,
        n_ubatch=_ubatch(device),
    )  # fmt: skip
    over_prompt = prefill
    if prompt > 2048:
        over_prompt = speed.prefill(
            device, model, variant, backend=backend, prompt_tokens=prompt, device_share=share, measured=measured,
            n_ubatch=_ubatch(device),
        )  # fmt: skip
    ttft = speed.ttft(over_prompt, decode, prompt)
    cached = (
        speed.ttft(over_prompt, decode, prompt, cached_tokens=purpose.cached_tokens) if purpose.cached_tokens else None
    )
    rating = quality.rate(model)
    plan = Plan(
        model=model,
        variant=variant,
        backend=backend,
        n_ctx=n_ctx,
        kv_type=kv_type,
        slots=slots,
        draft=overrides.draft or "auto",
        n_gpu_layers=n_gpu_layers,
        fits=fits,
        memory=need,
        decode_tok_s=decode,
        decode_tok_s_full=full,
        prefill_tok_s=prefill,
        ttft_s=ttft,
        why="",
        n_ubatch=_ubatch(device),
        n_outputs=min(64, slots * 16),
        prefix_cache_bytes=overrides.prefix_cache_bytes,
        mmproj=overrides.mmproj,
        quality=round(rating.points - quality.format_cost(model, variant) - quality.kv_cost(kv_type), 2),
        quality_basis=rating.basis,
        load_s=speed.load_time(variant, overrides.disk_bytes_s),
        ttft_cached_s=cached,
        kv_bytes_per_1k=memory.kv_bytes_per_1k_tokens(model, kv_type),
    )
    return replace(plan, score=round(score(plan, purpose), 4))


# --- rank -----------------------------------------------------------------------------------------------------------


def score(plan: Plan, need: Need) -> float:
    """Points: quality, less 5 for every halving of speed below what feels good, plus up to 3 for spare speed.

    The wait for the first token counts the same way at 2 points a doubling; a plan that fits only tightly loses 2,
    one split over two memories 1 more than its speed says.
    """
    points = plan.quality or 0.0
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


def too_slow(plan: Plan, need: Need) -> bool:
    """True when the plan's speed is below the least the purpose can live with."""
    return plan.decode_tok_s.value < need.least_tok_s


def _candidates(device: Device, model: Model, overrides: Overrides) -> list[Variant]:
    possible = backends_of(device)
    engines = tuple(b for b in possible if b in overrides.backends) if overrides.backends else possible
    usable = [v for v in model.variants if backend_for(v) in engines and v.file_bytes > 0]
    if overrides.quant:
        usable = [v for v in usable if v.quant.lower() == overrides.quant.lower()]
    return usable


def recommend(
    device: Device,
    models: Iterable[Model],
    workload: Workload,
    *,
    overrides: Overrides = Overrides(),
    limit: int = MAX_PICKS,
) -> Recommendation:
    """At most `limit` Plans (0 = all that fit) for `workload` on `device`, best first, and the reason for every other model.

    At most two picks per model family, so that eight of one maker's sizes do not crowd out the rest.
    """
    everything = list(models)
    need = needs.need_of(workload)
    best: list[Plan] = []
    rejected: list[Rejected] = []
    for model in everything:
        outcome = _best_of(device, model, workload, need, overrides, everything)
        if isinstance(outcome, Plan):
            best.append(outcome)
        elif outcome is not None:
            rejected.append(outcome)
    best.sort(key=lambda p: (-p.score, p.model.id))
    picks: list[Plan] = []
    for plan in best:
        same_family = sum(p.model.family == plan.model.family for p in picks)
        if limit and (len(picks) == limit or same_family == _PER_FAMILY):
            rejected.append(_not_shown(device, plan, workload, overrides))
        else:
            picks.append(plan)
    rejected.sort(key=lambda r: (-quality.rate(r.model).points, r.model.id))
    detailed = [detailed_plan(device, plan, everything, workload, overrides) for plan in why.explained(picks, need)]
    return Recommendation(tuple(detailed), tuple(rejected), workload)


def _not_shown(device: Device, plan: Plan, workload: Workload, overrides: Overrides) -> Rejected:
    """Why a plan that fits is not among the picks: outranked, or only a small format of it fits."""
    usual = _typical(_candidates(device, plan.model, overrides))
    if usual.file_bytes > plan.variant.file_bytes:
        whole = plan_for(device, plan.model, usual, workload, overrides=overrides)
        if whole.fits == "no":
            reason = f"{why.does_not_fit(whole, device)}; {plan.variant.quant} would fit"
            return Rejected(plan.model, usual, reason, "memory")
    return Rejected(plan.model, plan.variant, "fits, and ranks below the ones shown", "ranking")


def detailed_plan(
    device: Device, plan: Plan, models: Sequence[Model], workload: Workload, overrides: Overrides = Overrides()
) -> Plan:
    """`plan` with its longest context, and further reasons: the cliff, how the other engine would do, and a draft model
    where one would pay."""
    longest = max_context(device, plan)
    reasons = [
        f"up to {longest:,} tokens of context fit; each further 1,024 cost {plan.kv_bytes_per_1k / 2**20:.1f} MiB"
    ]
    other = _other_engine(device, plan, workload, overrides)
    if other is not None:
        reasons.append(engines.compare(device, plan, other))
    draft = _draft_for(device, plan, models)
    if draft is not None:
        name, gain, extra = draft
        assumed = f"{speed.ASSUMED_ACCEPTANCE:.0%} of its tokens accepted, assumed"
        reasons.append(f"with --draft {name}: about {gain:.1f}× as fast ({assumed}), {why.gb(extra)} more")
    edits = drafting.edit_sentence(device, plan)
    if edits is not None:
        reasons.append(edits)
    return replace(plan, max_ctx=longest, reasons=tuple(reasons))


def _other_engine(device: Device, plan: Plan, workload: Workload, overrides: Overrides) -> Plan | None:
    """The plan of the same model in files of about the same size on the machine's other engine, if it fits."""
    others = [v for v in _candidates(device, plan.model, overrides) if backend_for(v) != plan.backend]
    variant = engines.nearest_of_other(plan, others)
    if variant is None:
        return None
    other = plan_for(device, plan.model, variant, workload, overrides=overrides)
    return other if other.fits != "no" else None


_DRAFT_PAYS = 1.25


def _draft_for(device: Device, plan: Plan, models: Sequence[Model]) -> tuple[str, float, int] | None:
    """(id, speed-up, bytes) of the listed draft model that pays most and still fits; None where none does."""
    known = {m.id: m for m in models}
    found: list[tuple[float, str, int]] = []
    for name in plan.model.drafts:
        small = known.get(name)
        variants = [v for v in small.variants if backend_for(v) == plan.backend] if small is not None else []
        if small is None or not variants:
            continue
        pair = (small, _typical(variants))
        gain = speed.draft_gain(device, (plan.model, plan.variant), pair, backend=plan.backend)
        need = memory_for(
            device, plan.model, plan.variant, n_ctx=plan.n_ctx, kv_type=plan.kv_type, slots=plan.slots, draft=pair
        )
        if gain >= _DRAFT_PAYS and verdict(device, need) == "yes":
            found.append((gain, name, need.draft_bytes))
    if not found:
        return None
    gain, name, extra = max(found)
    return name, gain, extra


def _best_of(
    device: Device, model: Model, workload: Workload, need: Need, overrides: Overrides, models: Sequence[Model]
) -> Plan | Rejected | None:
    variants = _candidates(device, model, overrides)
    if not variants:
        return None
    smallest = min(variants, key=lambda v: (v.file_bytes, v.quant))
    unsuited = needs.unsuited(model, workload)
    if unsuited is not None:
        return Rejected(model, smallest, unsuited, "purpose")
    if workload.context and model.native_context and workload.context > model.native_context:
        reason = f"trained for {model.native_context:,} tokens, {workload.context:,} asked"
        return Rejected(model, smallest, reason, "context")
    pool = device.memory.limit_bytes + (device.host.limit_bytes if device.host and device.kind == "discrete" else 0)
    small_enough = [v for v in variants if v.file_bytes <= pool]
    # More than 3 points lost to the format: the next smaller model is the better use of the memory.
    sound = [v for v in small_enough if quality.format_cost(model, v) <= _MOST_LOST_POINTS]
    poor = [v for v in small_enough if v not in sound]
    fitting: list[Plan] = []
    for group in (sound, poor):
        plans = [plan_for(device, model, v, workload, overrides=overrides, models=models) for v in group]
        fitting = [p for p in plans if p.fits != "no"]
        if fitting:
            break
    if not fitting:
        shown = _typical(variants)
        needed = plan_for(device, model, shown, workload, overrides=overrides)
        return Rejected(model, shown, why.does_not_fit(needed, device), "memory")
    fast = [p for p in fitting if not too_slow(p, need)]
    if not fast:
        quickest = max(fitting, key=lambda p: (p.decode_tok_s.value, p.variant.quant))
        return Rejected(model, quickest.variant, why.is_too_slow(quickest, need), "speed")
    return max(fast, key=lambda p: (p.score, -p.memory.total_bytes, p.variant.quant))


def _typical(variants: Sequence[Variant]) -> Variant:
    """The variant people ask about: Q4_K_M or its like, else the one nearest to 4.8 bits."""
    for quant in ("Q4_K_M", "UD-Q4_K_M", "MXFP4", "UD-Q4_K_XL", "4bit"):
        for variant in variants:
            if variant.quant == quant:
                return variant
    ordered = sorted(variants, key=lambda v: v.file_bytes)
    return ordered[len(ordered) // 2]


def variants_of(device: Device, model: Model, workload: Workload, *, overrides: Overrides = Overrides()) -> list[Plan]:
    """Every variant of one model that this machine's engines can read, whether or not it fits, smallest file first."""
    plans = [plan_for(device, model, v, workload, overrides=overrides) for v in _candidates(device, model, overrides)]
    need = needs.need_of(workload)
    plans = [replace(p, max_ctx=max_context(device, p), why=why.of_variant(p, device, need)) for p in plans]
    return sorted(plans, key=lambda p: (p.variant.file_bytes, p.variant.format, p.variant.quant))


def max_context(device: Device, plan: Plan) -> int:
    """The longest context, in tokens, that fits the hard limit with this plan's settings (0 = not even 256)."""
    low, high = 0, (plan.model.native_context or 131072) // memory.CONTEXT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        need = memory_for(
            device, plan.model, plan.variant, n_ctx=middle * memory.CONTEXT_STEP, kv_type=plan.kv_type,
            slots=plan.slots, n_gpu_layers=plan.n_gpu_layers,
        )  # fmt: skip
        low, high = (middle, high) if verdict(device, need) != "no" else (low, middle - 1)
    return low * memory.CONTEXT_STEP
