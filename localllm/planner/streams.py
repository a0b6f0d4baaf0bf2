"""Which weight bytes one token streams from memory: what every token reads, and the experts it was
routed to."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from localllm_catalog import quants, shapes
from localllm_catalog.types import Layer, Model, Variant


@dataclass(frozen=True, slots=True)
class Streamed:
    """Weight bytes of one decode step of one sequence: `dense_bytes` always, `routed_bytes` of its
    chosen experts.

    `expert_pool_bytes` are all routed experts together: what a large batch approaches. Parameters
    are counts.
    """

    dense_bytes: int
    routed_bytes: int
    expert_pool_bytes: int
    dense_params: int
    routed_params: int

    @property
    def total_bytes(self) -> int:
        """Bytes one sequence's token reads."""
        return self.dense_bytes + self.routed_bytes

    def step_bytes(self, model: Model, n_sequences: float) -> int:
        """Bytes a step over `n_sequences` tokens reads: with k of n experts each, the expected
        share touched is 1 − (1 − k/n)^tokens (independent routing)."""
        if model.experts is None or n_sequences <= 1:
            return self.total_bytes
        chosen = model.experts.n_active / model.experts.n_experts
        touched = 1 - math.pow(1 - chosen, n_sequences)
        return self.dense_bytes + round(self.expert_pool_bytes * touched)

    def step_routed_params(self, model: Model, n_sequences: float) -> float:
        """Parameters of the experts that such a step touches."""
        if not self.routed_bytes:
            return float(self.routed_params)
        read = self.step_bytes(model, n_sequences) - self.dense_bytes
        return self.routed_params * read / self.routed_bytes


# Bits of the tensors every token reads (attention, shared experts, output) in mixtures of experts.
# Attention of K mixtures is one step above the base on average; MXFP4_MOE keeps them at 8 bits or
# so, and so do Unsloth's dynamic files since Qwen3.5
# (https://unsloth.ai/docs/models/qwen3.5/gguf-benchmarks). Those before were K mixtures in this:
# with 8 bits Llama-4-Scout's UD-Q4_K_XL would have been measured above what the memory of a Strix
# Halo delivers.
_DYNAMIC_BITS = 8.5
_ABOVE_BASE_BITS = 0.6
_DYNAMIC_SINCE = "2026-02"


def _shared_bits(quant: str, average_bits: float, released: str) -> float:
    is_dynamic = quant.startswith("UD-") and not "" < released < _DYNAMIC_SINCE
    if is_dynamic or quant == "MXFP4_MOE":
        if average_bits < 15:
            return max(_DYNAMIC_BITS, average_bits)
        return average_bits
    if average_bits < 6.5:
        return average_bits + _ABOVE_BASE_BITS
    return average_bits


