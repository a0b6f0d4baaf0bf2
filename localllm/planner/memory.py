"""How many bytes a model needs to run: weights, KV, recurrent state, compute buffers and what the runtime keeps.

The rules are llama.cpp's own (https://github.com/ggml-org/llama.cpp: src/llama-kv-cache.cpp, llama-kv-cache-iswa.cpp,
llama-memory-recurrent.cpp, llama-context.cpp) and were checked against its planner (`no_alloc`, llama-cpp-python
0.3.36) over the shapes in tests/models/sparse_gguf.py: KV and state to the byte, compute buffers within 1 % of the
total. MLX follows mlx-lm's cache (https://github.com/ml-explore/mlx-lm, mlx_lm/models/cache.py). Nothing here does I/O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from localllm.device.types import Device
from localllm.planner.facts import facts
from localllm.planner.types import MemoryNeed, RunSettings, backend_for
from localllm_catalog import quants, shapes
from localllm_catalog.types import Layer, Model, Variant

MIB = 2**20
CONTEXT_STEP = 256  # llama.cpp pads every context to this many cells; mlx-lm grows its cache by as many tokens
_F32 = 4
_F16 = 2
# mx.quantize stores a 16-bit scale and a 16-bit bias beside each group of 64 values, or of 32 where 64 does not divide.
_MLX_KV_BITS = {"q8_0": 8, "q4_0": 4}
_MLX_GROUPS = (64, 32)
_MLX_GROUP_EXTRA_BYTES = 4
# Freed buffers our MLX backend lets MLX keep (localllm_backends/mlx/memory.py).
_MLX_REUSE_BYTES = 512 * MIB


def pad(n: int, step: int = CONTEXT_STEP) -> int:
    """`n` rounded up to a multiple of `step`."""
    return -(-n // step) * step


def padded_context(n_ctx: int) -> int:
    """Cells llama.cpp really gives a context of `n_ctx` tokens shared by all sequences."""
    return pad(n_ctx)


def kv_cells(layer: Layer, settings: RunSettings) -> int:
    """KV cells of one layer: the padded context, or for a sliding layer its window × sequences + one micro-batch.

    llama.cpp: PAD(min(n_ctx, n_swa × n_seq_max + n_ubatch), 256) with a unified cache and `swa_full` off.
    """
    if layer.kind in ("recurrent", "none") or layer.shares_kv:
        return 0
    context = padded_context(settings.n_ctx)
    if layer.kind == "sliding" and layer.window:
        return min(context, pad(min(context, layer.window * settings.slots + settings.n_batch)))
    return context


def _kv_widths(layer: Layer) -> tuple[int, int]:
    if layer.kind == "mla":
        return layer.mla_rank + layer.mla_rope_dim, 0
    return layer.n_kv_heads * layer.head_dim_k, layer.n_kv_heads * layer.head_dim_v


def kv_bytes(model: Model, settings: RunSettings) -> int:
    """Bytes of llama.cpp's KV cache, exactly: Σ layers cells × (width_k × bytes_k + width_v × bytes_v)."""
    elements_k = elements_v = 0
    for layer, count in facts(model).groups:
        width_k, width_v = _kv_widths(layer)
        cells = count * kv_cells(layer, settings)
        elements_k += cells * width_k
        elements_v += cells * width_v
    bytes_k, bytes_v = quants.kv_element_bytes(settings.kv_type_k), quants.kv_element_bytes(settings.kv_type_v)
    return int(elements_k * bytes_k + elements_v * bytes_v)


def kv_bytes_per_1k_tokens(model: Model, kv_type: str = "f16") -> int:
    """What 1,024 more tokens of context cost once every window is full: the slope of the memory line, in bytes."""
    growing = sum(n * shapes.layer_kv_elements(x) for x, n in facts(model).groups if x.kind != "sliding")
    return math.ceil(1024 * growing * quants.kv_element_bytes(kv_type))


def kv_type_allowed(model: Model, kv_type: str, backend: str = "llamacpp") -> bool:
    """Quantised caches need rows of whole blocks of 32 (llama.cpp refuses others); MLX, heads of whole groups and no
    sliding windows (mlx-lm's rotating cache has no quantised form)."""
    if backend == "mlx":
        return kv_type == "f16" or (kv_type in _MLX_KV_BITS and _mlx_group(model) > 0)
    if kv_type in ("f32", "f16", "bf16"):
        return True
    return all(width % 32 == 0 for layer, _ in facts(model).groups for width in _kv_widths(layer))


