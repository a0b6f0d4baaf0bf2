"""What older software lacked: how much longer than today's a row of an age takes, where somebody measured both.

A chip that nobody else has (Strix Halo) cannot be told its own past by other machines, so what the engine of a row's age did
worse is taken from the changes that ended it: their authors' before and after. It applies to every row of that age. Plans are
made for today, so none of this is in the planner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from localllm.planner.laws import Part

# AMD's GPUs with units for matrices, which llama.cpp's Vulkan uses from RDNA3 on.
_AMD_WITH_MATRICES = ("amd-rdna3.vulkan", "amd-rdna4.vulkan", "amd-strix-halo.vulkan")
_RDNA3 = ("amd-rdna3.rocm", "amd-strix-halo.rocm")
_VOLTA = ("part:v100.cuda", "part:titan v.cuda")


@dataclass(frozen=True)
class Age:
    """A row as far as its age matters: the keys of its hardware, its format's class, whether it is a mixture, how many of its
    query heads share a head of the KV, its era, the build of its llama.cpp (0: not stated)."""

    keys: tuple[str, ...]
    quant: str
    moe: bool
    heads_per_kv: float
    era: str
    build: int


def prefill(age: Age, parts: Mapping[str, Part]) -> dict[str, Part]:
    """The parts of a prompt's token, as long as that age took for them."""
    slower = _dense_tiles(age) * _rows_of_experts(age)
    return {n: replace(p, value=p.value * slower) if n in ("matmul", "padding") else p for n, p in parts.items()}


def decode(age: Age, parts: Mapping[str, Part], weights: float, flops_s: float) -> dict[str, Part]:
    """The parts of a decode step of so many `weights` on units of `flops_s`, as long as that age took for them."""
    kv = replace(parts["kv"], value=parts["kv"].value * _kv_reads(age))
    return {**parts, "kv": kv, "older": Part(_k_quants_flops(age) * weights / flops_s, ())}


def _dense_tiles(age: Age) -> float:
    """Until January 2026 the tiles of dense matrices were not AMD's: https://github.com/ggml-org/llama.cpp/pull/18749, an 8B
    on a Radeon 8060S, 512 tokens: Q4_0 645 to 875 tok/s, Q4_K 530 to 794, Q8_0 422 to 742 (experts have tiles of their own)."""
    if age.moe or age.era == "2026" or not set(_AMD_WITH_MATRICES).intersection(age.keys):
        return 1.0
    return {"q4_0": 1.36, "q8": 1.76}.get(age.quant, 1.50)


def _rows_of_experts(age: Age) -> float:
    """Until 23 August 2025 every group searched for its experts' tokens in memory: https://github.com/ggml-org/llama.cpp/
    pull/15427, Qwen3-30B-A3B in Q4_K on an RTX 3090, 512 tokens: 1,254 to 1,987 tok/s."""
    return 1.58 if age.moe and age.keys[0] == "vulkan" and 0 < age.build < 6250 else 1.0


def _k_quants_flops(age: Age) -> float:
    """FLOPs that ROCm's products of one vector took for each weight of a K format on RDNA3 before they were tuned in 2026:
    https://github.com/ggml-org/llama.cpp/pull/16900 (November 2025) has an 8B on a Radeon 8060S at 35.7 tok/s in Q4_K where
    Vulkan reads it at 43.3, at 44.3 in Q2_K (56.3) and 34.7 in Q3_K (46.8): 4.9, 4.8 and 7.4 ms of 36.8 TFLOP/s."""
    old = age.era != "2026" and bool(set(_RDNA3).intersection(age.keys))
    return {"k": 22.5, "k23": 28.0}.get(age.quant, 0.0) if old else 0.0


def _kv_reads(age: Age) -> float:
    """Times that CUDA's attention read the KV for one token on Volta: once for every query head, until the kernel that packs
    them (https://github.com/ggml-org/llama.cpp/pull/11583: from Turing on) learnt of its units (/17505, December 2025)."""
    return age.heads_per_kv if age.era != "2026" and bool(set(_VOLTA).intersection(age.keys)) else 1.0
