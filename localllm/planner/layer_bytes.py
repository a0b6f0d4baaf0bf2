"""Bytes of a model by layer, and how llama.cpp splits them over cards and system memory.

llama.cpp (https://github.com/ggml-org/llama.cpp, src/llama-model.cpp load_tensors,
llama-model-loader.cpp) keeps the input tables in system memory. The last layers and the output go
to the devices. A pattern can keep tensors of those layers in system memory: the routed experts of
the first ones. KV and recurrent state are in the memory where their layer is computed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from localllm.device import cards
from localllm.device.types import Device
from localllm.planner.bytes_per_token import facts, streamed
from localllm.planner.types import RunSettings, backend_of
from localllm_backends.placement import Placement
from localllm_catalog import quants
from localllm_catalog.types import Model, Variant


class Parts(NamedTuple):
    """Weight bytes of a variant.

    - `input_bytes`: tables from which a token reads one row.
    - `output_bytes`: the output matrix on a device.
    - `own_output_bytes`: the part of it that the file holds in addition to the tables (tied models
      reuse a table).
    - `layers`: of each layer, the bytes that every token reads and its routed experts.
    """

    input_bytes: int
    output_bytes: int
    own_output_bytes: int
    layers: tuple[tuple[int, int], ...]

    @property
    def dense_bytes(self) -> int:
        """Bytes of the layers that every token reads."""
        return sum(dense for dense, _ in self.layers)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts."""
        return sum(experts for _, experts in self.layers)


@lru_cache(4096)
def parts(model: Model, variant: Variant) -> Parts:
    """Return the parts of `variant`, from its header if known. Else they follow from shapes and
    format, and all layers of a kind count as equal."""
    total = variant.weights_bytes or variant.file_bytes
    if variant.layer_bytes and len(variant.layer_bytes) == len(model.layers):
        layers = variant.layer_bytes
        in_layers = sum(dense + experts for dense, experts in layers)
        own_output_bytes = max(0, total - variant.input_bytes - in_layers)
        return Parts(
            variant.input_bytes,
            max(own_output_bytes, variant.output_bytes),
            own_output_bytes,
            layers,
        )
    stream = streamed(model, variant)
    counts = facts(model)
    matrix_params = model.vocab_size * model.hidden_size
    stored_params = (
        counts.dense_params + counts.pool_params + counts.embedding_params + model.lookup_params
    )
    mixture = quants.MIXTURES.get(variant.quant)
    bits = 8 * total / max(1, stored_params)
    if mixture is not None:
        bits = quants.GGUF_TYPES[quants.fallback(mixture.head, model.hidden_size)].bits
    experts = min(total, stream.expert_pool_bytes)
    output = min(total - experts, round(matrix_params * bits / 8))
    # Every token reads the layers and the output matrix, even if the matrix also serves as
    # embedding table.
    dense = max(0, min(total - experts, stream.dense_bytes) - output)
    has_experts = [layer.has_experts and model.experts is not None for layer in model.layers]
    layer_dense_bytes = dense // max(1, len(has_experts))
    layer_pool_bytes = experts // max(1, sum(has_experts))
    layers = tuple(
        (layer_dense_bytes, layer_pool_bytes if has_pool else 0) for has_pool in has_experts
    )
    own_output_bytes = 0 if model.tied_embeddings else output
    return Parts(
        max(0, total - own_output_bytes - sum(a + b for a, b in layers)),
        output,
        own_output_bytes,
        layers,
    )


