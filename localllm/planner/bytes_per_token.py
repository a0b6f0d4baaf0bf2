"""Weight bytes that one token reads from memory: those that all tokens read, and the experts it is
routed to."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from localllm_catalog import quants, shapes
from localllm_catalog.types import Layer, Model, Variant


class Streamed(NamedTuple):
    """Weight bytes of one decode step of one sequence: `dense_bytes` always, `routed_bytes` for its
    chosen experts.

    `expert_pool_bytes` are all routed experts together, which a large batch approaches. Parameters
    are counts.
    """

    dense_bytes: int
    routed_bytes: int
    expert_pool_bytes: int
    dense_params: int
    routed_params: int

    @property
    def total_bytes(self) -> int:
        """Bytes that one sequence's token reads."""
        return self.dense_bytes + self.routed_bytes

    def step_bytes(self, model: Model, n_sequences: float) -> int:
        """Return the bytes that a step over `n_sequences` tokens reads.

        With k of n experts each, the expected share of experts read is 1 − (1 − k/n)^tokens
        (independent routing).
        """
        if model.experts is None or n_sequences <= 1:
            return self.total_bytes
        active_share = model.experts.n_active / model.experts.n_experts
        read_share = 1 - math.pow(1 - active_share, n_sequences)
        return self.dense_bytes + round(self.expert_pool_bytes * read_share)

    def step_routed_params(self, model: Model, n_sequences: float) -> float:
        """Return the parameters of the experts that such a step reads."""
        if not self.routed_bytes:
            return float(self.routed_params)
        read_bytes = self.step_bytes(model, n_sequences) - self.dense_bytes
        return self.routed_params * read_bytes / self.routed_bytes


# Bits of the tensors that all tokens read (attention, shared experts, output) in mixtures of
# experts. In K mixtures, attention is one step above the base on average. MXFP4_MOE keeps these
# tensors at about 8 bits, and so do Unsloth's dynamic files since Qwen3.5
# (https://unsloth.ai/docs/models/qwen3.5/gguf-benchmarks). Older dynamic files were like K mixtures
# here. With 8 bits, the measured speed of Llama-4-Scout's UD-Q4_K_XL would exceed the memory rate
# of a Strix Halo.
_DYNAMIC_BITS = 8.5
_SHARED_EXTRA_BITS = 0.6
_DYNAMIC_SINCE = "2026-02"


def _shared_bits(quant: str, average_bits: float, released: str) -> float:
    is_dynamic = quant.startswith("UD-") and not "" < released < _DYNAMIC_SINCE
    if is_dynamic or quant == "MXFP4_MOE":
        if average_bits < 15:
            return max(_DYNAMIC_BITS, average_bits)
        return average_bits
    if average_bits < 6.5:
        return average_bits + _SHARED_EXTRA_BITS
    return average_bits


