"""Compute KV and state bytes, parameter counts and file sizes by format from a Model's shapes.
Arithmetic only.

KV rules follow llama.cpp (https://github.com/ggml-org/llama.cpp, src/llama-kv-cache*.cpp,
llama-memory-recurrent.cpp). All KV figures are what the tokens need; the planner adds padding,
batches and slots.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from functools import lru_cache

from localllm_catalog import quants
from localllm_catalog.layers.mixer import Widths
from localllm_catalog.types import Experts, Layer, Model


def kv_bytes_per_token(model: Model, kv_type: str = "f16") -> int:
    """Return the KV bytes that one more token adds over all layers, while the context is shorter
    than each sliding window.

    Recurrent state does not grow and is not included. Raises CatalogError for an unknown `kv_type`.
    """
    return math.ceil(
        quants.kv_element_bytes(kv_type) * sum(layer.mixer.elements for layer in model.layers)
    )


def recurrent_state_bytes(model: Model) -> int:
    """Return the fixed bytes of one sequence's recurrent layers, independent of length and KV type
    (float32 in llama.cpp)."""
    return 4 * sum(count * layer.mixer.state_floats for layer, count in layer_groups(model))


@lru_cache(4096)
def layer_groups(model: Model) -> tuple[tuple[Layer, int], ...]:
    """Return (layer, number of equal layers) for each kind of layer, in order of the first."""
    # Counted by identity first, because the catalog builds a pattern's layers once.
    layers = {id(layer): layer for layer in model.layers}
    groups: Counter[Layer] = Counter()
    for key, count in Counter(map(id, model.layers)).items():
        groups[layers[key]] += count
    return tuple(groups.items())


# --- parameters -----------------------------------------------------------------------------------


def _expert_params(model: Model, experts: Experts, n_routed: int) -> int:
    hidden = model.hidden_size
    width = experts.latent_size or hidden
    routed = n_routed * model.ffn_matrices * width * experts.intermediate
    shared = (
        experts.n_shared
        * model.ffn_matrices
        * hidden
        * (experts.shared_intermediate or experts.intermediate)
    )
    squeeze = 2 * hidden * experts.latent_size
    return routed + shared + squeeze + hidden * experts.n_experts


def _ffn_params(model: Model, layer: Layer) -> tuple[int, int]:
    hidden = model.hidden_size
    if layer.ffn == "none":
        return 0, 0
    total = active = hidden
    if layer.has_dense:
        dense = model.ffn_matrices * hidden * (layer.intermediate or model.intermediate_size)
        total += dense
        active += dense
    if layer.has_experts and model.experts is not None:
        total += _expert_params(model, model.experts, model.experts.n_experts)
        active += _expert_params(model, model.experts, model.experts.n_active)
    return total, active


@lru_cache(4096)
def trunk_params(model: Model) -> tuple[int, int]:
    """Return (all, used per token) weights of the language trunk without embeddings, counted from
    the shapes."""
    widths = Widths(model.hidden_size, model.n_heads, model.q_rank, model.attention_gate)
    total = active = model.hidden_size
    for layer, count in layer_groups(model):
        mixer = layer.mixer.n_params(widths)
        ffn_total, ffn_active = _ffn_params(model, layer)
        total += count * (mixer + ffn_total)
        active += count * (mixer + ffn_active)
    return total, active


def count_params(model: Model) -> tuple[int, int]:
    """Return (total, active) parameters counted from the shapes.

    - total: all parameters in the checkpoint, with those in `extra_params` and `lookup_params`.
    - active: those that one token's step reads: the trunk with its chosen experts, and the output
      matrix. The token embedding (one row is looked up) counts only if it is also the output
      matrix. Vision towers and MTP heads do not count.
    """
    embedding = model.vocab_size * model.hidden_size
    total, active = trunk_params(model)
    total += embedding + model.extra_params + model.lookup_params
    if not model.tied_embeddings:
        total += embedding
    return total, active + embedding


# --- bytes ----------------------------------------------------------------------------------------


# Per-layer embedding tables have about one bit more than the token embedding, by the file sizes of
# Gemma 4 E2B and E4B.
_LOOKUP_EXTRA_BITS = 1.0


def mlx_parts(quant: str) -> tuple[Fraction, Fraction]:
    """Return (bits of experts, bits of other weights) for an MLX repo's format name, e.g. "4bit" or
    "MXFP4-Q8"."""
    experts, _, rest = quant.partition("-Q")
    if rest:
        return quants.mlx_bits(experts.lower()), quants.mlx_bits(f"{rest}bit")
    bits = quants.mlx_bits(quant)
    return bits, bits


# A GGUF also has a tokenizer of about 40 bytes a token (5.9 MB for Qwen3's 151,936, by Qwen3-0.6B's
# exact sizes).
_TOKENIZER_BYTES_PER_TOKEN = 40


def estimate_gguf_bytes(model: Model, quant: str) -> int:
    """Estimate the bytes of a GGUF file of this mixture: body, embedding and output matrices each
    in their own format.

    The vision tower and MTP head are not included (published separately, or dropped). Compared with
    the 63 files of known size in this catalog, the median error is 0.2 % and the worst 5 %
    (recomputed by the tests).
    """
    body_bits, head_bits, embed_bits = _mixture_bits(model, quant)
    embedding = model.vocab_size * model.hidden_size
    ends_bits = embedding * (head_bits if model.tied_embeddings else head_bits + embed_bits)
    lookup_bits = model.lookup_params * (embed_bits + _LOOKUP_EXTRA_BITS)
    total_bits = trunk_params(model)[0] * body_bits + ends_bits + lookup_bits
    return round(total_bits / 8) + model.vocab_size * _TOKENIZER_BYTES_PER_TOKEN


def _mixture_bits(model: Model, quant: str) -> tuple[float, float, float]:
    """Return the bits a weight of the blocks, the output matrix and the token embedding.

    They include the fallback formats for rows that are too short for a format's blocks.
    """
    mixture = quants.MIXTURES[quant]
    row_length = model.hidden_size
    ffn_width = model.intermediate_size
    if model.experts:
        ffn_width = model.experts.intermediate
    # In a feed-forward, all matrices have rows of hidden_size, except the last. Its rows have the
    # feed-forward's width.
    last_share = 1 / model.ffn_matrices
    body = (1 - last_share) * _row_bits(quant, row_length)
    body += last_share * _row_bits(quant, ffn_width)
    head = quants.GGUF_TYPES[quants.fallback(mixture.head, row_length)].bits
    embed = quants.GGUF_TYPES[quants.fallback(mixture.embed, row_length)].bits
    return body, head, embed


def _row_bits(quant: str, row_length: int) -> float:
    """Return the bits per body weight in rows of this length: the mixture's, or those of its
    fallback formats."""
    mixture = quants.MIXTURES[quant]
    bits = quants.body_bits(quant)
    row_format = quants.fallback(mixture.base, row_length)
    if row_format == mixture.base:
        return bits
    base = quants.GGUF_TYPES[mixture.base].bits
    high = quants.GGUF_TYPES["Q6_K"].bits
    raised_share = 1.0
    if base < high:
        raised_share = min(1.0, max(0.0, (bits - base) / (high - base)))
    low = quants.GGUF_TYPES[row_format].bits
    return low + raised_share * (quants.GGUF_TYPES["Q8_0"].bits - low)


def estimate_mlx_bytes(model: Model, quant: str) -> int:
    """Estimate the bytes of an MLX folder of this format. Weights outside the trunk (vision) stay
    at 16 bits."""
    expert_bits, bits = mlx_parts(quant)
    n_total = count_params(model)[0] - model.extra_params
    n_routed = 0
    if model.experts is not None:
        per_layer = _expert_params(model, model.experts, model.experts.n_experts)
        n_routed = per_layer * sum(layer.has_experts for layer in model.layers)
    # (makers store row lookup tables with at least as many bits as in the listed files)
    table_bits = model.lookup_params * max(0.0, model.lookup_bits - float(bits))
    stored_bits = (n_total - n_routed) * bits + n_routed * expert_bits
    return math.ceil((float(stored_bits) + table_bits) / 8) + 2 * model.vision_params
