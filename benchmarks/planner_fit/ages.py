"""The slowdown of older software: how much longer a row of an earlier version takes than today's,
if both were measured.

For a chip without similar ones (Strix Halo), other machines can't give the effect of older
versions. Instead, the slowdown comes from the pull request that removed it: its author's figures
before and after. It applies to every row of that age. Plans are for today's software, so the
planner does not use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from localllm.planner import kernels
from localllm.planner.bytes_per_token import facts
from localllm.planner.decode_cost import CostTerm
from localllm.planner.kernel_facts import facts as facts_of_kernels
from localllm_catalog.types import Model

# AMD's GPUs with matrix units, which llama.cpp's Vulkan uses from RDNA3 on.
_AMD_WITH_MATRICES = ("amd-rdna3.vulkan", "amd-rdna4.vulkan", "amd-strix-halo.vulkan")
_RDNA3 = ("amd-rdna3.rocm", "amd-strix-halo.rocm")
# First builds of llama.cpp that skip masked parts: Metal's (pull/16372, October 2025).
_METAL_SKIPS_FROM = 6700
# The approximate build from which CUDA's Mamba-2 reads prompts in chunks (May 2026).
_CHUNKED_STATES_FROM = 9200
# The approximate build from which CUDA chooses experts and multiplies by them in fused kernels.
_FUSED_EXPERTS_FROM = 6900
_APART_S = 8e-6
_PASSES_OVER_SCORES = 4
_VOLTA = ("part:v100.cuda", "part:titan v.cuda")
# The first version of MLX with small tiles for experts, as its builds are counted: 0.32.1.
_SMALL_TILES_FROM = 3201


@dataclass(frozen=True)
class Age:
    """The facts of a row that its age depends on: the keys of its hardware, the class of its
    format, whether it is a mixture, the number of query heads per KV head, its era, the build of
    llama.cpp or the version of MLX (3201 for 0.32.1; 0: not stated), whether it has Mamba-2 layers,
    and the mean number of tokens per expert in a micro-batch."""

    keys: tuple[str, ...]
    quant: str
    moe: bool
    heads_per_kv: float
    era: str
    build: int
    mamba2: bool = False
    expert_tokens: float = 0.0


def prefill(age: Age, parts: Mapping[str, CostTerm]) -> dict[str, CostTerm]:
    """Return the parts of a prompt token's cost, with the times of that age."""
    matrices, all_of_it = _dense_tiles(age) * _rows_of_experts(age), _states_in_turn(age)
    slower = {"matmul": matrices * all_of_it, "padding": matrices * all_of_it * _large_tiles(age)}
    return {n: p._replace(value=p.value * slower.get(n, all_of_it)) for n, p in parts.items()}


def masked(age: Age, batch: int) -> tuple[float, float]:
    """Return `kernels.masked_share` of that age. CUDA skips no masked parts before July 2025
    (https://github.com/ggml-org/llama.cpp/pull/14924), Metal before October (/16372), Vulkan before
    February 2026 (/19281)."""
    engine = age.keys[0]
    old = {
        "cuda": age.era < "2025b",
        "rocm": age.era < "2025b",
        "metal": age.build < _METAL_SKIPS_FROM if age.build else age.era != "2026",
        "vulkan": age.era != "2026",
    }
    return kernels.ALL_MASKED if old.get(engine) else kernels.masked_share(age.keys, batch)


def scores_bytes(model: Model, context: float) -> float:
    """Return the bytes that a prompt token's attention over `context` moves without flash
    attention: every head's scores in float32, written by the first product, read and written by the
    softmax and read by the second product."""
    total = 0.0
    for layer, count in facts(model).groups:
        if layer.mixer.attends:
            heads = count * layer.mixer.heads(model.n_heads)
            total += 4.0 * _PASSES_OVER_SCORES * heads * layer.mixer.seen(context)
    return total


