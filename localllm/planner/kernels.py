"""What an engine has kernels for: what a format costs more where the right one is missing.

Facts about software that neither the format nor the machine tells alone. Each is from measurements of its own, by others and
not of the rows in benchmarks/data/speeds.csv, so that it holds of a machine that was left out there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from localllm.device.types import Device, TypeRates
from localllm.planner import efficiency, kernels, needs
from localllm.planner.streams import streamed
from localllm.planner.types import Workload, backend_of
from localllm_catalog import quants
from localllm_catalog.memoize import by_identities
from localllm_catalog.types import Model, Variant

Keys = tuple[str, ...]

# Keys of what multiplies bfloat16 under Vulkan: where the driver has VK_KHR_shader_bfloat16 (NVIDIA's, and AMD's from RDNA4 on).
_MULTIPLY_BF16 = frozenset(("nvidia.vulkan", "amd-rdna4.vulkan"))
_PLAIN_BF16_SHARE = 0.5
# Chosen experts are multiplied by another kernel, and without that extension it crawls: of Qwen3-30B-A3B in BF16 a Strix Halo
# made 9.3 tok/s under Vulkan and 25.8 under ROCm (github.com/kyuz0/amd-strix-halo-toolboxes, benchmark/results of October
# 2025), which leaves 92 ms for 3.6 GB of experts: 39 GB/s of the 215 that its memory delivers. (Meteor Lake's GPU is slower
# than its processor at it: github.com/ggml-org/llama.cpp/issues/26417.)
_PLAIN_BF16_EXPERTS_SHARE = 0.2
# Linux's driver for Intel's GPUs (Mesa) makes slow products of one vector from formats with scales of scales and from those of
# 8 bits: on a B70 Windows' is almost twice as fast (github.com/ggml-org/llama.cpp/issues/22413), SYCL 1.9 times (27B,
# Q4_K_M: github.com/PMZFX/intel-arc-pro-b70-benchmarks); on a B580 2.3 times (gemma-3-12b, 15 tok/s, a quarter of its
# bandwidth: github.com/ollama/ollama/issues/13153), which reads Q4_0 at 59 % of it.
_MESA_FAST = ("q4_0", "f16", "bf16")
_MESA_SHARE = 0.5
# Metal's kernels for two and three bits compute longer than they read: a 7B in Q3_K_S takes 19.0 ms a token on an M2 Max of
# 30 cores, in Q4_0 16.2 (github.com/ggml-org/llama.cpp/pull/2995), though it has 0.88 GB less to read, at 340 GB/s 2.6 ms:
# 5.4 ms of 10.7 TFLOP/s for 6.7 billion weights.
_METAL_FEW_BITS_FLOPS = 8.6

# What multiplying quantised weights byte by byte takes where the product of four is missing: a 7B in Q4_0 takes 16.6 ms a token
# on a P100 (github.com/ggml-org/llama.cpp/discussions/15013), 6.1 of them for reading 3.8 GB: 33 FLOP of 21.8 TFLOP/s a weight;
# K and IQ formats of 9 to 32 billion weights about 54 (github.com/gavinbrow/p100-llm-benchmarks).
_DP4A = "nvidia-emulated-dp4a.cuda"
_BYTEWISE_FLOPS, _BYTEWISE_K_FLOPS = 33.0, 54.0

# llama.cpp lays these out anew for no processor, and has no kernel for many rows of them: the rate that is measured is of Q4_K
# (two Zen cores, AVX-512, 512 tokens: 87 GFLOP/s of Q4_1, 289 of Q4_K laid out anew, 278 of Q4_0).
CPU_PLAIN_FORMATS = ("Q4_1", "Q5_0", "Q5_1")
_CPU_PLAIN_SHARE = 0.3

# MLX multiplies experts on the units for matrices in tiles of 64 rows, and computes a tile anew for every expert in it
# (gather_qmm_rhs_nax: github.com/ml-explore/mlx/issues/3925, measured on an M5): 64 rows more for each expert that is touched.
_NAX_TILE = 64.0
_NAX = frozenset(("apple-m5.mlx", "apple-m6.mlx"))

# From this micro-batch on CUDA's attention (HIP's is the same source) looks up where the mask's last open column is and stops
# there (github.com/ggml-org/llama.cpp/pull/14924; the condition is still there: /pull/28943).
_LOOKS_FOR_END = 1024
# Shares of what the mask hides from a token: (of the tokens after it, of those before its window).
ALL_MASKED = (1.0, 1.0)
_UP_TO_THE_END = (0.0, 0.5)
_NONE_MASKED = (0.0, 0.0)
_CAUSAL_ONLY = (0.0, 1.0)


def masked_share(keys: Keys, batch: int) -> tuple[float, float]:
    """What attention computes of a micro-batch although the mask hides it, as shares: of the tokens after one, and of those
    before its window.

    Metal and Vulkan mark the blocks that are hidden as a whole and skip them (github.com/ggml-org/llama.cpp/pull/16372 and
    /19281); CUDA skips only what lies after a tile's last token, and only in large micro-batches, so that a window costs half
    the micro-batch beside. MLX knows that a mask is causal, and computes a window's mask in full.
    """
    if keys[0] in ("metal", "vulkan"):
        return _NONE_MASKED
    if keys[0] == "mlx":
        return _CAUSAL_ONLY
    return _UP_TO_THE_END if keys[0] in ("cuda", "rocm") and batch >= _LOOKS_FOR_END else ALL_MASKED


def read_share(variant: Variant, keys: Keys) -> float:
    """Share of the usual rate at which weights of this format are read for one token."""
    slow = "intel.vulkan" in keys and efficiency.quant_class(variant.quant) not in _MESA_FAST
    return _MESA_SHARE if slow else 1.0


def experts_read_share(variant: Variant, keys: Keys) -> float:
    """The same of chosen experts."""
    plain = variant.quant.upper() == "BF16" and not _multiplies_bf16(keys)
    return _PLAIN_BF16_EXPERTS_SHARE if plain else read_share(variant, keys)


def unpack_flops(variant: Variant, keys: Keys) -> float:
    """Arithmetic at the units' nominal rate that a weight of this format takes beyond what every format does."""
    kind = efficiency.quant_class(variant.quant)
    if _DP4A in keys and kind not in ("f16", "bf16"):
        return _BYTEWISE_FLOPS if kind in ("q4_0", "q8") else _BYTEWISE_K_FLOPS
    few = keys[0] == "metal" and kind == "k23"
    return _METAL_FEW_BITS_FLOPS if few else 0.0


