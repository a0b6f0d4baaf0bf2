"""Compute the bytes a model needs to run: weights, KV, recurrent state, compute buffers and runtime
overhead. No I/O.

The rules are llama.cpp's own (https://github.com/ggml-org/llama.cpp: src/llama-context.cpp; for KV
and state see kv_sizes.py). They were checked against its planner (`no_alloc`, llama-cpp-python
0.3.36) with the shapes in tests/models/sparse_gguf.py. KV and state match to the byte, compute
buffers within 1 % of the total.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from localllm.device.accelerators import KINDS
from localllm.device.types import Device
from localllm.planner import kv_sizes, layer_bytes
from localllm.planner.attention_scores import scores_bytes
from localllm.planner.bytes_per_token import facts
from localllm.planner.kv_sizes import (
    CONTEXT_STEP,
    F16,
    F32,
    kv_bytes,
    layer_kv_bytes,
    layer_state_bytes,
    mlx_kv_bytes,
    recurrent_bytes,
)
from localllm.planner.types import (
    CompanionDrafter,
    DraftChoice,
    MemoryNeed,
    RunSettings,
    backend_of,
)
from localllm_catalog import quants
from localllm_catalog.types import Model, Variant

MIB = 2**20
# Freed buffers that our MLX backend lets MLX keep (localllm_backends/mlx/memory.py).
_MLX_REUSE_BYTES = 512 * MIB


@lru_cache(4096)
def _attention_mask_cells(model: Model, settings: RunSettings) -> int:
    """Return the mask cells of a step. Layers that see the whole context share one mask, and layers
    with a window share another."""
    layout = kv_sizes.layout(settings)
    masks: dict[bool, int] = {}
    for layer, _ in facts(model).groups:
        if layer.mixer.attends:
            masks.setdefault(layer.mixer.is_bounded, layer.mixer.mask_cells(layout))
    return sum(masks.values())


@lru_cache(4096)
def compute_bytes(model: Model, settings: RunSettings) -> int:
    """Return the bytes of llama.cpp's scratch buffer for one micro-batch: the largest of its three
    possible peaks.

    - Dense feed-forward: (3·FF + 3·E + H·Dk) floats a token.
    - Experts: the rows of the routed experts, twice.
    - Output: (V + 2·E) floats for each output row.

    Each includes the f16 attention mask of flash attention, which is always on. Measured: exact for
    dense models, at most 30 MiB too much for hybrids and mixtures.
    """
    n_batch = settings.n_batch
    hidden = model.hidden_size
    heads_width = model.n_heads * model.head_dim
    width = 3 * model.intermediate_size + 3 * hidden + heads_width
    if model.experts is not None:
        routed_width = model.experts.n_active * hidden
        expert_width = model.experts.n_active * model.experts.intermediate
        gathered_width = 2 * expert_width + 2 * routed_width
        if model.experts.n_shared:
            gathered_width += 2 * hidden
        width = max(width, 3 * expert_width + 3 * hidden + heads_width, gathered_width)
    # Hyper-connections hold several streams of hidden states instead of the two that are counted.
    width += max(0, model.residual_streams - 2) * hidden
    cells = _attention_mask_cells(model, settings)
    step = (F32 * width + F16 * cells) * n_batch
    # The micro-batch's last hidden states are still held while logits are computed.
    rows = min(settings.n_outputs, n_batch)
    output = (model.vocab_size + 2 * hidden) * rows + 2 * hidden * n_batch
    return max(step, F32 * output)


def output_bytes(model: Model, n_rows: int) -> int:
    """Return the bytes of the host buffer for logits: one float32 row of the vocabulary for each
    output row."""
    return F32 * model.vocab_size * max(1, n_rows)


# --- weights --------------------------------------------------------------------------------------


def weights_bytes(variant: Variant) -> int:
    """Return the bytes of the tensors. This is the header's sum if it was read, else the file size
    (a few MiB of tokenizer more)."""
    return variant.weights_bytes or variant.file_bytes


def embedding_bytes(model: Model, variant: Variant) -> int:
    """Return the bytes of the token embedding table in this variant's format, with lookup tables."""
    if model.lookup_params:
        # The tables have their own format. The other tensors take the rest of the file.
        tables_bytes = layer_bytes.table_bytes(model, variant)
        total = model.params_total - model.lookup_params
        tokens = replace(model, lookup_params=0, lookup_bits=0.0, params_total=total)
        others = replace(variant, file_bytes=weights_bytes(variant) - tables_bytes, weights_bytes=0)
        return tables_bytes + embedding_bytes(tokens, others)
    rows = model.vocab_size * model.hidden_size
    mixture = quants.MIXTURES.get(variant.quant)
    if mixture is not None:
        wanted_type = mixture.head if model.tied_embeddings else mixture.embed
        bits = quants.GGUF_TYPES[quants.fallback(wanted_type, model.hidden_size)].bits
        return round(rows * bits / 8)
    counts = facts(model)
    stored_params = counts.dense_params + counts.pool_params + counts.embedding_params
    return round(weights_bytes(variant) * min(1.0, rows / max(1, stored_params)))