@lru_cache(4096)
def streamed(model: Model, variant: Variant) -> Streamed:
    """What one token of `variant` reads, counted on the first call: from the header's figure when
    known, else from shapes and format.

    Experts are nearly all of a mixture's file, so their bits are found as what the file leaves
    after the rest at its format's usual bits; taking the rest as the remainder instead would turn a
    2 % error of the file into 50 % here.
    """
    known = facts(model)
    dense = known.dense_params
    if variant.is_folder:
        expert_bits, bits = (float(b) for b in shapes.mlx_parts(variant.quant))
        return _of_bits(known, dense * bits + 8 * variant.adapter_bytes, expert_bits)
    weights = variant.weights_bytes or variant.file_bytes
    lookup = known.embedding_params + model.lookup_params
    stored = dense + known.pool_params + lookup
    average = 8 * weights / max(1, stored)
    embed_bits = average
    mix = quants.MIXTURES.get(variant.quant)
    if mix is not None and average < 16:
        embed_bits = float(quants.GGUF_TYPES[mix.embed].bits)
    # the tables have a format of their own: the rest is what the file holds without them
    if model.lookup_bits:
        weights -= round(model.lookup_params * model.lookup_bits / 8)
        lookup = known.embedding_params
        stored -= model.lookup_params
        average = 8 * weights / max(1, stored)
        embed_bits = min(embed_bits, average)
    if not known.chosen_params:
        if variant.active_bytes:
            return Streamed(variant.active_bytes, 0, 0, dense, 0)
        return _of_bits(known, max(8 * weights - lookup * embed_bits, 4 * weights), 0.0)
    # gpt-oss as released: experts exactly MXFP4, the rest whatever the file leaves
    if variant.quant == "MXFP4":
        expert_bits = float(quants.GGUF_TYPES["MXFP4"].bits)
        left = 8 * weights - known.pool_params * expert_bits
        shared = max(1.0, min(16.5, left / (dense + lookup)))
    else:
        shared = _shared_bits(variant.quant, average, model.release_date)
        left = 8 * weights - dense * shared - lookup * embed_bits
        expert_bits = max(0.5 * average, left / known.pool_params)
    if not variant.active_bytes:
        return _of_bits(known, dense * shared, expert_bits)
    routed = min(variant.active_bytes, round(known.chosen_params * expert_bits / 8))
    return Streamed(
        variant.active_bytes - routed,
        routed,
        round(known.pool_params * expert_bits / 8),
        dense,
        known.chosen_params,
    )


def _of_bits(known: ModelCounts, dense_bits: float, expert_bits: float) -> Streamed:
    """What a token reads of weights that take this much: `dense_bits` are all of the dense ones,
    `expert_bits` a weight of the experts."""
    return Streamed(
        round(dense_bits / 8),
        round(known.chosen_params * expert_bits / 8),
        round(known.pool_params * expert_bits / 8),
        known.dense_params,
        known.chosen_params,
    )


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """`groups`: (layer, how many like it). Parameters are counts: `dense_params` are read by every
    token, of the routed experts `chosen_params` by one and `pool_params` exist;
    `embedding_params` are rows looked up, never streamed.
    `recurrent_state_bytes` is what one sequence's recurrent layers hold."""

    groups: tuple[tuple[Layer, int], ...]
    n_layers: int
    n_expert_layers: int
    n_recurrent_layers: int
    n_index_layers: int
    dense_params: int
    chosen_params: int
    pool_params: int
    embedding_params: int
    recurrent_state_bytes: int
    heads_share_row: bool
    is_stateful: bool

    def kv_elements(self, depth: int) -> int:
        """KV elements one sequence of `depth` tokens holds: each sliding layer at most its
        window."""
        return sum(count * layer.mixer.elements_read(depth) for layer, count in self.groups)


@lru_cache(4096)
def facts(model: Model) -> ModelCounts:
    """The facts of `model`, counted on the first call."""
    n_experts = chosen = pool = 0
    if model.experts is not None:
        x = model.experts
        n_experts = sum(layer.has_experts for layer in model.layers)
        matrices = n_experts * model.ffn_matrices
        one = matrices * (x.latent_size or model.hidden_size) * x.intermediate
        chosen = one * x.n_active
        pool = one * x.n_experts
    _, active = shapes.count_params(model)
    mixers = [layer.mixer for layer in model.layers]
    groups = tuple(Counter(model.layers).items())
    embedding_params = model.vocab_size * model.hidden_size
    if model.tied_embeddings:
        embedding_params = 0
    return ModelCounts(
        groups=groups,
        n_layers=len(model.layers),
        n_expert_layers=n_experts,
        n_recurrent_layers=sum(mixer.is_recurrent for mixer in mixers),
        n_index_layers=sum(mixer.index_width > 0 for mixer in mixers),
        dense_params=active - chosen,
        chosen_params=chosen,
        pool_params=pool,
        embedding_params=embedding_params,
        recurrent_state_bytes=shapes.recurrent_state_bytes(model),
        heads_share_row=any(mixer.heads_share_row for mixer in mixers),
        is_stateful=any(mixer.is_bounded or mixer.is_recurrent for mixer in mixers),
    )
