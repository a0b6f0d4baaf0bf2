"""The kinds of accelerator: one table that devices, builds, setup and messages read.

Another kind is a row here, what finds it on a machine (machines/), and how its build is made
(setup/recipes.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Literal, get_args

_MIB = 2**20
_USUAL_UNITS = 68
_LEAST_RUNTIME_MIB = 96

Accelerator = Literal["metal", "cuda", "rocm", "vulkan", "sycl", "cpu"]


@dataclass(frozen=True, slots=True)
class AcceleratorKind:
    """`label`: as people write it.
    `ggml`: what ggml calls it, as a backend (GGML_CUDA_NAME and its like in ggml's headers) or as a
    library (libggml-hip.so), in lower case.
    `instead`: what else drives its parts, in this order, where a build lacks it.
    `hidden_by`: the environment's variables that hide its devices. `cmake`: the flag that turns it
    on, where llama.cpp compiles for it with nothing but a C++ compiler and headers.
    `lighter`: another kind that drives the same parts with nothing but their driver, so that this
    one must be worth installing.
    `lacks`: how the architectures begin that no build of it has code of any more.

    What plans reckon with: `runtime_mib`, what the runtime keeps on a card by its compute units,
    linear between (units, MiB) points, and never less than the first.
    `reads_weights`: into memory rather than mapped.
    `pins_host_weights`: what stays in system memory lies in pinned buffers where it was read.
    `dequantises_kv`: a step's buffers hold a layer's KV at 16 bits.
    `shares_tables`: an embedding that is the output matrix too is in memory once."""

    label: str
    ggml: tuple[str, ...] = ()
    instead: tuple[Accelerator, ...] = ()
    hidden_by: tuple[str, ...] = ()
    cmake: str = ""
    lighter: Accelerator | None = None
    lacks: tuple[str, ...] = ()
    runtime_mib: tuple[tuple[int, int], tuple[int, int]] = ((0, 256), (1, 256))  # assumed
    reads_weights: bool = False
    pins_host_weights: bool = False
    dequantises_kv: bool = False
    shares_tables: bool = False

    def runtime_bytes(self, units: int) -> int:
        """What the runtime keeps on a card of so many compute units (0: unknown)."""
        (few, least), (many, most) = self.runtime_mib
        mib = least + ((units or _USUAL_UNITS) - few) * (most - least) / (many - few)
        return max(_LEAST_RUNTIME_MIB * _MIB if mib else 0, round(mib * _MIB))


_CUDA = AcceleratorKind(
    "CUDA",
    ("cuda",),
    ("vulkan",),
    ("CUDA_VISIBLE_DEVICES",),
    lacks=("2.", "3."),  # CUDA 12, the oldest that llama.cpp is built with, begins at 5.0
    # Driver context and kernels: 107 MiB on 34 SMs, 555 MiB on 188
    # (https://github.com/ggml-org/llama.cpp/pull/23604).
    runtime_mib=((34, 107), (188, 555)),
    pins_host_weights=True,
    dequantises_kv=True,
)
_ROCM = AcceleratorKind(
    "ROCm",
    ("rocm", "hip"),
    ("vulkan",),
    ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    lighter="vulkan",
    lacks=("gfx6", "gfx7", "gfx8", "gfx900", "gfx902", "gfx90c", "gfx101"),
    reads_weights=True,
    dequantises_kv=True,
)
_METAL = AcceleratorKind(
    "Metal",
    ("metal", "mtl"),
    cmake="-DGGML_METAL=ON",
    runtime_mib=((0, 100), (1, 100)),
    shares_tables=True,
)
_VULKAN = AcceleratorKind(
    "Vulkan",
    ("vulkan",),
    ("sycl", "rocm"),
    ("GGML_VK_VISIBLE_DEVICES",),
    cmake="-DGGML_VULKAN=ON",
)
_SYCL = AcceleratorKind("SYCL", ("sycl",), ("vulkan",))
_CPU = AcceleratorKind("the processor", cmake="-DGGML_METAL=OFF", runtime_mib=((0, 0), (1, 0)))
KINDS: dict[str, AcceleratorKind] = {
    "cuda": _CUDA,
    "rocm": _ROCM,
    "metal": _METAL,
    "vulkan": _VULKAN,
    "sycl": _SYCL,
    "cpu": _CPU,
}
# The environment's variables that hide GPUs from the programs which are started here.
HIDING_VARIABLES = tuple(chain.from_iterable(kind.hidden_by for kind in KINDS.values()))
# Libraries of ggml for accelerators that nothing here plans for yet.
OTHER_LIBRARIES = ("musa", "opencl")


def called(name: str) -> Accelerator | None:
    """The kind that ggml calls `name`; None for the processor and what only helps it (BLAS)."""
    return next((kind for kind in get_args(Accelerator) if name.lower() in KINDS[kind].ggml), None)


def driver(kind: Accelerator, architecture: str) -> Accelerator:
    """What drives a part of this architecture ("8.6", "gfx1100"; "" = unknown): its maker's own
    kind, or what else does where no build of that has code of it."""
    if architecture.startswith(KINDS[kind].lacks):
        return KINDS[kind].instead[0]
    return kind


def rival(kind: Accelerator) -> Accelerator | None:
    """The other kind of the two whose builds drive the same parts, where which is faster has to be
    predicted."""
    if KINDS[kind].lighter:
        return KINDS[kind].lighter
    return next((other for other in get_args(Accelerator) if KINDS[other].lighter == kind), None)


def compiled_in(libraries: str) -> tuple[str, ...]:
    """The kinds, by our names, that a build has libraries for (libggml-cuda.so, ggml-vulkan.dll …),
    of their file names."""
    ours = [
        kind
        for kind, known in KINDS.items()
        if any(f"ggml-{name}" in libraries for name in known.ggml)
    ]
    return (*ours, *(name for name in OTHER_LIBRARIES if f"ggml-{name}" in libraries))
