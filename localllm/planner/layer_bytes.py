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
        own = max(0, total - variant.input_bytes - in_layers)
        return Parts(variant.input_bytes, max(own, variant.output_bytes), own, layers)
    stream = streamed(model, variant)
    known = facts(model)
    matrix = model.vocab_size * model.hidden_size
    stored = known.dense_params + known.pool_params + known.embedding_params + model.lookup_params
    mix = quants.MIXTURES.get(variant.quant)
    bits = 8 * total / max(1, stored)
    if mix is not None:
        bits = quants.GGUF_TYPES[quants.fallback(mix.head, model.hidden_size)].bits
    experts = min(total, stream.expert_pool_bytes)
    output = min(total - experts, round(matrix * bits / 8))
    # Every token reads the layers and the output matrix, even if the matrix also serves as
    # embedding table.
    dense = max(0, min(total - experts, stream.dense_bytes) - output)
    holds = [layer.has_experts and model.experts is not None for layer in model.layers]
    each_dense = dense // max(1, len(holds))
    each_pool = experts // max(1, sum(holds))
    layers = tuple((each_dense, each_pool if has else 0) for has in holds)
    own = 0 if model.tied_embeddings else output
    return Parts(max(0, total - own - sum(a + b for a, b in layers)), output, own, layers)


class Ledger(NamedTuple):
    """Bytes of each layer in a run: (always read, routed experts, KV, state). The other fields are
    those of `Parts`."""

    layers: tuple[tuple[int, int, int, int], ...]
    input_bytes: int
    output_bytes: int
    own_output_bytes: int

    def device_layers(self, placed: Placement) -> list[int]:
        """Return the bytes on devices of each layer from the first one there, and last those of the
        output."""
        n = len(self.layers)
        first = placed.first_gpu_layer(n)
        kept = placed.host_expert_layers(n)
        found = []
        for i, (dense, experts, kv, state) in enumerate(self.layers[first:], first):
            n_bytes = dense
            if i >= kept:
                n_bytes += experts
            if not placed.kv_on_host:
                n_bytes += kv + state
            found.append(n_bytes)
        if first <= n:
            found.append(self.output_bytes)
        return found

    def host_weights_bytes(self, placed: Placement) -> int:
        """Return the weight bytes in system memory."""
        n = len(self.layers)
        first = placed.first_gpu_layer(n)
        kept = placed.host_expert_layers(n)
        left = sum(dense + experts for dense, experts, _, _ in self.layers[:first])
        left += sum(experts for _, experts, _, _ in self.layers[first:kept])
        if first > n:
            left += self.own_output_bytes
        return self.input_bytes + left

    def host_kv_bytes(self, placed: Placement) -> tuple[int, int]:
        """Return the (KV, state) bytes in system memory."""
        on_host = self.layers
        if not placed.kv_on_host:
            on_host = on_host[: placed.first_gpu_layer(len(on_host))]
        return sum(layer[2] for layer in on_host), sum(layer[3] for layer in on_host)


# --- several cards --------------------------------------------------------------------------------


def used(device: Device, placed: Placement) -> Device:
    """Return `device` with only the cards that `placed` uses."""
    if placed.cards:
        return cards.only(device, placed.cards)
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
    upto = [0, *accumulate(device_layers)]
    ends = []
    last = 0
    for part in accumulate(limits):
        goal = total * part / total_limit
        # The boundary nearest to the card's share, but not before the previous one.
        above = min(bisect_left(upto, goal, last), len(device_layers))
        last = above - (above > last and goal - upto[above - 1] <= upto[above] - goal)
        ends.append(last)
    ends[-1] = len(device_layers)
    runs = list(pairwise([0, *ends]))
    return tuple(b - a for a, b in runs), tuple(sum(device_layers[a:b]) for a, b in runs)


def as_split(device_layers: Sequence[int], split: Sequence[float], n_cards: int) -> tuple[int, ...]:
    """Return the bytes of each card if llama.cpp splits the layers by `split`.

    A layer goes to the first card whose cumulative share is above the layer's relative position.
    """
    shares = [*split, *([0.0] * n_cards)][:n_cards]
    total = sum(shares) or 1.0
    bounds = [x / total for x in accumulate(shares)]
    found = [0] * n_cards
    for i, n_bytes in enumerate(device_layers):
        found[min(bisect_right(bounds, i / len(device_layers)), n_cards - 1)] += n_bytes
    return tuple(found)


def weights_of_cards(
    model: Model, variant: Variant, placed: Placement, device: Device
) -> tuple[tuple[Device, float], ...]:
    """Return the cards of `device` with each one's share (0..1) of the weights on them.

    If all cards are alike, or not known individually, returns `device` itself with share 1.
    """
    kinds = {(card.match or card.name, card.bandwidth_gbps.value) for card in device.cards}
    if len(kinds) < 2:
        return ((device, 1.0),)
    found = parts(model, variant)
    n = len(model.layers)
    first = placed.first_gpu_layer(n)
    kept = placed.host_expert_layers(n)
    rows = []
    for i, (dense, experts) in enumerate(found.layers[first:], first):
        rows.append(dense if i < kept else dense + experts)
    rows.append(found.output_bytes)
    split = placed.tensor_split or tuple(card.usable_bytes for card in device.cards)
    card_bytes = as_split(rows, split, len(device.cards))
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


def shares(model: Model, variant: Variant, placed: Placement) -> CardShare:
    """Return how `placed` splits a step. KV counts by the number of layers, and each crossing is
    one copy of the activations."""
    if not placed.is_split:
        return COMPLETE_SHARE
    found = parts(model, variant)
    n = len(model.layers)
    first = placed.first_gpu_layer(n)
    kept = placed.host_expert_layers(n)
    dense = sum(d for d, _ in found.layers[first:])
    if first <= n:
        dense += found.output_bytes
    n_device = max(0, n - first)
    of_layers = n_device / max(1, n)
    of_kv = of_layers
    crossings = 2 * sum(1 for _, e in found.layers[first:kept] if e)
    if 0 < first <= n:
        crossings += 2
    if placed.kv_on_host:
        of_kv = 0.0
        crossings += 2 * n_device
    of_experts = of_layers
    if found.expert_bytes:
        experts = sum(e for _, e in found.layers[max(first, kept) :])
        of_experts = experts / found.expert_bytes
    of_dense = dense / max(1, found.dense_bytes + found.output_bytes)
    return CardShare(of_dense, of_experts, of_kv, of_layers, crossings)


# llama.cpp reads tables up to this size into memory anyway.
MIN_BYTES = 4 * 2**30
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
    where = settings.placement.tables
    if not model.lookup_params or where == "memory" or not backend_of(variant).disk_tables:
        return 0
    found = table_bytes(model, variant)
    if where == "disk" or found > MIN_BYTES:
        return found
    return 0


def token_s(
    model: Model, variant: Variant, settings: RunSettings, *, row_s: float = ROW_S
) -> float:
    """Return the seconds that a token waits for its rows from disk if they are not cached in
    memory."""
    if disk_bytes(model, variant, settings):
        return model.lookup_rows * row_s
    return 0.0
