"""Convert Plans and Recommendations to plain data, in the shape of recommend.schema.json. Scripts
rely on this shape."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from localllm.device.types import Device
from localllm.planner import decode_cost, efficiency, speed
from localllm.planner.bytes_per_token import facts, streamed
from localllm.planner.types import MemoryNeed, Plan, Range, Recommendation
from localllm_backends.placement import Placement
from localllm_catalog.types import Variant

SCHEMA_VERSION = 1


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def range_to_json(value: Range) -> dict[str, Any]:
    """Return {"value", "low", "high", "basis"}. Four significant figures are more than the
    prediction's accuracy."""
    return {
        "value": _round(value.value),
        "low": _round(value.low),
        "high": _round(value.high),
        "basis": value.basis,
    }


def _optional_range(value: Range | None) -> dict[str, Any] | None:
    return range_to_json(value) if value is not None else None


def memory_to_json(need: MemoryNeed) -> dict[str, Any]:
    """Return the bytes by purpose.

    `host_bytes` (system memory) and `disk_bytes` (left in the file) are not part of `total_bytes`.
    `cards_bytes` are those of several cards.
    """
    return {
        "weights_bytes": need.weights_bytes,
        "kv_bytes": need.kv_bytes,
        "recurrent_bytes": need.recurrent_bytes,
        "compute_bytes": need.compute_bytes,
        "overhead_bytes": need.overhead_bytes,
        "draft_bytes": need.draft_bytes,
        "mmproj_bytes": need.projector_bytes,
        "total_bytes": need.total_bytes,
        "host_bytes": need.host_bytes,
        "disk_bytes": need.disk_bytes,
        "cards_bytes": list(need.cards_bytes),
        "limit_bytes": need.limit_bytes,
    }


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return one plan. In its placement, -1 means all."""
    settings = plan.settings
    return {
        "model": plan.model.id,
        "name": plan.model.name,
        "licence": plan.model.licence or None,
        "release_date": plan.model.release_date or None,
        "variant": variant_to_json(plan.variant),
        "backend": plan.backend,
        "n_ctx": settings.n_ctx,
        "max_ctx": plan.max_ctx or None,
        "kv_type": settings.kv_type,
        "slots": settings.slots,
        "n_ubatch": settings.n_batch,
        "n_gpu_layers": settings.placement.gpu_layers,
        "placement": placement_to_json(settings.placement),
        "draft": settings.drafter.name,
        "draft_gain": _round(plan.draft_gain),
        "drafting": _optional_range(plan.drafting),
        "fits": plan.fits,
        "memory": memory_to_json(plan.memory),
        "kv_bytes_per_1k_tokens": plan.kv_bytes_per_1k,
        **_speeds(plan),
        "quality": {"points": plan.quality, "basis": plan.quality_basis, "rated": plan.is_rated},
        "score": plan.score,
        "why": plan.why,
        "reasons": list(plan.reasons),
    }


def variant_to_json(variant: Variant) -> dict[str, Any]:
    """Return the files of a plan."""
    return {
        "format": variant.format,
        "quant": variant.quant,
        "repo": variant.repo,
        "files": list(variant.files),
        "bytes": variant.file_bytes,
        "exact": variant.exact,
        "listed": not variant.is_estimate,
    }


def placement_to_json(placed: Placement) -> dict[str, Any]:
    """Return the placement of layers, experts, KV and tables."""
    return {
        "gpu_layers": placed.gpu_layers,
        "experts_on_host": placed.experts_on_host,
        "cards": list(placed.cards),
        "tensor_split": list(placed.tensor_split),
        "kv_on_host": placed.kv_on_host,
        "tables": placed.tables,
        "layout": placed.layout,
    }


def _speeds(plan: Plan) -> dict[str, Any]:
    return {
        "decode_tok_s": range_to_json(plan.decode_tok_s),
        "decode_tok_s_full": range_to_json(plan.decode_tok_s_full),
        "prefill_tok_s": range_to_json(plan.prefill_tok_s),
        "ttft_s": range_to_json(plan.ttft_s),
        "ttft_cached_s": _optional_range(plan.ttft_cached_s),
        "load_s": range_to_json(plan.load_s),
    }


def recommendation_to_json(answer: Recommendation, device: dict[str, Any]) -> dict[str, Any]:
    """Return the whole answer. `device` is the result of localllm.device.types.device_to_json."""
    return {
        "schema": SCHEMA_VERSION,
        "device": device,
        "workload": asdict(answer.workload),
        "plans": [plan_to_json(plan) for plan in answer.plans],
        "rejected": [
            {"model": r.model.id, "variant": r.variant.quant, "kind": r.kind, "reason": r.reason}
            for r in answer.rejected
        ],
    }


def physics(plan: Plan, device: Device) -> dict[str, Any]:
    """Return the physical figures of a plan.

    - `weights`: bytes that each token reads, and bytes of the experts that it is routed to.
    - `kv_read_bytes`: [depth, bytes] points; the KV bytes that a token reads are linear between
      them.
    - `flops_per_token`: of the matrices, without attention.
    - `drafting`: expected speed-up of one stream from its drafts, with its basis (None: no gain
      known).
    """
    parts = streamed(plan.model, plan.variant)
    settings = plan.settings
    tflops, tflops_basis = efficiency.nominal_tflops(device)
    hardware = speed.hardware(device, plan.variant, settings)
    measured = hardware.timed_flops_s(plan.model, plan.variant)
    if measured is not None:
        tflops = measured[0] / 1e12
    n_ctx = settings.n_ctx
    windows = {layer.mixer.reach for layer, _ in facts(plan.model).groups}
    depths = sorted({0, n_ctx, *(window for window in windows if window < n_ctx)})
    kv_read_bytes = [
        [depth, decode_cost.kv_read_bytes(plan.model, depth, settings.kv_type)] for depth in depths
    ]
    machine = {
        "device": device.name,
        "bandwidth_gbps": round(device.bandwidth_gbps.value, 1),
        "bandwidth_basis": device.bandwidth_gbps.basis,
        "tflops": round(tflops, 2),
        "tflops_basis": tflops_basis,
    }
    return {
        **machine,
        "quant": plan.variant.quant,
        "kv_type": settings.kv_type,
        "n_batch": settings.n_batch,
        "weights": {"dense_bytes": parts.dense_bytes, "routed_bytes": parts.routed_bytes},
        "kv_read_bytes": kv_read_bytes,
        "flops_per_token": 2 * (parts.dense_params + parts.routed_params),
        "decode_tok_s": range_to_json(plan.decode_tok_s),
        "decode_tok_s_full": range_to_json(plan.decode_tok_s_full),
        "prefill_tok_s": range_to_json(plan.prefill_tok_s),
        "drafting": _optional_range(plan.drafting),
        "memory": memory_to_json(plan.memory),
    }