@lru_cache(4096)
def streamed(model: Model, variant: Variant) -> Streamed:
    """Return the bytes that one token of `variant` reads, from the header's figure if known, else
    from shapes and format. The result is cached.

    Experts are nearly all of a mixture's file. Their bits follow from the bytes that the file
    leaves after the other tensors at their format's usual bits. The reverse would turn a 2 % error
    of the file into 50 % here.
    """
    counts = facts(model)
    dense_params = counts.dense_params
    if variant.is_folder:
        expert_bits, bits = (float(b) for b in shapes.mlx_parts(variant.quant))
        return _streamed_of_bits(
            counts, dense_params * bits + 8 * variant.adapter_bytes, expert_bits
        )
    weights = variant.weights_bytes or variant.file_bytes
    lookup_params = counts.embedding_params + model.lookup_params
    stored_params = dense_params + counts.pool_params + lookup_params
    average_bits = 8 * weights / max(1, stored_params)
    embed_bits = average_bits
    mixture = quants.MIXTURES.get(variant.quant)
    if mixture is not None and average_bits < 16:
        embed_bits = quants.GGUF_TYPES[mixture.embed].bits
    # the tables have their own format; the other tensors take the rest of the file
    if model.lookup_bits:
        weights -= round(model.lookup_params * model.lookup_bits / 8)
        lookup_params = counts.embedding_params
        stored_params -= model.lookup_params
        average_bits = 8 * weights / max(1, stored_params)
        embed_bits = min(embed_bits, average_bits)
    if not counts.chosen_params:
        if variant.active_bytes:
            return Streamed(variant.active_bytes, 0, 0, dense_params, 0)
        return _streamed_of_bits(
            counts, max(8 * weights - lookup_params * embed_bits, 4 * weights), 0.0
        )
    # gpt-oss as released: experts exactly MXFP4, other tensors the rest of the file
    if variant.quant == "MXFP4":
        expert_bits = quants.GGUF_TYPES["MXFP4"].bits
        remaining_bits = 8 * weights - counts.pool_params * expert_bits
        shared_bits = max(1.0, min(16.5, remaining_bits / (dense_params + lookup_params)))
    else:
        shared_bits = _shared_bits(variant.quant, average_bits, model.release_date)
        remaining_bits = 8 * weights - dense_params * shared_bits - lookup_params * embed_bits
        expert_bits = max(0.5 * average_bits, remaining_bits / counts.pool_params)
    if not variant.active_bytes:
        return _streamed_of_bits(counts, dense_params * shared_bits, expert_bits)
    routed_bytes = min(variant.active_bytes, round(counts.chosen_params * expert_bits / 8))
    return Streamed(
        variant.active_bytes - routed_bytes,
        routed_bytes,
        round(counts.pool_params * expert_bits / 8),
        dense_params,
        counts.chosen_params,
    )


def _streamed_of_bits(counts: ModelCounts, dense_bits: float, expert_bits: float) -> Streamed:
    """Return the bytes that a token reads. `dense_bits` is the total of the dense weights,
    `expert_bits` the bits of one expert weight."""
    return Streamed(
        round(dense_bits / 8),
        round(counts.chosen_params * expert_bits / 8),
        round(counts.pool_params * expert_bits / 8),
        counts.dense_params,
        counts.chosen_params,
    )


class ModelCounts(NamedTuple):
    """Counts of a model's layers and parameters.

    - `groups`: (layer, number of equal layers).
    - `dense_params`: read by all tokens.
    - `chosen_params`: routed expert parameters that one token reads.
    - `pool_params`: all routed expert parameters.
    - `embedding_params`: rows that are looked up, never streamed.
    - `recurrent_state_bytes`: state of one sequence's recurrent layers.
    """

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
        """Return the KV elements that one sequence of `depth` tokens holds. A sliding layer holds
        at most its window."""
        return sum(count * layer.mixer.elements_read(depth) for layer, count in self.groups)


@lru_cache(4096)
def facts(model: Model) -> ModelCounts:
    """Return the counts of `model`. The result is cached."""
    groups = shapes.layer_groups(model)
    mixers = [(layer.mixer, count) for layer, count in groups]
    n_experts = chosen_params = pool_params = 0
    if model.experts is not None:
        experts = model.experts
        n_experts = sum(count for layer, count in groups if layer.has_experts)
        matrices = n_experts * model.ffn_matrices
        expert_params = matrices * (experts.latent_size or model.hidden_size) * experts.intermediate
        chosen_params = expert_params * experts.n_active
        pool_params = expert_params * experts.n_experts
    _, active_params = shapes.count_params(model)
    embedding_params = model.vocab_size * model.hidden_size
    if model.tied_embeddings:
        embedding_params = 0
    return ModelCounts(
        groups=groups,
        n_layers=len(model.layers),
        n_expert_layers=n_experts,
        n_recurrent_layers=sum(count for mixer, count in mixers if mixer.is_recurrent),
        n_index_layers=sum(count for mixer, count in mixers if mixer.index_width > 0),
        dense_params=active_params - chosen_params,
        chosen_params=chosen_params,
        pool_params=pool_params,
        embedding_params=embedding_params,
        recurrent_state_bytes=shapes.recurrent_state_bytes(model),
        heads_share_row=any(mixer.heads_share_row for mixer, _ in mixers),
        is_stateful=any(mixer.is_bounded or mixer.is_recurrent for mixer, _ in mixers),
    )