def decode(
    age: Age, parts: Mapping[str, CostTerm], weights: float, flops_s: float
) -> dict[str, CostTerm]:
    """Return the parts of a decode step of `weights` weights on units of `flops_s`, with the times
    of that age."""
    kv = parts["kv"]._replace(value=parts["kv"].value * _kv_reads(age))
    apart = _apart_layer_s(age) * parts["experts"].value
    older = CostTerm(_k_quants_flops(age) * weights / flops_s + apart, ())
    return {**parts, "kv": kv, "older": older}


def _dense_tiles(age: Age) -> float:
    """Until January 2026, the tiles of dense matrices were not tuned for AMD:
    https://github.com/ggml-org/llama.cpp/pull/18749, an 8B on a Radeon 8060S, 512 tokens: Q4_0 645
    to 875 tok/s, Q4_K 530 to 794, Q8_0 422 to 742 (experts have separate tiles)."""
    if age.moe or age.era == "2026" or not set(_AMD_WITH_MATRICES).intersection(age.keys):
        return 1.0
    return {"q4_0": 1.36, "q8": 1.76}.get(age.quant, 1.50)


def _rows_of_experts(age: Age) -> float:
    """Until 23 August 2025, every group searched in memory for its experts' tokens:
    https://github.com/ggml-org/llama.cpp/pull/15427, Qwen3-30B-A3B in Q4_K on an RTX 3090, 512
    tokens: 1,254 to 1,987 tok/s."""
    return 1.58 if age.moe and age.keys[0] == "vulkan" and 0 < age.build < 6250 else 1.0


def _large_tiles(age: Age) -> float:
    """Until MLX 0.32.1 (August 2026), M5's matrix units multiplied experts in tiles of 64 rows, also
    if they had fewer: https://github.com/ml-explore/mlx/pull/4023."""
    kernel = facts_of_kernels(age.keys)
    is_short = age.expert_tokens < kernel.expert_tile and kernel.short_expert_tile > 0
    old = age.keys[0] == "mlx" and 0 < age.build < _SMALL_TILES_FROM
    return kernel.expert_tile / kernel.short_expert_tile if old and is_short else 1.0


def _states_in_turn(age: Age) -> float:
    """Until May 2026, CUDA advanced the states of Mamba-2 token by token:
    https://github.com/ggml-org/llama.cpp/pull/22675, Nemotron-Nano-4B on an RTX PRO 6000: prompts
    11 to 16 % faster."""
    return (
        1.135
        if age.mamba2 and age.keys[0] == "cuda" and 0 < age.build < _CHUNKED_STATES_FROM
        else 1.0
    )


def _apart_layer_s(age: Age) -> float:
    """Return the additional seconds per expert layer on CUDA, when the choice of experts and the
    two products were separate kernels: until https://github.com/ggml-org/llama.cpp/pull/16130
    (September 2025) Qwen3-30B-A3B 194.6 to 207.8 tok/s, 6.8 µs per layer, and until /16649 and
    /16715 (October) gpt-oss-20B on an RTX 4090 167.0 to 173.3, 9 µs."""
    return _APART_S if age.keys[0] == "cuda" and 0 < age.build < _FUSED_EXPERTS_FROM else 0.0


def _k_quants_flops(age: Age) -> float:
    """Return the FLOPs per weight that ROCm's matrix-vector products of K formats took on RDNA3
    before they were tuned in 2026. In https://github.com/ggml-org/llama.cpp/pull/16900 (November
    2025), an 8B on a Radeon 8060S reaches 35.7 tok/s in Q4_K, and 43.3 with Vulkan, 44.3 in Q2_K
    (56.3) and 34.7 in Q3_K (46.8): 4.9, 4.8 and 7.4 ms of 36.8 TFLOP/s."""
    old = age.era != "2026" and bool(set(_RDNA3).intersection(age.keys))
    return {"k": 22.5, "k23": 28.0}.get(age.quant, 0.0) if old else 0.0


def _kv_reads(age: Age) -> float:
    """Return how often CUDA's attention read the KV for one token on Volta: once per query head,
    until the kernel that packs them (https://github.com/ggml-org/llama.cpp/pull/11583, from Turing
    on) supported its units (/17505, December 2025)."""
    return (
        age.heads_per_kv if age.era != "2026" and bool(set(_VOLTA).intersection(age.keys)) else 1.0
    )
