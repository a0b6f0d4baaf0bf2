"""What ggml says of the accelerators it would run on: their memory, and the largest KV tensor one of them computes with."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from localllm_backends.contract import LoadSpec, OutOfMemoryError
from localllm_backends.llamacpp.native import GGML_TYPES, c_string, ggml_function

# ggml-backend.h: enum ggml_backend_dev_type
_GPU, _INTEGRATED = 1, 2
_I64 = 27  # ggml.h: enum ggml_type
_SCRATCH_BYTES = 64 * 1024  # for the descriptions of a few tensors without data
_CELLS = 256  # llama.cpp pads every context to this many


class _InitParams(ctypes.Structure):
    """ggml.h: struct ggml_init_params."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device of the loaded library: its handle, ggml's name for it ("Vulkan0"), and the bytes free and in all."""

    handle: int
    name: str
    free_bytes: int
    total_bytes: int


def accelerators() -> list[Accelerator]:
    """The devices that layers go to: the cards, or without one the integrated GPU, as llama.cpp chooses."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    count = ggml_function("ggml_backend_dev_count", size)
    get = ggml_function("ggml_backend_dev_get", pointer, size)
    kind = ggml_function("ggml_backend_dev_type", ctypes.c_int, pointer)
    name = ggml_function("ggml_backend_dev_name", ctypes.c_char_p, pointer)
    memory = ggml_function("ggml_backend_dev_memory", None, pointer, ctypes.POINTER(size), ctypes.POINTER(size))
    found: dict[int, list[Accelerator]] = {_GPU: [], _INTEGRATED: []}
    for i in range(count()):
        device = get(i)
        if kind(device) in found:
            free, total = size(), size()
            memory(device, ctypes.byref(free), ctypes.byref(total))
            said = name(device).decode("utf-8", "replace")
            found[kind(device)].append(Accelerator(device, said, free.value, total.value))
    return found[_GPU] or found[_INTEGRATED]


def check_kv(llama: Any, model: Any, spec: LoadSpec, n_ctx: int) -> None:
    """OutOfMemoryError where a layer's K or V cache of `n_ctx` tokens is larger than what an accelerator computes with in one
    piece (Vulkan's storage buffers: 4 GiB on cards, 128 MiB where no more is promised). llama.cpp aborts the process then."""
    if spec.n_gpu_layers == 0:
        return
    widths = _kv_widths(llama, model)
    for device in accelerators():
        for width, kind in zip(widths, (spec.kv_type_k, spec.kv_type_v), strict=True):
            most = _most_cells(device, GGML_TYPES[kind], width, -(-n_ctx // _CELLS) * _CELLS)
            if most is not None:
                raise OutOfMemoryError(
                    f"not enough room for a context of {n_ctx} tokens: {device.name} computes with a KV cache of at most "
                    f"{most} tokens a layer ({kind}); ask for fewer, or for a smaller KV type"
                )


def _kv_widths(llama: Any, model: Any) -> tuple[int, int]:
    """Elements that the first layer's K and V keep for a token; (0, 0) where it keeps none (recurrent)."""
    architecture = c_string(llama.llama_model_meta_val_str, model, b"general.architecture") or ""

    def number(key: str) -> int:
        text = c_string(llama.llama_model_meta_val_str, model, f"{architecture}.attention.{key}".encode())
        return int(text) if text and text.isdigit() else 0

    heads = int(llama.llama_model_n_head_kv(model))
    usual = int(llama.llama_model_n_embd(model)) // max(1, int(llama.llama_model_n_head(model)))
    return heads * (number("key_length") or usual), heads * (number("value_length") or usual)


def _most_cells(device: Accelerator, kind: int, width: int, cells: int) -> int | None:
    """None where the device writes rows into a cache of that many cells, or into none of that type at all (then another
    device does it, slowly); otherwise the most cells it takes."""
    if not width or _writes_rows(device, kind, width, cells) or not _writes_rows(device, kind, width, _CELLS):
        return None
    low, high = 1, cells // _CELLS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _writes_rows(device, kind, width, middle * _CELLS) else (low, middle)
    return low * _CELLS


def _writes_rows(device: Accelerator, kind: int, width: int, cells: int) -> bool:
    """Does the device compute what fills a KV cache of this size? Asked with tensors that have no data."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    begin = ggml_function("ggml_init", pointer, _InitParams)
    tensor = ggml_function("ggml_new_tensor_2d", pointer, pointer, ctypes.c_int, number, number)
    rows = ggml_function("ggml_set_rows", pointer, pointer, pointer, pointer, pointer)
    supports = ggml_function("ggml_backend_dev_supports_op", ctypes.c_bool, pointer, pointer)
    end = ggml_function("ggml_free", None, pointer)
    scratch = begin(_InitParams(_SCRATCH_BYTES, None, True))
    try:
        cache, new = tensor(scratch, kind, width, cells), tensor(scratch, GGML_TYPES["f32"], width, 1)
        return bool(supports(device.handle, rows(scratch, cache, new, tensor(scratch, _I64, 1, 1))))
    finally:
        end(scratch)