def expert_tile(keys: Keys) -> float:
    """Rows that every touched expert of a micro-batch costs beside its tokens, where the kernel says it; 0: to be learnt."""
    return _NAX_TILE if _NAX.intersection(keys) else 0.0


def matrix_share(variant: Variant, keys: Keys) -> float:
    """Share of the units' nominal rate at which matrices of this format are multiplied.

    A processor's are those of Q4_K laid out anew, where this type was not timed itself (kernels.py). Under Vulkan bfloat16 goes to
    the plain units, at half the rate of those for matrices, where the driver multiplies no matrices of that type. A P100 lacks
    the products of four bytes at once that llama.cpp's kernels for quantised matrices are made of, and what it has instead is
    half as wide.
    """
    if variant.quant.upper() == "BF16" and not _multiplies_bf16(keys):
        return _PLAIN_BF16_SHARE
    if keys[0] == "cpu" and variant.quant.upper() in CPU_PLAIN_FORMATS:
        return _CPU_PLAIN_SHARE
    return 0.5 if _DP4A in keys else 1.0


def _multiplies_bf16(keys: Keys) -> bool:
    return keys[0] != "vulkan" or bool(_MULTIPLY_BF16.intersection(keys))


# What a mixture raises above its own type: its output, and of a K mixture about every second of the rest that it raises.
_RAISED = "Q6_K"
# The same of MXFP4, and of what has more bits than the above (Unsloth's dynamic files).
_RAISED_HIGH = "Q8_0"
# Up to so many tokens at once a matrix is multiplied token by token; from so many on as fast as a whole prompt's. (Products of
# Q4_K as stored, two Zen cores: 155, 150, 154, 191, 331, 457 and 506 GFLOP/s with 1, 2, 4, 8, 16, 32 and 64 tokens.)
_FEW, _MANY = 2, 64
_UNMIXED = ("Q8_0", "F16", "BF16", "F32")
# Of these the output alone is raised, which a prompt is not multiplied with but for its last token.
_OUTPUT_RAISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")


def base_type(variant: Variant) -> str:
    """The type of most of the file's weights ("Q4_K" of "UD-Q4_K_XL"); "" of a name that says none."""
    quant = variant.quant.upper()
    mixture = quants.MIXTURES.get(quant)
    if mixture is not None:
        return mixture.base
    return next((name for name in (quant, quant.partition("_")[0]) if name in quants.GGUF_TYPES), "")


def types_needed(variant: Variant) -> list[str]:
    """The types whose rates tell how fast the file is multiplied; none of a file whose types nobody can tell."""
    base = base_type(variant)
    if not base:
        return []
    return list(dict.fromkeys((efficiency.CPU_YARDSTICK, base, _raised(base, 0.0)[0])))


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Of the weights that one token is multiplied with, `n_params` of one type; `routed`: of experts."""

    type: str
    n_params: float
    routed: bool


@by_identities
def parts(model: Model, variant: Variant) -> tuple[WeightPart, ...]:
    """What one token is multiplied with, by type. A file says its bits, and its name the type of most of it; what is above that
    type's bits is of the type that mixtures raise their better matrices to."""
    base, read, found = base_type(variant), streamed(model, variant), list[WeightPart]()
    both = ((False, read.dense_bytes, read.dense_params), (True, read.routed_bytes, read.routed_params))
    for routed, n_bytes, n_params in both:
        if base and n_params:
            raised, share = _raised(base, 8 * n_bytes / n_params)
            found += [WeightPart(base, n_params * (1 - share), routed), WeightPart(raised, n_params * share, routed)]
    return tuple(part for part in found if part.n_params)