def recurrent_bytes(model: Model, settings: RunSettings) -> int:
    """State of the recurrent layers: float32 per sequence, × (1 + snapshots kept for drafting)."""
    return facts(model).recurrent_state_bytes * max(1, settings.slots) * (1 + settings.n_rewind)


def _attention_mask_cells(model: Model, settings: RunSettings) -> int:
    layers = [layer for layer, _ in facts(model).groups]
    kinds = {layer.kind for layer in layers}
    cells = padded_context(settings.n_ctx) if kinds & {"full", "mla"} else 0
    sliding = next((layer for layer in layers if layer.kind == "sliding"), None)
    return cells + (kv_cells(sliding, settings) if sliding else 0)


def compute_bytes(model: Model, settings: RunSettings) -> int:
    """llama.cpp's scratch buffer for one micro-batch, from the three moments of a step that can be its peak.

    dense feed-forward: (3·FF + 3·E + H·Dk) floats a token; experts: the chosen experts' rows twice over; output rows:
    (V + 2·E) floats each. Each with the attention mask (f16 under flash attention). Without flash attention the score
    matrix H × n_kv joins. Measured: exact for dense models, at most 30 MiB over for hybrids and mixtures.
    """
    n_batch, flash = settings.n_batch, settings.flash_attention
    hidden = model.hidden_size
    heads = model.n_heads * model.head_dim
    width = 3 * model.intermediate_size + 3 * hidden + heads if model.intermediate_size else 3 * hidden + heads
    if model.experts is not None:
        x = model.experts
        rows, narrow = x.n_active * hidden, x.n_active * x.intermediate
        shared = 2 * hidden if x.n_shared else 0
        width = max(width, 3 * narrow + 3 * hidden + heads, 2 * narrow + 2 * rows + shared)
    cells = _attention_mask_cells(model, settings)
    step = _F32 * width * n_batch + (_F16 if flash else _F32) * cells * n_batch
    # While logits are made, the micro-batch's last hidden states are still held.
    output = _F32 * ((model.vocab_size + 2 * hidden) * min(settings.n_outputs, n_batch) + 2 * hidden * n_batch)
    if flash:
        return max(step, output)
    n_kv = padded_context(settings.n_ctx)
    widest = max((sum(_kv_widths(layer)) for layer, _ in facts(model).groups), default=0)
    scores = _F32 * n_batch * (model.n_heads * n_kv + 3 * hidden + 2 * heads + widest + cells)
    return max(step, output, scores)


def output_bytes(model: Model, n_rows: int) -> int:
    """The host buffer logits are copied to: one float32 row of the vocabulary for each output row."""
    return _F32 * model.vocab_size * max(1, n_rows)


# --- weights --------------------------------------------------------------------------------------------------------


def weights_bytes(variant: Variant) -> int:
    """Bytes of the tensors: the header's own sum when it was read, else the files (a few MiB of tokenizer more)."""
    return variant.weights_bytes or variant.file_bytes


def embedding_bytes(model: Model, variant: Variant) -> int:
    """Bytes of the token embedding table in this variant's format (per-layer lookup tables included)."""
    rows = model.vocab_size * model.hidden_size + model.lookup_params
    mix = quants.MIXTURES.get(variant.quant)
    if mix is not None:
        kind = quants.fallback(mix.head if model.tied_embeddings else mix.embed, model.hidden_size)
        return round(rows * float(quants.GGUF_TYPES[kind].bits) / 8)
    known = facts(model)
    stored = known.dense_params + known.pool_params + known.embedding_params + model.lookup_params
    return round(weights_bytes(variant) * min(1.0, rows / max(1, stored)))


@dataclass(frozen=True, slots=True)
class Placement:
    """Weight bytes on the accelerator and in the host's memory, and the share of layers the accelerator runs."""

    device_bytes: int
    host_bytes: int
    device_share: float


