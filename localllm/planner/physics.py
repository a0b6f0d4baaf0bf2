"""What a token of a plan costs and what the machine can do, as plain data: what `serve` tells those who show it.

Decoding is bound by bytes (weights and KV read per token ÷ bandwidth), prefill by arithmetic (FLOPs per token ÷ FLOP/s).
"""

from __future__ import annotations

from typing import Any

from localllm.device.types import Device
from localllm.planner import families, laws, speed
from localllm.planner.facts import facts
from localllm.planner.serialise import memory_to_json, range_to_json
from localllm.planner.streams import streamed
from localllm.planner.types import Plan


def physics(plan: Plan, device: Device) -> dict[str, Any]:
    """`weights`: bytes that every token reads, and of the experts it is routed to. `kv_read_bytes`: [depth, bytes] points
    between which the KV bytes a token reads grow in straight lines. `flops_per_token`: of the matrices, without attention.
    """
    parts = streamed(plan.model, plan.variant)
    bandwidth, basis = laws.bandwidth_of(device)
    tflops, tflops_basis = families.nominal_tflops(device)
    measured = speed.hardware(device, plan.variant, plan.settings).timed_flops_s(plan.model, plan.variant)
    tflops = tflops if measured is None else measured[0] / 1e12
    windows = {layer.window for layer, _ in facts(plan.model).groups if layer.kind == "sliding" and layer.window}
    depths = sorted({0, *(w for w in windows if w < plan.settings.n_ctx), plan.settings.n_ctx})
    return {
        "device": device.name,
        "bandwidth_gbps": round(bandwidth, 1),
        "bandwidth_basis": basis,
        "tflops": round(tflops, 2),
        "tflops_basis": tflops_basis,
        "quant": plan.variant.quant,
        "kv_type": plan.settings.kv_type,
        "n_batch": plan.settings.n_batch,
        "weights": {"dense_bytes": parts.dense_bytes, "routed_bytes": parts.routed_bytes},
        "kv_read_bytes": [[d, laws.kv_read_bytes(plan.model, d, plan.settings.kv_type)] for d in depths],
        "flops_per_token": 2 * (parts.dense_params + parts.routed_params),
        "decode_tok_s": range_to_json(plan.decode_tok_s),
        "decode_tok_s_full": range_to_json(plan.decode_tok_s_full),
        "prefill_tok_s": range_to_json(plan.prefill_tok_s),
        "memory": memory_to_json(plan.memory),
    }
