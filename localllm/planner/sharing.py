"""A share of every layer on each of several machines (tensor parallelism, as MLX's): what lies on each, and how fast. Pure.

What a token reads is divided among the machines. The rest of its time stays (launching some twenty kernels a layer, norms, the
router), and twice a layer what each has computed is added up. So with n machines a token takes what it takes on one, less
(n-1)/n of the time that memory at its nominal bandwidth needs for the bytes, and the sums' way. No published row gave it a
constant; `python -m benchmarks.clusters` compares it with those there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.device.types import Device
from localllm.planner import decode_cost, memory, places, speed
from localllm.planner.cluster import Link
from localllm.planner.streams import streamed
from localllm.planner.types import Range, RunSettings, backend_of
from localllm_catalog.types import Model, Variant

# Families of the catalog whose models mlx-lm 0.32 has in a form that can be shared (`shard` in mlx_lm/models).
FAMILIES = frozenset((
    "deepseek-r1-distill", "glm", "gpt-oss", "llama-3", "minimax", "qwen2.5-coder", "qwen3", "qwen3-coder", "qwen3.5",
    "qwen3.6", "qwen3.8",
))  # fmt: skip
# After attention and after the feed-forward, what every machine has computed is added up.
_SUMS_A_LAYER = 2
_F16_BYTES = 2
_PROMPT_TOKENS = 2048
# With RDMA (JACCL); without it the link's own latency is what a message takes.
_RDMA_S = (5e-6, 50e-6)


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """A model shared by machines. `needs_bytes` on each, of the `limit_bytes` that the smallest has for models; `alone_tok_s`:
    of the slowest one by itself, whether or not the model fits there."""

    model: Model
    variant: Variant
    settings: RunSettings
    devices: tuple[Device, ...]
    needs_bytes: int
    limit_bytes: int
    decode_tok_s: Range
    prefill_tok_s: Range
    alone_tok_s: float


def why_not(model: Model, variant: Variant, devices: Sequence[Device]) -> str:
    """Why `variant` can't be shared by `devices`; "" where it can."""
    n = len(devices)
    if not backend_of(variant).tensor_parallel or any(d.accelerator != "metal" for d in devices):
        return "MLX shares its own models, among Macs"
    if model.family not in FAMILIES:
        return f"mlx-lm has no form of {model.family} that machines can share"
    heads = {model.n_heads, *(x.n_heads for x in model.layers), *(x.n_kv_heads for x in model.layers)} - {0}
    odd = sorted(h for h in heads if h % n)
    return f"{n} machines can't share {odd[0]} heads evenly" if odd else ""


def needs_bytes(model: Model, variant: Variant, settings: RunSettings, device: Device, n: int) -> int:
    """Bytes on each of `n` machines: its share of the layers and of their KV; what turns tokens into vectors and back is
    whole on each."""
    parts = places.parts(model, variant)
    layers = sum(dense + experts for dense, experts in parts.layers)
    kept = memory.kv_bytes(model, settings) + sum(memory.layer_state_bytes(model, settings))
    ends = parts.input_bytes + parts.own_output_bytes
    return -(-(layers + kept) // n) + ends + memory.overhead_bytes(device) + memory.compute_bytes(model, settings)


def plan(
    model: Model, variant: Variant, settings: RunSettings, devices: Sequence[Device], link: Link
) -> SharedPlan | None:
    """The plan of `model` shared by `devices` over `link`; None where it does not fit."""
    needs = max(needs_bytes(model, variant, settings, d, len(devices)) for d in devices)
    limit = min(d.memory.limit_bytes for d in devices)
    if needs > limit:
        return None
    alone = min(speed.decode(d, model, variant, settings).value for d in devices)
    return SharedPlan(
        model, variant, settings, tuple(devices), needs, limit,
        decode_over(model, variant, settings, devices, link), prefill_over(model, variant, settings, devices, link), alone,
    )  # fmt: skip


def _sums_s(model: Model, link: Link) -> tuple[float, float]:
    """What adding up takes of a token, at best and at worst."""
    low, high = _RDMA_S if link.name == "Thunderbolt 5" else link.latency_s
    n = _SUMS_A_LAYER * len(model.layers)
    return n * low, n * high


def decode_over(
    model: Model, variant: Variant, settings: RunSettings, devices: Sequence[Device], link: Link, *, depth: int = 0
) -> Range:
    """tokens/s of one stream at `depth`; the slowest machine is waited for."""
    n = len(devices)
    slowest = min(devices, key=lambda d: speed.decode(d, model, variant, settings, depth=depth).value)
    alone = speed.decode(slowest, model, variant, settings, depth=depth)
    read = streamed(model, variant).total_bytes + decode_cost.kv_read_bytes(model, depth, settings.kv_type)
    saved_s = (1 - 1 / n) * read / (decode_cost.bandwidth_of(slowest)[0] * 1e9)
    best_s, worst_s = _sums_s(model, link)
    usual_s = (best_s * worst_s) ** 0.5
    most = n * alone.high
    value = min(1 / (1 / alone.value - min(saved_s, (1 - 1 / n) / alone.value) + usual_s), most)
    low = 1 / (1 / alone.low - min(saved_s, (1 - 1 / n) / alone.low) + worst_s)
    high = min(1 / (1 / alone.high - min(saved_s, (1 - 1 / n) / alone.high) + best_s), most)
    basis = f"one {slowest.name} ({alone.basis}), the reading of its bytes divided by {n}; {link.source}"
    return Range(value, min(low, value), max(high, value), basis)


def prefill_over(model: Model, variant: Variant, settings: RunSettings, devices: Sequence[Device], link: Link) -> Range:
    """tokens/s of a prompt: its arithmetic is divided, and every vector crosses the link twice a layer."""
    n = len(devices)
    each = [speed.prefill(d, model, variant, settings, prompt_tokens=_PROMPT_TOKENS) for d in devices]
    slowest = min(each, key=lambda r: r.value)
    crossing_s = _SUMS_A_LAYER * len(model.layers) * model.hidden_size * _F16_BYTES * (n - 1) / n / link.bytes_per_s
    value = 1 / (1 / slowest.value / n + crossing_s)
    low, high = 1 / (1 / slowest.low + crossing_s), n * slowest.high
    return Range(value, min(low, value), max(high, value), "its arithmetic divided; at worst no gain")