def place_weights(model: Model, variant: Variant, settings: RunSettings, device: Device | None) -> Placement:
    """Where the weights of `variant` go.

    llama.cpp leaves the token embedding in host memory; tied models get a second copy of it as the output matrix on
    the device, except on Metal, where both views map the same file pages.
    """
    total = weights_bytes(variant)
    if device is None or device.accelerator == "cpu":
        return Placement(total, 0, 1.0)
    if variant.format == "mlx":
        return Placement(total, 0, 1.0)
    embedding = min(total, embedding_bytes(model, variant))
    if device.kind == "unified":
        duplicate = embedding if model.tied_embeddings and device.accelerator != "metal" else 0
        return Placement(total + duplicate, 0, 1.0)
    body = total if model.tied_embeddings else total - embedding
    share = settings.device_share(model)
    on_device = round(body * share)
    return Placement(on_device, total - on_device + (embedding if model.tied_embeddings and share == 1.0 else 0), share)


# --- runtime --------------------------------------------------------------------------------------------------------


def overhead_bytes(device: Device | None) -> int:
    """What the runtime itself keeps on the accelerator, in bytes.

    CUDA: driver context and kernels, 107 MiB on a 34-SM card and 555 MiB on a 188-SM one
    (https://github.com/ggml-org/llama.cpp/pull/23604), linear between. Metal: no large context, 100 MiB.
    ROCm and Vulkan: 256 MiB, assumed. CPU: none beyond the process. Once for each of several cards.
    """
    if device is None or device.accelerator == "cpu":
        return 0
    if device.accelerator == "metal":
        return 100 * MIB
    if device.accelerator == "cuda":
        units = device.compute_units or 68
        return device.n_gpus * max(96 * MIB, round((107 + (units - 34) * (555 - 107) / (188 - 34)) * MIB))
    return device.n_gpus * 256 * MIB


def _gpu_margin(device: Device | None) -> Fraction:
    # GPU schedulers split the graph and keep copies of inputs; logs show 5-20 % above the CPU planner's figure.
    return Fraction(1) if device is None or device.accelerator == "cpu" else Fraction(6, 5)


def need(model: Model, variant: Variant, settings: RunSettings, device: Device | None = None) -> MemoryNeed:
    """Every byte of running `variant` with these settings, split into the accelerator's pool and the host's.

    On unified and CPU machines everything is in one pool and `host_bytes` is 0; with `device` None (no limit known)
    the figures are those of a CPU.
    """
    if backend_for(variant) == "mlx":
        return _need_mlx(model, variant, settings, device)
    placed = place_weights(model, variant, settings, device)
    kv, state = kv_bytes(model, settings), recurrent_bytes(model, settings)
    # Every card of several holds the buffers of its own layers' graph.
    compute = int(compute_bytes(model, settings) * _gpu_margin(device)) * (device.n_gpus if device is not None else 1)
    rows = output_bytes(model, settings.slots)
    on_host = 0
    if device is not None and device.kind == "discrete":
        kv_device, state_device = round(kv * placed.device_share), round(state * placed.device_share)
        on_host = placed.host_bytes + (kv - kv_device) + (state - state_device) + rows
        kv, state, rows = kv_device, state_device, 0
    return MemoryNeed(
        weights_bytes=placed.device_bytes,
        kv_bytes=kv,
        recurrent_bytes=state,
        compute_bytes=compute + rows,
        overhead_bytes=overhead_bytes(device),
        draft_bytes=_draft_bytes(model, variant, settings, device),
        limit_bytes=device.memory.limit_bytes if device is not None else 0,
        host_bytes=on_host,
    )


def _draft_bytes(model: Model, variant: Variant, settings: RunSettings, device: Device | None) -> int:
    """What the drafter adds: a second model with a context of its own, or the model's own heads."""
    drafter = settings.drafter
    drafted = 0
    if drafter.second is not None:
        # As the engine's worker loads it: the same context, sequences and steps, at 16 bits.
        plain = RunSettings(settings.n_ctx, slots=settings.slots, n_batch=settings.n_batch, n_outputs=settings.slots)
        small = need(*drafter.second, replace(plain, n_gpu_layers=settings.n_gpu_layers), device)
        drafted = small.total_bytes - small.overhead_bytes
    if drafter.is_mtp and model.mtp_layers:
        drafted += mtp_bytes(model, variant, settings)
    return drafted


# Cells per sequence that our llama.cpp backend gives the heads on top (localllm_backends/llamacpp/context.py).
_HEADS_DRAFT_CELLS = 48
_HEADS_REWIND_TOKENS = 3