def _raised(base: str, bits: float) -> tuple[str, float]:
    """(type of the raised weights, their share) where weights of `base` and those together come to so many bits."""
    if base in _UNMIXED:
        return base, 0.0
    low, high = (float(quants.GGUF_TYPES[name].bits) for name in (base, _RAISED))
    raised = _RAISED_HIGH if base == "MXFP4" or bits > high >= low else _RAISED
    high = float(quants.GGUF_TYPES[raised].bits)
    return (raised, min(max((bits - low) / (high - low), 0.0), 1.0)) if high > low else (base, 0.0)


def flops_s(rates: Sequence[TypeRates], model: Model, variant: Variant, *, stored: bool) -> tuple[float, float] | None:
    """(FLOP/s of a prompt, FLOP/s of one token) of the file's matrices, held as they are `stored` or as the engine would have
    it; None where its main type was not timed. A raised type that was not timed counts as the main one."""
    known = {each.type: each.stored if stored else each.usual for each in rates}
    base, of = base_type(variant), parts(model, variant)
    main = known.get(base)
    if main is None or not of:
        return None
    read = [part for part in of if part.type == base or base not in _OUTPUT_RAISED] or of

    def tflops(part: WeightPart) -> float:
        at = known.get(part.type, main)
        return (at.experts_tflops if part.routed else at.prompt_tflops).value

    prompt = sum(part.n_params for part in read) / sum(part.n_params / tflops(part) for part in read)
    tokens = sum(part.n_params / known.get(part.type, main).token_tflops.value for part in of)
    return 1e12 * prompt, 1e12 * sum(part.n_params for part in of) / tokens


def rows_flops_s(
    rates: Sequence[TypeRates], model: Model, variant: Variant, rows: int, *, stored: bool
) -> float | None:
    """FLOP/s of the file's matrices in a step over `rows` tokens, such as several streams' or a draft's; None as `flops_s`.
    Experts get a share of the rows each, which is one for as long as there are more experts than rows."""
    known = {each.type: each.stored if stored else each.usual for each in rates}
    of = parts(model, variant)
    main = known.get(base_type(variant))
    if main is None or not of:
        return None
    each = rows if model.experts is None else rows * model.experts.n_active / model.experts.n_experts

    def tflops(part: WeightPart) -> float:
        at = known.get(part.type, main)
        prompt, token = (at.experts_tflops if part.routed else at.prompt_tflops).value, at.token_tflops.value
        return _between(token, prompt, each if part.routed else rows)

    return 1e12 * sum(part.n_params for part in of) / sum(part.n_params / tflops(part) for part in of)


def _between(token: float, prompt: float, rows: float) -> float:
    """The rate of so many rows: a power of their number (at most itself, or more rows would take less time)."""
    most = math.log(_MANY / _FEW)
    power = min(1.0, math.log(prompt / token) / most)
    return float(token * math.exp(power * min(most, math.log(max(rows, _FEW) / _FEW))))


# What is written after a prompt, beside what a model that thinks writes first: a screen of text, or of code.
_ANSWER_TOKENS = 300
# A file of less is loaded, and answers, before its kernels are timed.
_WORTH_TIMING_BYTES = 128 * 2**20


def layout(device: Device, model: Model, variant: Variant, workload: Workload) -> Literal["auto", "stored"]:
    """How `variant`'s weights are best held on `device` for that work; "auto" (the engine's own way) where nobody measured, and
    where it lays nothing out."""
    base = kernels.base_type(variant)
    if not _on_the_processor(device, variant) or not any(r.laid_out for r in device.matrix_rates if r.type == base):
        return "auto"
    stored, usual = (kernels.flops_s(device.matrix_rates, model, variant, stored=s) for s in (True, False))
    if stored is None or usual is None:
        return "auto"
    need = needs.need_of(workload)
    new_tokens = need.prompt_tokens - need.cached_tokens

    def work(flops_s: tuple[float, float]) -> float:
        prompt, token = flops_s
        return new_tokens / prompt + _ANSWER_TOKENS / token

    return "stored" if work(stored) < work(usual) else "auto"


def types_to_time(device: Device, variant: Variant) -> list[str]:
    """The types whose kernels are worth timing before `variant` is planned on `device`: they decide how its weights are held and
    how fast it is said to be."""
    heavy = (variant.weights_bytes or variant.file_bytes) >= _WORTH_TIMING_BYTES
    return kernels.types_needed(variant) if heavy and _on_the_processor(device, variant) else []


def _on_the_processor(device: Device, variant: Variant) -> bool:
    return device.accelerator == "cpu" and backend_of(variant).lays_out