class Ledger(NamedTuple):
    """Bytes of each layer in a run: (always read, routed experts, KV, state). The other fields are
    those of `Parts`."""

    layers: tuple[tuple[int, int, int, int], ...]
    input_bytes: int
    output_bytes: int
    own_output_bytes: int

    def device_layers(self, placement: Placement) -> list[int]:
        """Return the bytes on devices of each layer from the first one there, and last those of the
        output."""
        n_layers = len(self.layers)
        first_layer = placement.first_gpu_layer(n_layers)
        n_host_experts = placement.host_expert_layers(n_layers)
        layer_bytes = []
        for i, (dense, experts, kv, state) in enumerate(self.layers[first_layer:], first_layer):
            n_bytes = dense
            if i >= n_host_experts:
                n_bytes += experts
            if not placement.kv_on_host:
                n_bytes += kv + state
            layer_bytes.append(n_bytes)
        if first_layer <= n_layers:
            layer_bytes.append(self.output_bytes)
        return layer_bytes

    def host_weights_bytes(self, placement: Placement) -> int:
        """Return the weight bytes in system memory."""
        n_layers = len(self.layers)
        first_layer = placement.first_gpu_layer(n_layers)
        n_host_experts = placement.host_expert_layers(n_layers)
        host_bytes = sum(dense + experts for dense, experts, _, _ in self.layers[:first_layer])
        host_bytes += sum(experts for _, experts, _, _ in self.layers[first_layer:n_host_experts])
        if first_layer > n_layers:
            host_bytes += self.own_output_bytes
        return self.input_bytes + host_bytes

    def host_kv_bytes(self, placement: Placement) -> tuple[int, int]:
        """Return the (KV, state) bytes in system memory."""
        host_layers = self.layers
        if not placement.kv_on_host:
            host_layers = host_layers[: placement.first_gpu_layer(len(host_layers))]
        return sum(layer[2] for layer in host_layers), sum(layer[3] for layer in host_layers)


# --- several cards --------------------------------------------------------------------------------


def with_used_cards(device: Device, placement: Placement) -> Device:
    """Return `device` with only the cards that `placement` uses."""
    if placement.cards:
        return cards.only_cards(device, placement.cards)
    return device