def fully_offloaded_bytes(model: Model, variant: Variant, device: Device | None) -> tuple[int, int]:
    """Return (bytes on the accelerator, bytes in host memory) for the weights of `variant` if all
    layers are offloaded.

    llama.cpp keeps the token embedding and the row lookup tables in host memory. Tied models get a
    second copy of the token embedding on the device as the output matrix. On Metal both views map
    the same file pages.
    """
    total = weights_bytes(variant)
    if device is None or device.accelerator == "cpu" or not backend_of(variant).host_embedding:
        return total, 0
    embedding = min(total, embedding_bytes(model, variant))
    copied_bytes = 0
    if model.tied_embeddings:
        copied_bytes = embedding - min(embedding, layer_bytes.table_bytes(model, variant))
    if device.kind == "unified":
        if KINDS[device.accelerator].shares_tables:
            copied_bytes = 0
        return total + copied_bytes, 0
    return total - embedding + copied_bytes, embedding


# --- runtime --------------------------------------------------------------------------------------


def overhead_bytes(device: Device | None) -> int:
    """Return the bytes that the runtime keeps on the accelerator, counted once per card."""
    if device is None:
        return 0
    return device.n_gpus * KINDS[device.accelerator].runtime_bytes(device.compute_units)


@lru_cache(4096)
def dequantised_bytes(model: Model, settings: RunSettings) -> int:
    """Return the bytes in a step's buffers for one layer's KV at 16 bits, which CUDA and ROCm hold
    for KV types other than f16.

    Flash attention over a prompt reads only f16 (ggml-cuda/fattn.cu,
    `ggml_cuda_flash_attn_ext_get_alloc_size`; 512 MiB for 131,072 cells of 2,048).
    """
    layout = kv_sizes.layout(settings)
    largest = 0
    for layer, _ in facts(model).groups:
        k_width, v_width = layer.mixer.row
        quantised_width = 0
        if settings.kv_type_k != "f16":
            quantised_width += k_width
        if settings.kv_type_v != "f16":
            quantised_width += v_width
        largest = max(largest, layer.mixer.cells(layout) * quantised_width)
    return F16 * largest


def _step_bytes(model: Model, settings: RunSettings, device: Device | None) -> int:
    # GPU schedulers split the graph and keep copies of inputs. Logs show 5-20 % more than the CPU
    # planner's figure.
    if device is None or device.accelerator == "cpu":
        return compute_bytes(model, settings)
    extra_bytes = 0
    if KINDS[device.accelerator].dequantises_kv:
        extra_bytes = dequantised_bytes(model, settings)
    # The host writes the mask, and the device keeps a copy for the whole step. In unified memory
    # both copies count.
    if device.kind == "unified":
        extra_bytes += 2 * F16 * _attention_mask_cells(model, settings) * settings.n_batch
    return compute_bytes(model, settings) * 6 // 5 + extra_bytes


def host_compute_bytes(model: Model, settings: RunSettings) -> int:
    """Return the bytes of the host's scratch buffer for one micro-batch, next to a discrete
    accelerator.

    It holds the mask, the hidden states at both ends, and the experts or layers that the host
    computes. Checked against llama.cpp's plans with such a device: exact if the host computes no
    layers or whole layers, up to 12 MiB too much with experts.
    """
    n_layers = len(model.layers)
    placement = settings.placement
    n_bytes = F16 * _attention_mask_cells(model, settings) * settings.n_batch
    n_bytes += 2 * F32 * model.hidden_size * settings.n_batch
    if placement.first_gpu_layer(n_layers) > 0:
        return max(n_bytes, compute_bytes(model, settings))
    if placement.host_expert_layers(n_layers) and model.experts is not None:
        rows = model.experts.n_active * model.hidden_size
        expert_width = model.experts.n_active * model.experts.intermediate
        n_bytes += F32 * settings.n_batch * max(2 * rows, rows + 2 * expert_width, 3 * expert_width)
    return n_bytes


