"""The kinds of accelerator: one table that devices, builds, setup and messages read.

Another kind is a row here, what finds it on a machine (machines/), and how its build is made (setup/recipes.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Accelerator = Literal["metal", "cuda", "rocm", "vulkan", "sycl", "cpu"]


@dataclass(frozen=True, slots=True)
class AcceleratorKind:
    """`label`: as people write it. `ggml`: what ggml calls it, as a backend (GGML_CUDA_NAME and its like in ggml's headers) or as
    a library (libggml-hip.so), in lower case. `instead`: what else drives its parts, in this order, where a build lacks it.
    `hidden_by`: the environment's variables that hide its devices. `cmake`: the flag that turns it on, where llama.cpp
    compiles for it with nothing but a C++ compiler and headers."""

    label: str
    ggml: tuple[str, ...] = ()
    instead: tuple[Accelerator, ...] = ()
    hidden_by: tuple[str, ...] = ()
    cmake: str = ""


KINDS: dict[str, AcceleratorKind] = {
    "cuda": AcceleratorKind("CUDA", ("cuda",), ("vulkan",), ("CUDA_VISIBLE_DEVICES",)),
    "rocm": AcceleratorKind("ROCm", ("rocm", "hip"), ("vulkan",), ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")),
    "metal": AcceleratorKind("Metal", ("metal", "mtl"), cmake="-DGGML_METAL=ON"),
    "vulkan": AcceleratorKind(
        "Vulkan", ("vulkan",), ("sycl", "rocm"), ("GGML_VK_VISIBLE_DEVICES",), cmake="-DGGML_VULKAN=ON"
    ),
    "sycl": AcceleratorKind("SYCL", ("sycl",), ("vulkan",)),
    "cpu": AcceleratorKind("the processor", cmake="-DGGML_METAL=OFF"),
}
# Libraries of ggml for accelerators that nothing here plans for yet.
OTHER_LIBRARIES = ("musa", "opencl")


def called(name: str) -> Accelerator | None:
    """The kind that ggml calls `name`; None for the processor and what only helps it (BLAS)."""
    return next((kind for kind in get_args(Accelerator) if name.lower() in KINDS[kind].ggml), None)


def compiled_in(libraries: str) -> tuple[str, ...]:
    """The kinds, by our names, that a build has libraries for (libggml-cuda.so, ggml-vulkan.dll …), of their file names."""
    ours = [kind for kind, known in KINDS.items() if any(f"ggml-{name}" in libraries for name in known.ggml)]
    return (*ours, *(name for name in OTHER_LIBRARIES if f"ggml-{name}" in libraries))
