"""Table of the kinds of accelerator. Devices, builds, setup and messages read it.

A new kind needs three things: a row here, detection code (machines/), and a build recipe
(setup/recipes.py).
"""

from __future__ import annotations

from itertools import chain
from typing import Literal, NamedTuple, get_args

_MIB = 2**20
_DEFAULT_UNITS = 68
_MIN_RUNTIME_MIB = 96

Accelerator = Literal["metal", "cuda", "rocm", "vulkan", "sycl", "cpu"]


class AcceleratorKind(NamedTuple):
    """Properties of one kind of accelerator.

    - `label`: name shown to users.
    - `ggml`: lower-case names that ggml uses. They are backend names (GGML_CUDA_NAME and similar in
      ggml's headers) or library names (libggml-hip.so).
    - `instead`: other kinds that drive the same GPUs if a build lacks this one, in order of
      preference.
    - `hidden_by`: environment variables that hide its devices.
    - `cmake`: the flag that turns it on. Set only if llama.cpp compiles for it with just a C++
      compiler and headers.
    - `lighter`: another kind that drives the same GPUs and needs only their driver. This kind must
      be faster to be worth installing.
    - `lacks`: prefixes of the architectures that builds no longer support.

    Values for the planner:

    - `runtime_mib`: memory that the runtime keeps on a card, by its number of compute units. It is
      linear between the (units, MiB) points, with a fixed minimum.
    - `reads_weights`: weights are read into memory, not mapped.
    - `pins_host_weights`: weights in system memory are held in pinned buffers.
    - `dequantises_kv`: the compute buffers of a step hold one layer's KV at 16 bits.
    - `shares_tables`: an embedding that is also the output matrix is in memory once.
    """

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
        """Bytes that the runtime keeps on a card with `units` compute units (0: unknown)."""
        (min_units, min_mib), (max_units, max_mib) = self.runtime_mib
        mib = min_mib + ((units or _DEFAULT_UNITS) - min_units) * (max_mib - min_mib) / (
            max_units - min_units
        )
        return max(_MIN_RUNTIME_MIB * _MIB if mib else 0, round(mib * _MIB))


_CUDA = AcceleratorKind(
    "CUDA",
    ("cuda",),
    ("vulkan",),
    ("CUDA_VISIBLE_DEVICES",),
    # CUDA 12, the oldest that llama.cpp is built with, starts at compute capability 5.0.
    lacks=("2.", "3."),
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
_CPU = AcceleratorKind("the CPU", cmake="-DGGML_METAL=OFF", runtime_mib=((0, 0), (1, 0)))
KINDS: dict[str, AcceleratorKind] = {
    "cuda": _CUDA,
    "rocm": _ROCM,
    "metal": _METAL,
    "vulkan": _VULKAN,
    "sycl": _SYCL,
    "cpu": _CPU,
}
# Environment variables that hide GPUs from the programs started here.
HIDING_VARIABLES = tuple(chain.from_iterable(kind.hidden_by for kind in KINDS.values()))
# ggml libraries for accelerators that the planner does not support yet.
OTHER_LIBRARIES = ("musa", "opencl")


def kind_of_backend(name: str) -> Accelerator | None:
    """Return the kind that ggml calls `name`, or None for the CPU and its helpers (BLAS)."""
    return next((kind for kind in get_args(Accelerator) if name.lower() in KINDS[kind].ggml), None)


def driving_kind(kind: Accelerator, architecture: str) -> Accelerator:
    """Return the kind that drives a GPU of this architecture ("8.6", "gfx1100"; "" = unknown).

    This is the vendor's own kind. If builds of that kind no longer support the architecture, it is
    the first alternative.
    """
    if architecture.startswith(KINDS[kind].lacks):
        return KINDS[kind].instead[0]
    return kind


def rival_kind(kind: Accelerator) -> Accelerator | None:
    """Return the other kind of a pair whose builds drive the same GPUs, or None.

    The planner has to predict which of the two is faster.
    """
    if KINDS[kind].lighter:
        return KINDS[kind].lighter
    return next((other for other in get_args(Accelerator) if KINDS[other].lighter == kind), None)


def compiled_in(libraries: str) -> tuple[str, ...]:
    """Return our names of the kinds a build has libraries for (libggml-cuda.so, ggml-vulkan.dll …).

    `libraries` holds the file names.
    """
    kinds = [
        kind
        for kind, kind_row in KINDS.items()
        if any(f"ggml-{name}" in libraries for name in kind_row.ggml)
    ]
    return (*kinds, *(name for name in OTHER_LIBRARIES if f"ggml-{name}" in libraries))