# ggml's GGML_SCHED_MAX_COPIES: micro-batches that several cards process at once.
_PIPELINE_COPIES = 4


def pipeline_bytes(model: Model, settings: RunSettings, n_cards: int) -> int:
    """Return the extra bytes on each card and on the host if llama.cpp runs several cards as a
    pipeline of micro-batches.

    They hold more copies of a step's inputs, mask and hidden states. llama.cpp does this if all
    layers are on cards and no tensors are placed elsewhere.
    """
    placement = settings.placement
    if n_cards < 2 or placement.is_split:
        return 0
    inputs = F16 * _attention_mask_cells(model, settings) + F32 * model.hidden_size
    return (_PIPELINE_COPIES - 1) * inputs * settings.n_batch


def layer_ledger(model: Model, variant: Variant, settings: RunSettings) -> layer_bytes.Ledger:
    """Return the bytes of each layer in this run."""
    kv = layer_kv_bytes(model, settings)
    state = layer_state_bytes(model, settings)
    parts = layer_bytes.parts(model, variant)
    rows = tuple((d, e, k, s) for (d, e), k, s in zip(parts.layers, kv, state, strict=True))
    return layer_bytes.Ledger(rows, parts.input_bytes, parts.output_bytes, parts.own_output_bytes)


def need(
    model: Model, variant: Variant, settings: RunSettings, device: Device | None = None
) -> MemoryNeed:
    """Return all bytes to run `variant` with these settings, split into the accelerator's memory
    and the host's.

    On unified and CPU machines all bytes are in one pool, and `host_bytes` is 0. If `device` is
    None (no limit known), the figures are those of a CPU.
    """
    if backend_of(variant).buffers == "grown":
        return _need_mlx(model, variant, settings, device)
    n_cards = 1
    limit = 0
    if device is not None:
        device = layer_bytes.with_used_cards(device, settings.placement)
        n_cards = device.n_gpus
        limit = device.usable_bytes
        if device.kind == "discrete":
            return _need_on_cards(model, variant, settings, device)
    weights, _ = fully_offloaded_bytes(model, variant, device)
    disk = layer_bytes.disk_bytes(model, variant, settings)
    compute = n_cards * _step_bytes(model, settings, device)
    return MemoryNeed(
        weights_bytes=weights - disk,
        kv_bytes=kv_bytes(model, settings),
        recurrent_bytes=recurrent_bytes(model, settings),
        compute_bytes=compute + output_bytes(model, settings.slots),
        overhead_bytes=overhead_bytes(device),
        draft_bytes=_draft_bytes(model, variant, settings, device),
        limit_bytes=limit,
        disk_bytes=disk,
        projector_bytes=settings.projector_bytes,
    )


