"""Extra cost of formats that an engine has no good kernel for (kernels.toml), and the measured
speed of a file's matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from localllm.device.types import Device, MatrixRates, TypeRates
from localllm.planner import efficiency, scoring
from localllm.planner.bytes_per_token import streamed
from localllm.planner.kernel_facts import facts
from localllm.planner.types import Workload, backend_of
from localllm_catalog import quants
from localllm_catalog.types import Model, Variant

Keys = tuple[str, ...]

# llama.cpp does not repack these formats on any CPU, and has no kernel for many rows of them. The
# measured yardstick is Q4_K. With two Zen cores, AVX-512 and 512 tokens, Q4_1 ran at 87 GFLOP/s,
# repacked Q4_K at 289, and Q4_0 at 278.
CPU_PLAIN_FORMATS = ("Q4_1", "Q5_0", "Q5_1")
_CPU_PLAIN_SHARE = 0.3

# From this micro-batch on, some kernels skip the masked part at its end.
_LARGE_BATCH = 1024
# Shares of the masked tokens that are computed: (later tokens, tokens before the window).
ALL_MASKED = (1.0, 1.0)


def masked_share(keys: Keys, batch: int) -> tuple[float, float]:
    """Return the shares of masked tokens that attention computes anyway in a micro-batch. They are
    (share of later tokens, share of tokens before the window)."""
    row = facts(keys)
    if row.masked_large is not None and batch >= _LARGE_BATCH:
        return row.masked_large
    return row.masked


def read_share(variant: Variant, keys: Keys) -> float:
    """Return the share of the usual rate at which weights of this format are read for one token."""
    row = facts(keys)
    if efficiency.quant_class(variant) in row.read_fast:
        return 1.0
    return row.read_share


def experts_read_share(variant: Variant, keys: Keys) -> float:
    """The same as `read_share`, for routed experts."""
    share = facts(keys).bf16_experts_share
    if variant.quant.upper() == "BF16" and share < 1:
        return share
    return read_share(variant, keys)


def unpack_flops(variant: Variant, keys: Keys) -> float:
    """Return the extra FLOPs per weight to unpack this format, at the units' nominal rate, beyond
    those that every format needs."""
    return facts(keys).unpack_flops.get(efficiency.quant_class(variant), 0.0)


def matrix_share(variant: Variant, keys: Keys) -> float:
    """Return the share of the units' nominal rate at which matrices of this format are multiplied.

    The rates of a CPU are those of repacked Q4_K, if this type was not timed itself.
    """
    row = facts(keys)
    quant = variant.quant.upper()
    if quant == "BF16" and row.bf16_share < 1:
        return row.bf16_share
    if keys[0] == "cpu" and quant in CPU_PLAIN_FORMATS:
        return _CPU_PLAIN_SHARE
    return row.matrix_share


# The higher type in a K mixture: its output matrix, and about half of the other tensors that it
# raises.
_RAISED_TYPE = "Q6_K"
# The same for MXFP4, and for files with more bits than Q6_K explains (Unsloth's dynamic files).
_HIGH_RAISED_TYPE = "Q8_0"
# A matrix is multiplied row by row up to _FEW tokens. From _MANY tokens it is as fast as for a long
# prompt. Measured for Q4_K without repacking on two Zen cores: 155, 150, 154, 191, 331, 457 and 506
# GFLOP/s. The steps had 1, 2, 4, 8, 16, 32 and 64 tokens.
_FEW_ROWS = 2
_MANY_ROWS = 64
_UNMIXED = ("Q8_0", "F16", "BF16", "F32")
# These formats raise only the output matrix. A prompt multiplies that for its last token only.
_ONLY_OUTPUT_RAISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")


def base_type(variant: Variant) -> str:
    """Return the type of most of the file's weights ("Q4_K" for "UD-Q4_K_XL"), or "" if its name
    gives no type."""
    quant = variant.quant.upper()
    mixture = quants.MIXTURES.get(quant)
    if mixture is not None:
        return mixture.base
    for name in (quant, quant.partition("_")[0]):
        if name in quants.GGUF_TYPES:
            return name
    return ""


def types_needed(variant: Variant) -> list[str]:
    """Return the types whose rates determine how fast the file is multiplied. Empty if the file's
    types are unknown."""
    base = base_type(variant)
    if not base:
        return []
    return list(dict.fromkeys((efficiency.CPU_YARDSTICK, base, _raised(base, 0.0)[0])))


class WeightPart(NamedTuple):
    """`n_params` weights of one type among those that one token is multiplied with. `routed` marks
    experts."""

    type: str
    n_params: float
    routed: bool


@lru_cache(4096)
def parts(model: Model, variant: Variant) -> tuple[WeightPart, ...]:
    """Return the weights that one token is multiplied with, by type.

    The file's name gives the type of most weights, and its size the mean bits. Bits above the base
    type are explained by raised weights, of the type that mixtures use for their better matrices.
    """
    base = base_type(variant)
    read = streamed(model, variant)
    weight_parts = list[WeightPart]()
    groups = (
        (False, read.dense_bytes, read.dense_params),
        (True, read.routed_bytes, read.routed_params),
    )
    for routed, n_bytes, n_params in groups:
        if base and n_params:
            raised, share = _raised(base, 8 * n_bytes / n_params)
            weight_parts.append(WeightPart(base, n_params * (1 - share), routed))
            weight_parts.append(WeightPart(raised, n_params * share, routed))
    return tuple(part for part in weight_parts if part.n_params)


def _raised(base: str, bits: float) -> tuple[str, float]:
    """Return (type of the raised weights, their share), so that with weights of `base` they average
    to `bits`."""
    if base in _UNMIXED:
        return base, 0.0
    base_bits = quants.GGUF_TYPES[base].bits
    raised_bits = quants.GGUF_TYPES[_RAISED_TYPE].bits
    raised = _RAISED_TYPE
    if base == "MXFP4" or bits > raised_bits >= base_bits:
        raised = _HIGH_RAISED_TYPE
    raised_bits = quants.GGUF_TYPES[raised].bits
    if raised_bits > base_bits:
        return raised, min(max((bits - base_bits) / (raised_bits - base_bits), 0.0), 1.0)
    return base, 0.0


def _timed_parts(
    rates: Sequence[TypeRates], model: Model, variant: Variant, *, stored: bool
) -> list[tuple[WeightPart, MatrixRates]]:
    """Return the file's weights with the rates of their types. Empty if the main type was not
    timed.

    `stored` selects the rates without repacking, else those of the engine's usual layout. A raised
    type that was not timed gets the rate of the main type.
    """
    rates_by_type = {
        type_rates.type: type_rates.stored if stored else type_rates.usual for type_rates in rates
    }
    main_rates = rates_by_type.get(base_type(variant))
    if main_rates is None:
        return []
    return [(part, rates_by_type.get(part.type, main_rates)) for part in parts(model, variant)]


def _mean_flops_s(rated: Sequence[tuple[WeightPart, float]]) -> float:
    """Return the FLOP/s of weights that are multiplied one after the other, each at its own
    TFLOP/s."""
    n_params = sum(part.n_params for part, _ in rated)
    return 1e12 * n_params / sum(part.n_params / tflops for part, tflops in rated)


def _prompt_tflops(part: WeightPart, rates: MatrixRates) -> float:
    if part.routed:
        return rates.experts_tflops.value
    return rates.prompt_tflops.value


def flops_s(
    rates: Sequence[TypeRates], model: Model, variant: Variant, *, stored: bool
) -> tuple[float, float] | None:
    """Return (FLOP/s of a prompt, FLOP/s of one token) for the file's matrices. Returns None if the
    main type was not timed."""
    timed = _timed_parts(rates, model, variant, stored=stored)
    base = base_type(variant)
    if not timed:
        return None
    is_plain = base not in _ONLY_OUTPUT_RAISED
    prompt_parts = [
        (part, type_rates) for part, type_rates in timed if part.type == base or is_plain
    ] or timed
    prompt = _mean_flops_s(
        [(part, _prompt_tflops(part, type_rates)) for part, type_rates in prompt_parts]
    )
    return prompt, _mean_flops_s(
        [(part, type_rates.token_tflops.value) for part, type_rates in timed]
    )


def rows_flops_s(
    rates: Sequence[TypeRates], model: Model, variant: Variant, rows: int, *, stored: bool
) -> float | None:
    """Return the FLOP/s of the file's matrices in a step over `rows` tokens, from several streams
    or one draft.

    Returns None like `flops_s`. Each expert gets a share of the rows, which is one row as long as
    there are more experts than rows.
    """
    timed = _timed_parts(rates, model, variant, stored=stored)
    experts = model.experts
    expert_rows = rows if experts is None else rows * experts.n_active / experts.n_experts
    if not timed:
        return None
    rated = []
    for part, part_rates in timed:
        part_rows = expert_rows if part.routed else rows
        rated.append(
            (
                part,
                _interpolated_tflops(
                    part_rates.token_tflops.value, _prompt_tflops(part, part_rates), part_rows
                ),
            )
        )
    return _mean_flops_s(rated)


def _interpolated_tflops(token: float, prompt: float, rows: float) -> float:
    """Interpolate the rate for `rows` as a power of their number. The power is at most 1, since
    more rows never take less time."""
    max_log = math.log(_MANY_ROWS / _FEW_ROWS)
    power = min(1.0, math.log(prompt / token) / max_log)
    return float(token * math.exp(power * min(max_log, math.log(max(rows, _FEW_ROWS) / _FEW_ROWS))))


# Tokens of an answer, without the thinking before it: a screen of text or code.
_ANSWER_TOKENS = 300
# A smaller file loads and answers before its kernels could be timed.
_WORTH_TIMING_BYTES = 128 * 2**20


def layout(
    device: Device, model: Model, variant: Variant, workload: Workload
) -> Literal["auto", "stored"]:
    """Return how to hold the weights of `variant` on `device` for this work.

    Returns "auto" (the engine's own layout) if no kernel was timed, or if the engine does not
    repack the type.
    """
    base = base_type(variant)
    if not _runs_on_cpu(device, variant):
        return "auto"
    if not any(rate.laid_out for rate in device.matrix_rates if rate.type == base):
        return "auto"
    stored = flops_s(device.matrix_rates, model, variant, stored=True)
    repacked = flops_s(device.matrix_rates, model, variant, stored=False)
    if stored is None or repacked is None:
        return "auto"
    need = scoring.need_of(workload)

    def work(flops_s: tuple[float, float]) -> float:
        prompt, token = flops_s
        # The layout is chosen once per session, and the first prompt is never cached.
        return need.prompt_tokens / prompt + _ANSWER_TOKENS / token

    if work(stored) < work(repacked):
        return "stored"
    return "auto"


def types_to_time(device: Device, variant: Variant) -> list[str]:
    """Return the types whose kernels to time before `variant` is planned on `device`. They decide
    the layout of its weights and its predicted speed."""
    is_large = (variant.weights_bytes or variant.file_bytes) >= _WORTH_TIMING_BYTES
    if is_large and _runs_on_cpu(device, variant):
        return types_needed(variant)
    return []


def _runs_on_cpu(device: Device, variant: Variant) -> bool:
    return device.accelerator == "cpu" and backend_of(variant).repacks_weights
