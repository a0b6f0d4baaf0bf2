"""What an engine has kernels for: what a format costs more where the right one is missing.

Facts about software that neither the format nor the machine tells alone. Each is from measurements of its own, by others and
not of the rows in benchmarks/data/speeds.csv, so that it holds of a machine that was left out there.
"""

from __future__ import annotations

from localllm.planner import families
from localllm_catalog.types import Variant

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
    slow = "intel.vulkan" in keys and families.quant_class(variant.quant) not in _MESA_FAST
    return _MESA_SHARE if slow else 1.0


def experts_read_share(variant: Variant, keys: Keys) -> float:
    """The same of chosen experts."""
    plain = variant.quant.upper() == "BF16" and not _multiplies_bf16(keys)
    return _PLAIN_BF16_EXPERTS_SHARE if plain else read_share(variant, keys)


def unpack_flops(variant: Variant, keys: Keys) -> float:
    """Arithmetic at the units' nominal rate that a weight of this format takes beyond what every format does."""
    few = keys[0] == "metal" and families.quant_class(variant.quant) == "k23"
    return _METAL_FEW_BITS_FLOPS if few else 0.0


def expert_tile(keys: Keys) -> float:
    """Rows that every touched expert of a micro-batch costs beside its tokens, where the kernel says it; 0: to be learnt."""
    return _NAX_TILE if _NAX.intersection(keys) else 0.0


def matrix_share(variant: Variant, keys: Keys) -> float:
    """Share of the units' nominal rate at which matrices of this format are multiplied.

    A processor's are those of Q4_K laid out anew, where this type was not timed itself (timed.py). Under Vulkan bfloat16 goes to
    the plain units, at half the rate of those for matrices, where the driver multiplies no matrices of that type. A P100 lacks
    the products of four bytes at once that llama.cpp's kernels for quantised matrices are made of, and what it has instead is
    half as wide.
    """
    if variant.quant.upper() == "BF16" and not _multiplies_bf16(keys):
        return _PLAIN_BF16_SHARE
    if keys[0] == "cpu" and variant.quant.upper() in CPU_PLAIN_FORMATS:
        return _CPU_PLAIN_SHARE
    return 0.5 if f"part:p100.{keys[0]}" in keys else 1.0


def _multiplies_bf16(keys: Keys) -> bool:
    return keys[0] != "vulkan" or bool(_MULTIPLY_BF16.intersection(keys))
