"""What older software lacked: how much longer than today's a row of an age takes, where somebody
measured both.

A chip that nobody else has (Strix Halo) cannot be told its own past by other machines, so what the
engine of a row's age did worse is taken from the changes that ended it: their authors' before and
after. It applies to every row of that age. Plans are made for today, so none of this is in the
planner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from localllm.planner import kernels
from localllm.planner.bytes_per_token import facts
from localllm.planner.decode_cost import CostTerm
from localllm_catalog.types import Model

# AMD's GPUs with units for matrices, which llama.cpp's Vulkan uses from RDNA3 on.
_AMD_WITH_MATRICES = ("amd-rdna3.vulkan", "amd-rdna4.vulkan", "amd-strix-halo.vulkan")
_RDNA3 = ("amd-rdna3.rocm", "amd-strix-halo.rocm")
# First builds of llama.cpp that skip what the mask hides: Metal's (pull/16372, October 2025).
_METAL_SKIPS_FROM = 6700
# About the build from which CUDA's Mamba-2 reads prompts in chunks (May 2026).
_CHUNKED_STATES_FROM = 9200
# About the build from which CUDA chooses experts and multiplies by them in fused kernels.
_FUSED_EXPERTS_FROM = 6900
_APART_S = 8e-6
_PASSES_OVER_SCORES = 4
_VOLTA = ("part:v100.cuda", "part:titan v.cuda")


@dataclass(frozen=True)
class Age:
    """A row as far as its age matters: the keys of its hardware, its format's class, whether it is
    a mixture, how many of its query heads share a head of the KV, its era, the build of its
    llama.cpp (0: not stated), whether it has layers of Mamba-2."""

    keys: tuple[str, ...]
    quant: str
    moe: bool
    heads_per_kv: float
    era: str
    build: int
    mamba2: bool = False


def prefill(age: Age, parts: Mapping[str, CostTerm]) -> dict[str, CostTerm]:
    """The parts of a prompt's token, as long as that age took for them."""
    matrices, all_of_it = _dense_tiles(age) * _rows_of_experts(age), _states_in_turn(age)
    slower = {"matmul": matrices * all_of_it, "padding": matrices * all_of_it}
    return {n: p._replace(value=p.value * slower.get(n, all_of_it)) for n, p in parts.items()}


def masked(age: Age, batch: int) -> tuple[float, float]:
    """`kernels.masked_share` of that age: CUDA skips nothing before July 2025
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
    """Bytes that a prompt token's attention over `context` moves without flash attention: every
    head's scores in float32, written by the first product, read and written by the softmax and read
    by the second."""
    total = 0.0
    for layer, count in facts(model).groups:
        if layer.mixer.attends:
            heads = count * layer.mixer.heads(model.n_heads)
            total += 4.0 * _PASSES_OVER_SCORES * heads * layer.mixer.seen(context)
    return total


def decode(
    age: Age, parts: Mapping[str, CostTerm], weights: float, flops_s: float
) -> dict[str, CostTerm]:
    """The parts of a decode step of so many `weights` on units of `flops_s`, as long as that age
    took for them."""
    kv = parts["kv"]._replace(value=parts["kv"].value * _kv_reads(age))
    apart = _apart_layer_s(age) * parts["experts"].value
    older = CostTerm(_k_quants_flops(age) * weights / flops_s + apart, ())
    return {**parts, "kv": kv, "older": older}


def _dense_tiles(age: Age) -> float:
    """Until January 2026 the tiles of dense matrices were not AMD's:
    https://github.com/ggml-org/llama.cpp/pull/18749, an 8B on a Radeon 8060S, 512 tokens: Q4_0 645
    to 875 tok/s, Q4_K 530 to 794, Q8_0 422 to 742 (experts have tiles of their own)."""
    if age.moe or age.era == "2026" or not set(_AMD_WITH_MATRICES).intersection(age.keys):
        return 1.0
    return {"q4_0": 1.36, "q8": 1.76}.get(age.quant, 1.50)


def _rows_of_experts(age: Age) -> float:
    """Until 23 August 2025 every group searched for its experts' tokens in memory:
    https://github.com/ggml-org/llama.cpp/ pull/15427, Qwen3-30B-A3B in Q4_K on an RTX 3090, 512
    tokens: 1,254 to 1,987 tok/s."""
    return 1.58 if age.moe and age.keys[0] == "vulkan" and 0 < age.build < 6250 else 1.0


def _states_in_turn(age: Age) -> float:
    """Until May 2026 CUDA took the states of Mamba-2 forward token by token:
    https://github.com/ggml-org/llama.cpp/pull/22675, Nemotron-Nano-4B on an RTX PRO 6000: prompts
    11 to 16 % faster."""
    return (
        1.135
        if age.mamba2 and age.keys[0] == "cuda" and 0 < age.build < _CHUNKED_STATES_FROM
        else 1.0
    )


def _apart_layer_s(age: Age) -> float:
    """Seconds more that a layer of experts took on CUDA while its choice of experts and its two
    products were kernels of their own: until https://github.com/ggml-org/llama.cpp/pull/16130
    (September 2025) Qwen3-30B-A3B 194.6 to 207.8 tok/s, 6.8 µs a layer, and until /16649 and
    /16715 (October) gpt-oss-20B on an RTX 4090 167.0 to 173.3, 9 µs."""
    return _APART_S if age.keys[0] == "cuda" and 0 < age.build < _FUSED_EXPERTS_FROM else 0.0


def _k_quants_flops(age: Age) -> float:
    """FLOPs that ROCm's products of one vector took for each weight of a K format on RDNA3 before
    they were tuned in 2026: https://github.com/ggml-org/llama.cpp/pull/16900 (November 2025) has an
    8B on a Radeon 8060S at 35.7 tok/s in Q4_K where Vulkan reads it at 43.3, at 44.3 in Q2_K (56.3)
    and 34.7 in Q3_K (46.8): 4.9, 4.8 and 7.4 ms of 36.8 TFLOP/s."""
    old = age.era != "2026" and bool(set(_RDNA3).intersection(age.keys))
    return {"k": 22.5, "k23": 28.0}.get(age.quant, 0.0) if old else 0.0


def _kv_reads(age: Age) -> float:
    """Times that CUDA's attention read the KV for one token on Volta: once for every query head,
    until the kernel that packs them (https://github.com/ggml-org/llama.cpp/pull/11583: from Turing
    on) learnt of its units (/17505, December 2025)."""
    return (
        age.heads_per_kv if age.era != "2026" and bool(set(_VOLTA).intersection(age.keys)) else 1.0
    )