def _need_on_cards(
    model: Model, variant: Variant, settings: RunSettings, device: Device
) -> MemoryNeed:
    """Return `need` for one or more cards with their own memory, separate from the host's."""
    placement = settings.placement
    n_cards = device.n_gpus
    kv = kv_bytes(model, settings)
    state = recurrent_bytes(model, settings)
    host_cache = 0
    rows: list[int] = []
    if placement.is_split or n_cards > 1 or variant.layer_bytes:
        ledger = layer_ledger(model, variant, settings)
        host_kv, host_state = ledger.host_kv_bytes(placement)
        kv -= host_kv
        state -= host_state
        host_cache = host_kv + host_state
        rows = ledger.device_layers(placement)
        weights = sum(rows) - kv - state
        host_weights = ledger.host_weights_bytes(placement)
    else:
        weights, host_weights = fully_offloaded_bytes(model, variant, device)
    # Each card holds the buffers for the graph of its own layers.
    copies = pipeline_bytes(model, settings, n_cards)
    compute = overhead = projector = 0
    if placement.gpu_layers != 0:
        compute = _step_bytes(model, settings, device) + copies
        overhead = overhead_bytes(device)
        projector = settings.projector_bytes
    drafter = _draft_bytes(model, variant, settings, device)
    disk = min(host_weights, layer_bytes.disk_bytes(model, variant, settings))
    host = host_weights - disk + host_cache + settings.projector_bytes - projector
    host += host_compute_bytes(model, settings) + copies + output_bytes(model, settings.slots)
    cards = limits = tuple[int, ...]()
    if n_cards > 1:
        limits = cards_limits(device)
        by_card = layer_bytes.as_split(rows, placement.tensor_split or limits, n_cards)
        cards = _cards_bytes(by_card, compute + overhead // n_cards, drafter, settings)
    return MemoryNeed(
        weights_bytes=max(0, weights),
        kv_bytes=kv,
        recurrent_bytes=state,
        compute_bytes=compute * n_cards,
        overhead_bytes=overhead,
        draft_bytes=drafter,
        limit_bytes=device.usable_bytes,
        host_bytes=host,
        cards_bytes=cards,
        cards_limit_bytes=limits,
        disk_bytes=disk,
        projector_bytes=projector,
        host_limit_bytes=device.host.limit_bytes if device.host else 0,
    )


def _cards_bytes(
    layers: Sequence[int], fixed_bytes: int, drafter_bytes: int, settings: RunSettings
) -> tuple[int, ...]:
    """Return the bytes on each card: its `layers`, the `fixed_bytes` bytes, and its share of the
    drafter.

    The drafter is split like the model. The image projector is on the first card.
    """
    total = max(1, sum(layers))
    first, *others = (n + fixed_bytes + drafter_bytes * n // total for n in layers)
    return first + settings.projector_bytes, *others


def cards_limits(device: Device) -> tuple[int, ...]:
    """Return the bytes that each card may hold."""
    if device.cards:
        return tuple(card.usable_bytes for card in device.cards)
    return (device.usable_bytes // device.n_gpus,) * device.n_gpus


def _draft_bytes(
    model: Model, variant: Variant, settings: RunSettings, device: Device | None
) -> int:
    """Return the bytes of the drafter: a second model with its own context, the model's own heads,
    or a trained drafter."""
    drafter = settings.drafter
    n_bytes = 0
    if drafter.second is not None:
        # The engine's worker loads it with the same context, sequences and step size, and with KV
        # at 16 bits.
        second_settings = RunSettings(
            settings.n_ctx, slots=settings.slots, n_batch=settings.n_batch, n_outputs=settings.slots
        )
        second_settings = second_settings.placed(gpu_layers=settings.placement.gpu_layers)
        second_need = need(*drafter.second, second_settings, device)
        n_bytes = second_need.total_bytes - second_need.overhead_bytes
    if drafter.is_mtp and model.mtp_layers:
        n_bytes += mtp_bytes(model, variant, settings)
    if drafter.companion is not None:
        n_bytes += companion_bytes(model, drafter.companion, settings)
    return n_bytes


# Extra cells per sequence that our llama.cpp backend gives the draft heads
# (localllm_backends/llamacpp/context.py).
_HEADS_DRAFT_CELLS = 48
_REWIND_TOKENS = 3
# Tokens that our llama.cpp backend lets a trained drafter read at once
# (localllm_backends/llamacpp/trained_drafter.py). The drafter reads the rows of about five of the
# model's layers.
_COMPANION_BATCH = 128
_COMPANION_LAYERS = 5
# Tokens of a sequence that heads may leave unread, each with a row (backends' draft_head_state.py).
_UNREAD_TOKENS = 256


def spare_sequences(model: Model, variant: Variant, *, heads: bool) -> int:
    """Return the number of sequences that our llama.cpp backend keeps for itself
    (localllm_backends/llamacpp/load.py).

    They count only if each sequence has its own window or state: the result is then 1. It is 0 if
    all layers are recurrent, or if the model's own `heads` draft.
    """
    known = facts(model)
    if heads or not known.is_stateful or not backend_of(variant).spare_sequence:
        return 0
    return int(any(layer.mixer.attends for layer, _ in known.groups))


def rewind_for(model: Model, drafter: DraftChoice) -> int:
    """Return how many snapshots to keep so that rejected drafts can be taken back.

    The result is 0 for models without recurrent layers. For recurrent models it is 3 with their own
    heads, a trained drafter, or lookups that the user asked for. Each snapshot is a copy of the
    whole state, and few drafts are longer (llama.cpp's own default is 3). With snapshots, streams
    run one after another, so lookups need an explicit request.
    """
    if not facts(model).n_recurrent_layers:
        return 0
    own_heads = drafter.is_mtp and model.mtp_layers > 0
    if own_heads or drafter.companion is not None or drafter.name == "ngram":
        return _REWIND_TOKENS
    return 0


def mtp_bytes(model: Model, variant: Variant, settings: RunSettings) -> int:
    """Return the bytes for drafting with the model's own heads on llama.cpp: their weights, a
    context of their layers alone, and the model's hidden rows.

    A head's layer is assumed to be like the model's last layer of unbounded attention.
    """
    attention = [layer for layer in model.layers if layer.mixer.attends]
    unbounded = [layer for layer in attention if not layer.mixer.is_bounded] or attention
    heads = replace(model, layers=tuple(unbounded[-1:]) * model.mtp_layers)
    outputs = settings.slots * model.mtp_layers
    n_ctx = settings.n_ctx + _HEADS_DRAFT_CELLS * settings.slots
    settings_of_heads = replace(settings, n_ctx=n_ctx, n_outputs=outputs)
    context = kv_bytes(heads, settings_of_heads) + compute_bytes(heads, settings_of_heads)
    rows = settings.n_batch + outputs + _UNREAD_TOKENS * settings.slots
    hidden = F32 * model.hidden_size * rows
    return variant.mtp_bytes + context + output_bytes(model, outputs) + hidden


def companion_bytes(model: Model, companion: CompanionDrafter, settings: RunSettings) -> int:
    """Return the bytes of a trained drafter on llama.cpp.

    These are its file, its own context at 16 bits, and the rows of the model's layers that it
    reads. Logits for one read batch count twice: as computed and as returned.
    """
    cells = settings.n_ctx + (_HEADS_DRAFT_CELLS + companion.block) * settings.slots
    logits = 2 * _COMPANION_BATCH * model.vocab_size
    rows = 2 * settings.n_batch + _UNREAD_TOKENS * settings.slots
    hidden = _COMPANION_LAYERS * model.hidden_size * rows
    kv = F16 * companion.kv_elements * cells
    return companion.file_bytes + kv + F32 * (logits + hidden)


def mlx_companion_bytes(model: Model, companion: CompanionDrafter, settings: RunSettings) -> int:
    """Return the bytes of a trained drafter on MLX.

    These are its files, its KV at 16 bits, the model's rows that it reads (as computed, joined and
    unread), and the logits of a block for every sequence.
    """
    kv = F16 * companion.kv_elements * kv_sizes.pad(settings.n_ctx)
    rows = 2 * settings.n_batch + _UNREAD_TOKENS * settings.slots
    hidden = F16 * _COMPANION_LAYERS * model.hidden_size * rows
    logits = F32 * max(1, companion.block) * settings.slots * model.vocab_size
    return companion.file_bytes + kv + hidden + logits


def mlx_step_bytes(model: Model, settings: RunSettings, fused_heads: tuple[int, ...] = ()) -> int:
    """Return the bytes that MLX holds during a step.

    These are 16-bit activations of a micro-batch, attention scores, each sequence's logits, and the
    freed buffers kept for reuse. MLX plans no buffer ahead.
    """
    activations = compute_bytes(model, replace(settings, n_ctx=CONTEXT_STEP, n_outputs=1)) // 2
    scores = scores_bytes(model, settings, fused_heads)
    return activations + scores + output_bytes(model, settings.slots) // 2 + _MLX_REUSE_BYTES


def _need_mlx(
    model: Model, variant: Variant, settings: RunSettings, device: Device | None
) -> MemoryNeed:
    drafter = 0
    if settings.drafter.second is not None:
        second, files = settings.drafter.second
        run = RunSettings(settings.n_ctx, slots=settings.slots)
        drafter = weights_bytes(files) + mlx_kv_bytes(second, run) + recurrent_bytes(second, run)
    if settings.drafter.is_mtp and model.mtp_layers:
        drafter += mtp_bytes(model, variant, settings)
    if settings.drafter.companion is not None:
        drafter += mlx_companion_bytes(model, settings.drafter.companion, settings)
    # mlx-lm keeps one state to take tokens back, whatever their number.
    with_one_state = replace(settings, n_rewind=min(1, settings.n_rewind))
    # MLX has no fused attention on the CPU (mlx/backend/no_gpu/primitives.cpp).
    fused = backend_of(variant).fused_heads
    if device is None or device.accelerator == "cpu":
        fused = ()
    return MemoryNeed(
        weights_bytes=weights_bytes(variant),
        kv_bytes=mlx_kv_bytes(model, settings),
        # mlx-lm keeps the convolution's state in the activations' type, and the rest in float32.
        recurrent_bytes=recurrent_bytes(model, with_one_state),
        compute_bytes=mlx_step_bytes(model, settings, fused),
        overhead_bytes=overhead_bytes(device),
        draft_bytes=drafter,
        limit_bytes=device.usable_bytes if device is not None else 0,
        projector_bytes=settings.projector_bytes,
    )