def over_cards(
    device_layers: Sequence[int], limits: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (layers of each card, bytes of each card) if consecutive layers fill the cards in
    proportion to their limits in bytes.

    llama.cpp follows these counts exactly if they are its `tensor_split`.
    """
    if not device_layers:
        return tuple(0 for _ in limits), tuple(0 for _ in limits)
    total = sum(device_layers)
    total_limit = max(1, sum(limits))
    cumulative_bytes = [0, *accumulate(device_layers)]
    ends = []
    previous_end = 0
    for cumulative_limit in accumulate(limits):
        goal = total * cumulative_limit / total_limit
        # The boundary nearest to the card's share, but not before the previous one.
        boundary = min(bisect_left(cumulative_bytes, goal, previous_end), len(device_layers))
        previous_end = boundary - (
            boundary > previous_end
            and goal - cumulative_bytes[boundary - 1] <= cumulative_bytes[boundary] - goal
        )
        ends.append(previous_end)
    ends[-1] = len(device_layers)
    card_ranges = list(pairwise([0, *ends]))
    return tuple(end - start for start, end in card_ranges), tuple(
        sum(device_layers[start:end]) for start, end in card_ranges
    )


def as_split(device_layers: Sequence[int], split: Sequence[float], n_cards: int) -> tuple[int, ...]:
    """Return the bytes of each card if llama.cpp splits the layers by `split`.

    A layer goes to the first card whose cumulative share is above the layer's relative position.
    """
    shares = [*split, *([0.0] * n_cards)][:n_cards]
    total = sum(shares) or 1.0
    bounds = [cumulative / total for cumulative in accumulate(shares)]
    card_bytes = [0] * n_cards
    for i, n_bytes in enumerate(device_layers):
        card_bytes[min(bisect_right(bounds, i / len(device_layers)), n_cards - 1)] += n_bytes
    return tuple(card_bytes)


def weights_of_cards(
    model: Model, variant: Variant, placement: Placement, device: Device
) -> tuple[tuple[Device, float], ...]:
    """Return the cards of `device` with each one's share (0..1) of the weights on them.

    If all cards are alike, or not known individually, returns `device` itself with share 1.
    """
    kinds = {(card.match or card.name, card.bandwidth_gbps.value) for card in device.cards}
    if len(kinds) < 2:
        return ((device, 1.0),)
    parts_of_model = parts(model, variant)
    n_layers = len(model.layers)
    first_layer = placement.first_gpu_layer(n_layers)
    n_host_experts = placement.host_expert_layers(n_layers)
    layers_bytes = []
    for i, (dense, experts) in enumerate(parts_of_model.layers[first_layer:], first_layer):
        layers_bytes.append(dense if i < n_host_experts else dense + experts)
    layers_bytes.append(parts_of_model.output_bytes)
    split = placement.tensor_split or tuple(card.usable_bytes for card in device.cards)
    card_bytes = as_split(layers_bytes, split, len(device.cards))
    total = max(1, sum(card_bytes))
    return tuple(
        (card, n_bytes / total) for card, n_bytes in zip(device.cards, card_bytes, strict=True)
    )


# --- shares, for the speed ------------------------------------------------------------------------


# The field of `CardShare` that divides each cause of a decode step's time.
SHARED_AS = {
    "weights": "dense", "unpacked": "dense",
    "routed": "experts", "routed_unpacked": "experts", "experts": "experts",
    "layers": "layers", "recurrent": "layers", "state": "layers", "further": "layers",
    "kv": "kv",
}  # fmt: skip


class CardShare(NamedTuple):
    """The shares (0..1) of a token's reads and computation that are on the devices. `crossings`
    counts how often a step changes between memories."""

    dense: float
    experts: float
    kv: float
    layers: float
    crossings: int

    @property
    def is_complete(self) -> bool:
        """True if all of it is on the devices."""
        return min(self.dense, self.experts, self.kv, self.layers) >= 1.0


COMPLETE_SHARE = CardShare(1.0, 1.0, 1.0, 1.0, 0)


def shares(model: Model, variant: Variant, placement: Placement) -> CardShare:
    """Return how `placement` splits a step. KV counts by the number of layers, and each crossing is
    one copy of the activations."""
    if not placement.is_split:
        return COMPLETE_SHARE
    parts_of_model = parts(model, variant)
    n_layers = len(model.layers)
    first_layer = placement.first_gpu_layer(n_layers)
    n_host_experts = placement.host_expert_layers(n_layers)
    dense = sum(dense_bytes for dense_bytes, _ in parts_of_model.layers[first_layer:])
    if first_layer <= n_layers:
        dense += parts_of_model.output_bytes
    n_device = max(0, n_layers - first_layer)
    layer_share = n_device / max(1, n_layers)
    kv_share = layer_share
    crossings = 2 * sum(
        1 for _, expert_bytes in parts_of_model.layers[first_layer:n_host_experts] if expert_bytes
    )
    if 0 < first_layer <= n_layers:
        crossings += 2
    if placement.kv_on_host:
        kv_share = 0.0
        crossings += 2 * n_device
    expert_share = layer_share
    if parts_of_model.expert_bytes:
        experts = sum(
            expert_bytes
            for _, expert_bytes in parts_of_model.layers[max(first_layer, n_host_experts) :]
        )
        expert_share = experts / parts_of_model.expert_bytes
    dense_share = dense / max(1, parts_of_model.dense_bytes + parts_of_model.output_bytes)
    return CardShare(dense_share, expert_share, kv_share, layer_share, crossings)


# llama.cpp reads tables up to this size into memory anyway.
MIN_DISK_TABLE_BYTES = 4 * 2**30
# Seconds to read a row that is not in memory. An SSD on PCIe serves 100,000 such reads a second or
# more (assumed). On a DGX Spark, Qwen3.8-Flash-Next answered as fast with its table cold as warm
# (github.com/0xBakeer/inference-atlas, pull requests 79 to 81). A hard disk serves a hundred.
ROW_S = 10e-6
SLOW_ROW_S = 10e-3


def table_bytes(model: Model, variant: Variant) -> int:
    """Return the bytes of the row lookup tables of `variant`, without the token embedding; 0
    without such tables."""
    if not model.lookup_params:
        return 0
    if variant.input_bytes:  # read from the header, which includes the token embedding
        tokens = model.vocab_size * model.hidden_size
        return round(variant.input_bytes * model.lookup_params / (model.lookup_params + tokens))
    if model.lookup_bits:
        return round(model.lookup_params * model.lookup_bits / 8)
    weights_bytes = variant.weights_bytes or variant.file_bytes
    bits = 8 * weights_bytes / max(1, model.params_total)
    return round(model.lookup_params * bits / 8)


def disk_bytes(model: Model, variant: Variant, settings: RunSettings) -> int:
    """Return the bytes that this run leaves on disk; 0 if the engine reads the whole file."""
    tables = settings.placement.tables
    if not model.lookup_params or tables == "memory" or not backend_of(variant).disk_tables:
        return 0
    n_bytes = table_bytes(model, variant)
    if tables == "disk" or n_bytes > MIN_DISK_TABLE_BYTES:
        return n_bytes
    return 0


def token_s(
    model: Model, variant: Variant, settings: RunSettings, *, row_s: float = ROW_S
) -> float:
    """Return the seconds that a token waits for its rows from disk if they are not cached in
    memory."""
    if disk_bytes(model, variant, settings):
        return model.lookup_rows * row_s
    return 0.0