def rewind_for_heads(model: Model) -> int:
    """Snapshots to keep so that what the model's own heads drafted can be taken back: 0 but for recurrent models with
    heads. Each is a copy of the whole state, and few drafts get further (llama.cpp's own default is 3)."""
    recurrent = any(layer.kind == "recurrent" for layer, _ in facts(model).groups)
    return _HEADS_REWIND_TOKENS if recurrent and model.mtp_layers else 0


def mtp_bytes(model: Model, variant: Variant, settings: RunSettings) -> int:
    """What drafting with the model's own heads takes on llama.cpp: their weights, a context of their layers alone, and
    the model's hidden rows. A head's layer is taken to be like the model's last layer of unbounded attention."""
    attention = [layer for layer in model.layers if layer.kind not in ("recurrent", "none")]
    unbounded = [layer for layer in attention if layer.kind != "sliding"] or attention
    heads = replace(model, layers=tuple(unbounded[-1:]) * model.mtp_layers)
    outputs = settings.slots * model.mtp_layers
    own = replace(settings, n_ctx=settings.n_ctx + _HEADS_DRAFT_CELLS * settings.slots, n_outputs=outputs)
    return (
        variant.mtp_bytes
        + kv_bytes(heads, own)
        + compute_bytes(heads, own)
        + output_bytes(model, outputs)
        + _F32 * model.hidden_size * (settings.n_batch + outputs)
    )


def _mlx_group(model: Model) -> int:
    """The quantisation group that divides every head of a cache MLX can quantise; 0 where it can't."""
    if any(layer.kind == "sliding" for layer, _ in facts(model).groups):
        return 0
    widths: set[int] = set()
    for layer, _ in facts(model).groups:
        if layer.kind == "mla":
            widths |= {layer.mla_rank, layer.mla_rope_dim}
        elif layer.kind == "full" and not layer.shares_kv:
            widths |= {layer.head_dim_k, layer.head_dim_v}
    return next((g for g in _MLX_GROUPS if widths and all(w % g == 0 for w in widths)), 0)


def mlx_element_bytes(model: Model, kv_type: str) -> Fraction:
    """Bytes one cached element takes in MLX: 2 in the model's own 16-bit type, else its bits and its group's share."""
    bits, group = _MLX_KV_BITS.get(kv_type, 0), _mlx_group(model)
    return Fraction(bits, 8) + Fraction(_MLX_GROUP_EXTRA_BYTES, group) if bits and group else Fraction(_F16)


def mlx_kv_bytes(model: Model, settings: RunSettings) -> int:
    """mlx-lm's caches when the sequences share `n_ctx` tokens: grown by 256, sliding layers rotate within their window."""
    elements = 0
    context = pad(settings.n_ctx)
    for layer, count in facts(model).groups:
        if layer.kind in ("recurrent", "none") or layer.shares_kv:
            continue
        bounded = layer.kind == "sliding" and layer.window
        cells = min(context, layer.window * settings.slots) if bounded else context
        elements += count * cells * sum(_kv_widths(layer))
    return int(elements * mlx_element_bytes(model, settings.kv_type))


def mlx_step_bytes(model: Model, settings: RunSettings) -> int:
    """What MLX holds while it computes a step, in bytes: 16-bit activations of a micro-batch, each sequence's logits,
    and the freed buffers it keeps for reuse. There is no buffer planned ahead, and no attention mask grows with the context.
    """
    activations = compute_bytes(model, replace(settings, n_ctx=CONTEXT_STEP, n_outputs=1)) // 2
    return activations + output_bytes(model, settings.slots) // 2 + _MLX_REUSE_BYTES


def _need_mlx(model: Model, variant: Variant, settings: RunSettings, device: Device | None) -> MemoryNeed:
    drafted = 0
    if settings.drafter.second is not None:
        small, files = settings.drafter.second
        plain = RunSettings(settings.n_ctx, slots=settings.slots)
        drafted = weights_bytes(files) + mlx_kv_bytes(small, plain) + recurrent_bytes(small, plain)
    return MemoryNeed(
        weights_bytes=weights_bytes(variant),
        kv_bytes=mlx_kv_bytes(model, settings),
        # mlx-lm keeps recurrent state in the activations' type for the convolution and float32 for the rest.
        recurrent_bytes=recurrent_bytes(model, replace(settings, n_rewind=0)),
        compute_bytes=mlx_step_bytes(model, settings),
        overhead_bytes=overhead_bytes(device),
        draft_bytes=drafted,
        limit_bytes=device.memory.limit_bytes if device is not None else 0,
    )
