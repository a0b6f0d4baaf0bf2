"""The cost model of prefill: seconds of one prompt token, by cause (docs/recommend.md; for decode,
see decode_cost.py).

t = 2·(P + tile·touched experts / micro-batch) / (g·units) + attention FLOPs / (h·units) + FLOPs of
recurrent states / (s·units)
    + activations / (c·BW) + weights / (η·BW·micro-batch) + launches / micro-batch · (1.8 GHz /
    clock)^l + context · m

Matrices are multiplied at the rate that the board's power allows (efficiency.py), if there are
kernels for their type (kernels.py). Attention also computes the masked part of a micro-batch that
its kernels do not skip (kernels.py too). Between the matrices all activations pass through memory,
which takes the smallest models as long as their matrices. Under MLX this includes the scores of
heads whose width has no fused kernel (attention_scores.py). llama.cpp writes the mask itself on the
host. Coefficients: efficiency.json. Units: seconds, bytes and tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from localllm.planner import efficiency, kernels
from localllm.planner.attention_scores import moved_bytes
from localllm.planner.bytes_per_token import facts, streamed
from localllm.planner.decode_cost import (
    PEAK_SHARE,
    CostTerm,
    Hardware,
    Powers,
    all_attention_flops,
    clock_power,
)
from localllm.planner.kernel_facts import facts as kernel_facts
from localllm.planner.types import DEFAULT_BATCH
from localllm_backends import registry
from localllm_catalog.types import Layer, Model, Variant

# Float32 elements of a token that a layer's kernels read and write apart from its matrices
# (llama.cpp's graphs). The hidden vector counts 12 times: two norms, two residual sums, two
# conversions for the matrices, and the matrices' outputs. Queries and attention outputs count 6
# times, and so does the feed-forward. Each is written, changed in place and read.
_HIDDEN_PASSES = 12
_HEAD_PASSES = 6
_FFN_PASSES = 6
# Decay, update and read of each element of a recurrent layer's states, of four bytes.
_SCAN_FLOPS_A_BYTE = 6.0 / 4


@lru_cache(4096)
def activation_bytes(model: Model) -> float:
    """Return the bytes of activations (float32) that one prompt token's layers read and write apart
    from their matrices."""
    elements = sum(count * _layer_elements(model, layer) for layer, count in facts(model).groups)
    return 4.0 * elements


def _layer_elements(model: Model, layer: Layer) -> int:
    experts = model.experts
    width = 0
    if layer.has_dense:
        width += layer.intermediate or model.intermediate_size
    if experts is not None and layer.has_experts:
        width += experts.n_active * experts.intermediate
        width += experts.n_shared * (experts.shared_intermediate or experts.intermediate)
    heads_width = layer.mixer.output_width(model.n_heads)
    return _HIDDEN_PASSES * model.hidden_size + _HEAD_PASSES * heads_width + _FFN_PASSES * width


class PrefillTerms(NamedTuple):
    """The `seconds` of one prompt token by cause. `attention_flops` is its arithmetic in attention."""

    seconds: Mapping[str, float]
    attention_flops: float

    @property
    def total_s(self) -> float:
        """Seconds per token."""
        return sum(self.seconds.values())


def prefill_parts(
    model: Model,
    variant: Variant,
    hardware: Hardware,
    *,
    prompt_tokens: int = 2048,
    depth: int = 0,
    n_batch: int = DEFAULT_BATCH,
    masked: tuple[float, float] | None = None,
) -> dict[str, CostTerm]:
    """Return the terms of one token of `prompt_tokens`, read after `depth` cached ones in steps of
    `n_batch`, without coefficients.

    benchmarks/planner_fit fits the coefficients, and `prefill_terms` applies them. `masked`
    replaces the shares of masked tokens that today's kernels compute (`kernels.masked_share`).
    """
    bandwidth = hardware.bandwidth_gbps * 1e9
    units = hardware.tflops * 1e12
    read = streamed(model, variant)
    counts = facts(model)
    batch = max(1, min(prompt_tokens, n_batch))
    later_share, outside_share = masked or kernels.masked_share(hardware.keys, batch)
    computed_tokens = mean_context(prompt_tokens, depth, batch * later_share)
    attention_flops = all_attention_flops(
        model, computed_tokens, tokens_outside=batch * outside_share
    )
    scan_flops = _SCAN_FLOPS_A_BYTE * counts.recurrent_state_bytes
    context = mean_context(prompt_tokens, depth, batch)
    moved_activation_bytes = _moved_bytes(model, hardware, context)
    masked_tokens = 0.0
    if kernel_facts(hardware.keys).reads_mask:
        masked_tokens = context
    launch_powers: Powers = (("clock", clock_power(hardware.clock_ghz)),)
    weights_s = read.step_bytes(model, batch) / bandwidth / batch
    recurrent_layers = counts.n_recurrent_layers / batch
    parts = _matrix_parts(model, variant, hardware, batch)
    parts["attention"] = CostTerm(
        attention_flops / _attention_flops_s(hardware), (("attention", -1),)
    )
    parts["scan"] = CostTerm(scan_flops / units, (("scan", -1),))
    parts["activations"] = CostTerm(moved_activation_bytes / bandwidth, (("activations", -1),))
    parts["weights"] = CostTerm(weights_s, (("eta", -1),))
    parts["step"] = CostTerm(1 / batch, (("step_s", 1), *launch_powers))
    parts["layers"] = CostTerm(counts.n_layers / batch, (("layer_s", 1), *launch_powers))
    parts["experts"] = CostTerm(
        counts.n_expert_layers / batch, (("expert_layer_s", 1), *launch_powers)
    )
    parts["recurrent"] = CostTerm(recurrent_layers, (("recurrent_layer_s", 1), *launch_powers))
    parts["mask"] = CostTerm(masked_tokens, (("mask_s", 1),))
    return parts


def _attention_flops_s(hardware: Hardware) -> float:
    """Return the nominal FLOP/s of a prompt's attention."""
    return hardware.tflops * 1e12 * kernel_facts(hardware.keys).attention_share


