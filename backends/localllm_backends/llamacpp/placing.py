"""Where llama.cpp puts weights and KV: from a LoadSpec to the parameters of its model and context, and back to the log.

llama.cpp counts layers from the end: the last `n_gpu_layers` of them, the output being one, are the devices'. Which
tensors go elsewhere all the same it is told by patterns over their names.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from localllm_backends.contract import LoadError, LoadSpec
from localllm_backends.llamacpp.native import ggml_function, offload

_CPU_DEVICE = 0  # ggml-backend.h: enum ggml_backend_dev_type
_SPLIT_MODES = {"none": 0, "layer": 1, "row": 2}  # llama.h: enum llama_split_mode
_LOAD_MODES = {"auto": -1, "read": 0, "mapped": 1, "locked": 3}  # llama.h: enum llama_load_mode
_LAZY_MODES = {"memory": 0, "auto": 1, "disk": 2}  # llama.h: enum llama_lazy_mode
# As llama.cpp's own tools name them; `ch` are experts chunked over several tensors.
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_MADV_DONTNEED = 4


class _Override(ctypes.Structure):
    """llama.h: struct llama_model_tensor_buft_override."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


def host_buffer_type() -> int:
    """The address of ggml's type of ordinary system memory."""
    find = ggml_function("ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)
    kind_of = ggml_function("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
    return int(kind_of(find(_CPU_DEVICE)))


def experts_pattern(n_layers: int) -> str:
    """The pattern of the routed experts of the first `n_layers` layers; of all for -1."""
    layers = r"\d+" if n_layers < 0 else "(" + "|".join(str(i) for i in range(n_layers)) + ")"
    return rf"blk\.{layers}{_EXPERTS}"


@contextmanager
def model_params(llama: Any, spec: LoadSpec) -> Iterator[Any]:
    """llama_model_params that place the weights as `spec` says. What they point to lives as long as the block."""
    placed = spec.placement
    params = llama.llama_model_default_params()
    offload(params, spec.n_gpu_layers)
    params.split_mode, params.main_gpu = _SPLIT_MODES[placed.split_mode], placed.main_gpu
    params.load_mode, params.lazy_mode = _LOAD_MODES[placed.weights], _LAZY_MODES[placed.tables]
    params.use_extra_bufts = placed.layout != "stored"
    kept: list[Any] = []
    if placed.experts_on_host:
        pattern = experts_pattern(placed.experts_on_host).encode()
        kept.append((_Override * 2)(_Override(pattern, host_buffer_type()), _Override(None, None)))
        params.tensor_buft_overrides = ctypes.cast(kept[-1], ctypes.c_void_p)
    if placed.tensor_split:
        most = int(llama.llama_max_devices())
        if len(placed.tensor_split) > most:
            raise LoadError(f"llama.cpp splits a model over {most} devices at most, not {len(placed.tensor_split)}")
        kept.append((ctypes.c_float * most)(*placed.tensor_split))
        params.tensor_split = kept[-1]
    try:
        yield params
    finally:
        kept.clear()


def place_context(params: Any, spec: LoadSpec) -> None:
    """Where a context keeps its KV, and whether it may compute on devices what lies in system memory."""
    params.offload_kqv = not spec.placement.kv_on_host
    params.op_offload = spec.n_gpu_layers != 0


def give_back(path: Path) -> int:
    """Let go of the pages of `path` that are mapped into this process; the bytes that were mapped. Linux only.

    Weights that llama.cpp laid out anew or copied to a device stay resident a second time in the mapped file. What is
    still used of it comes back from the system's file cache when it is next touched.
    """
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    given = 0
    for start, stop in mapped_at(path):
        if libc.madvise(start, stop - start, _MADV_DONTNEED) == 0:
            given += stop - start
    return given


def mapped_at(path: Path) -> list[tuple[int, int]]:
    """(start, stop) of the addresses at which `path` is mapped into this process; none where that can't be read."""
    name, found = str(path.resolve()), []
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s+(.*)", line)
        if match is not None and match[3] == name:
            found.append((int(match[1], 16), int(match[2], 16)))
    return found