def _matrix_parts(
    model: Model, variant: Variant, hardware: Hardware, batch: int
) -> dict[str, CostTerm]:
    """Return the time to multiply with the matrices, and with the rows that pad the experts' tiles."""
    powers: Powers = (("matmul", -1), ("quant", 1))
    measured = hardware.timed_flops_s(model, variant)
    if measured is not None:
        # The measured rate of experts already includes their extra cost.
        flops_s, _ = measured
    else:
        share = kernels.matrix_share(variant, hardware.keys)
        flops_s = hardware.tflops * 1e12 * hardware.power_share * share
        if model.experts is not None:
            powers = (*powers, ("moe", 1))
    matmul = CostTerm(2 * matrix_params(model, variant) / flops_s, powers)
    tile_rows = _tile_rows(model, hardware, batch)
    if not tile_rows:
        powers = (*powers, ("tile", 1))
    padding_s = 0.0
    if model.experts is not None and hardware.engine != "cpu":
        touched_params = streamed(model, variant).step_routed_params(model, batch)
        padding_s = 2 * (tile_rows or 1.0) * touched_params / batch / flops_s
    return {"matmul": matmul, "padding": CostTerm(padding_s, powers)}


def _tile_rows(model: Model, hardware: Hardware, batch: int) -> float:
    """Return the rows that each expert costs in addition to its tokens (0: fitted)."""
    kernel = kernel_facts(hardware.keys)
    if kernel.short_expert_tile and expert_tokens(model, batch) < kernel.expert_tile:
        return kernel.short_expert_tile
    return kernel.expert_tile


def expert_tokens(model: Model, batch: int) -> float:
    """Return the mean number of tokens per expert in a micro-batch of `batch` tokens (0: no
    experts)."""
    if model.experts is None:
        return 0.0
    return batch * model.experts.n_active / model.experts.n_experts


def _moved_bytes(model: Model, hardware: Hardware, context: float) -> float:
    """Return the bytes of activations for one token, and of scores without a fused kernel."""
    n_bytes = 0.0
    if hardware.engine != "cpu":
        n_bytes = activation_bytes(model)
    fused_heads = registry.declared(hardware.engine).fused_heads
    if fused_heads:
        n_bytes += moved_bytes(model, context, fused_heads)
    return n_bytes


@lru_cache(4096)
def prefill_terms(
    model: Model,
    variant: Variant,
    hardware: Hardware,
    *,
    prompt_tokens: int = 2048,
    depth: int = 0,
    n_batch: int = DEFAULT_BATCH,
) -> PrefillTerms:
    """Return the parts of reading `prompt_tokens` after `depth` cached ones in steps of `n_batch`,
    per token.

    The result is cached and shared, so callers must not change it.
    """
    coefficients = efficiency.coefficients("prefill", hardware.keys_for(variant))
    parts = prefill_parts(
        model, variant, hardware, prompt_tokens=prompt_tokens, depth=depth, n_batch=n_batch
    )
    seconds = {name: part.seconds(coefficients) for name, part in parts.items()}
    # Weights are read while the previous matrices are multiplied, so they may add less than their
    # read time (η above 1). But a step ends only after all of them are delivered.
    delivered_s = parts["weights"].value / PEAK_SHARE
    others_s = sum(seconds.values()) - seconds["weights"]
    seconds["weights"] = max(seconds["weights"], delivered_s - others_s)
    seconds["matmul"] += seconds.pop("padding")
    seconds["layers"] += seconds.pop("experts") + seconds.pop("recurrent") + seconds.pop("step")
    return PrefillTerms(
        seconds=seconds,
        attention_flops=parts["attention"].value * _attention_flops_s(hardware),
    )


def mean_context(prompt_tokens: int, depth: int, batch: float) -> float:
    """Return the mean number of context tokens that a token's attention computes. `batch` counts
    those of its own micro-batch."""
    return depth + (prompt_tokens + batch) / 2


def matrix_params(model: Model, variant: Variant) -> int:
    """Return the parameters that a prompt token is multiplied with. The output matrix does not
    count, since logits are computed for the last token only."""
    read = streamed(model, variant)
    return max(1, read.dense_params + read.routed_params - model.vocab_size * model.hidden_size)
