"""ggml's devices: their memory, the largest KV tensor each computes with, and a program that lists
them.

A driver that is broken may crash or hang whoever loads it; who wants the list runs the program:

    python -m localllm_backends.llamacpp.devices        (prints one JSON object)

The fields are ggml's own (ggml-backend.h): sizes in bytes, `largest_buffer_bytes` the most one
allocation may have (null where ggml names no limit), `id` the PCI address where the device has one.
`features` is what each backend says it was compiled for, `said` the lines it logged while it looked
for its devices: the only place where some capabilities stand.
"""

from __future__ import annotations

import ctypes
import sys
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from localllm_backends.contract import LoadError, LoadSpec, OutOfMemoryError
from localllm_backends.llamacpp.native import (
    GGML_TYPES,
    GgmlInitParams,
    bindings,
    bindings_version,
    c_string,
    ggml_function,
    log,
    start_native,
)
from localllm_backends.program import print_answers

# ggml-backend.h: enum ggml_backend_dev_type
PROCESSOR = 0
GPU = 1
INTEGRATED = 2
_I64 = 27  # ggml.h: enum ggml_type
_SCRATCH_BYTES = 64 * 1024  # for the descriptions of a few tensors without data
_CELLS = 256  # llama.cpp pads every context to this many


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device of the loaded library: its handle, ggml's name for it ("Vulkan0"), and the bytes
    that are free. With GGML_CUDA_ENABLE_UNIFIED_MEMORY ggml calls free what the system has
    (https://github.com/ggml-org/llama.cpp/issues/17536): no more than is in all is believed."""

    handle: int
    name: str
    free_bytes: int


def accelerators(cards: Sequence[int] = ()) -> list[Accelerator]:
    """The devices that layers go to: the cards, or without one the integrated GPU, as llama.cpp
    chooses; of these only those of the numbers `cards` in the order of their PCI addresses, where
    any is given. LoadError for one that is not there."""
    found = devices_of_type(GPU) or devices_of_type(INTEGRATED)
    if cards:
        found = _of_numbers(found, cards)
    return [_accelerator(device) for device in found]


def _accelerator(handle: int) -> Accelerator:
    props = _properties(handle)
    return Accelerator(handle, _text(props.name), min(props.memory_free, props.memory_total))


def _handles() -> list[int]:
    get = ggml_function("ggml_backend_dev_get")
    return [get(i) for i in range(ggml_function("ggml_backend_dev_count")())]


def devices_of_type(*types: int) -> list[int]:
    """The handles of all devices of these types, in ggml's order."""
    type_of = ggml_function("ggml_backend_dev_type")
    return [handle for handle in _handles() if type_of(handle) in types]


def has_gpu() -> bool:
    """True when this llama.cpp build sees an accelerator here (llama_supports_gpu_offload also
    counts plain RPC)."""
    return bool(devices_of_type(GPU, INTEGRATED))


def _of_numbers(handles: list[int], cards: Sequence[int]) -> list[int]:
    """CUDA numbers the fastest card 0 unless it is told otherwise, Vulkan as its loader likes:
    addresses are the same for all. Where a device has none, the order is ggml's."""
    addresses = [_text(_properties(handle).device_id).lower() for handle in handles]
    if all(addresses):
        handles = [handle for _, handle in sorted(zip(addresses, handles, strict=True))]
    if max(cards) >= len(handles):
        raise LoadError(
            f"the plan is for GPU {max(cards)}, and this llama.cpp has {len(handles)} "
            "(counted from 0)"
        )
    return [handles[number] for number in cards]


def _properties(handle: int) -> _Props:
    props = _Props()
    ggml_function("ggml_backend_dev_get_props")(handle, ctypes.byref(props))
    return props


def check_kv(llama: Any, model: Any, spec: LoadSpec, n_ctx: int) -> None:
    """OutOfMemoryError where a layer's K or V cache of `n_ctx` tokens is larger than what an
    accelerator computes with in one piece (Vulkan's storage buffers: 4 GiB on cards, 128 MiB where
    no more is promised). llama.cpp aborts the process then."""
    if spec.n_gpu_layers == 0:
        return
    k_width, v_width = _kv_widths(llama, model)
    caches = ((k_width, spec.kv_type_k), (v_width, spec.kv_type_v))
    n_cells = -(-n_ctx // _CELLS) * _CELLS
    for device in accelerators(spec.placement.cards):
        for width, kind in caches:
            most = _most_cells(device, GGML_TYPES[kind], width, n_cells)
            if most is not None:
                raise OutOfMemoryError(
                    f"not enough room for a context of {n_ctx} tokens: {device.name} computes "
                    "with a KV cache of at most "
                    f"{most} tokens a layer ({kind}); ask for fewer, or for a smaller KV type"
                )


def _kv_widths(llama: Any, model: Any) -> tuple[int, int]:
    """Elements that the first layer's K and V keep for a token; (0, 0) where it keeps none
    (recurrent)."""
    value = llama.llama_model_meta_val_str
    architecture = c_string(value, model, b"general.architecture") or ""
    n_heads = max(1, int(llama.llama_model_n_head(model)))
    usual = int(llama.llama_model_n_embd(model)) // n_heads

    def width(key: str) -> int:
        text = c_string(value, model, f"{architecture}.attention.{key}".encode())
        if text and text.isdigit():
            return int(text) or usual
        return usual

    n_kv_heads = int(llama.llama_model_n_head_kv(model))
    return n_kv_heads * width("key_length"), n_kv_heads * width("value_length")


def _most_cells(device: Accelerator, kind: int, width: int, cells: int) -> int | None:
    """None where the device writes rows into a cache of that many cells, or into none of that type
    at all (then another device does it, slowly); otherwise the most cells it takes."""

    def too_many(n: int) -> bool:
        return not _writes_rows(device, kind, width, n)

    if not width or not too_many(cells) or too_many(_CELLS):
        return None
    sizes = range(_CELLS, cells, _CELLS)
    return _CELLS * bisect(sizes, False, key=too_many)


def _writes_rows(device: Accelerator, kind: int, width: int, cells: int) -> bool:
    """Does the device compute what fills a KV cache of this size? Asked with tensors that have no
    data."""
    tensor = ggml_function("ggml_new_tensor_2d")
    scratch = ggml_function("ggml_init")(GgmlInitParams(_SCRATCH_BYTES, None, True))
    try:
        cache = tensor(scratch, kind, width, cells)
        new = tensor(scratch, GGML_TYPES["f32"], width, 1)
        at = tensor(scratch, _I64, 1, 1)
        rows = ggml_function("ggml_set_rows")(scratch, cache, new, at)
        return bool(ggml_function("ggml_backend_dev_supports_op")(device.handle, rows))
    finally:
        ggml_function("ggml_free")(scratch)


# ggml-backend.h: enum ggml_backend_dev_type
_TYPES = ("cpu", "gpu", "igpu", "accelerator", "meta")
_UNLIMITED = ctypes.c_size_t(-1).value


_CAPABILITIES = ("async", "host_buffer", "buffer_from_host_ptr", "events", "mmap")


class _Caps(ctypes.Structure):
    _fields_ = [(name, ctypes.c_bool) for name in _CAPABILITIES]


class _Props(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("caps", _Caps),
        # what a newer ggml may add must not be written past our end
        ("_later", ctypes.c_char * 64),
    ]


class _Feature(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("value", ctypes.c_char_p)]


def devices() -> dict[str, Any]:
    """Every device of this process's llama.cpp, as the module says. Loads every driver that it was
    compiled for."""
    start_native()
    found: list[dict[str, Any]] = []
    features: dict[str, dict[str, str]] = {}
    for handle in _handles():
        registry = ggml_function("ggml_backend_dev_backend_reg")(handle)
        backend = _text(ggml_function("ggml_backend_reg_name")(registry))
        found.append(_facts(handle, backend))
        if backend not in features:
            features[backend] = _features(registry)
    return {
        "version": bindings_version(),
        "folder": str(Path(bindings().__file__).parent),
        "devices": found,
        "features": features,
        "said": [line for _, line in log.lines if line.strip()],
    }


def _facts(handle: int, backend: str) -> dict[str, Any]:
    """Return one device of the list."""
    props = _properties(handle)
    kind = str(props.type)
    if 0 <= props.type < len(_TYPES):
        kind = _TYPES[props.type]
    buffers = ggml_function("ggml_backend_dev_buffer_type")(handle)
    limit = ggml_function("ggml_backend_buft_get_max_size")(buffers)
    return {
        "name": _text(props.name),
        "description": _text(props.description),
        "backend": backend,
        "type": kind,
        "memory_free_bytes": props.memory_free,
        "memory_total_bytes": props.memory_total,
        "largest_buffer_bytes": None if limit >= _UNLIMITED else limit,
        "id": _text(props.device_id),
        "capabilities": [name for name in _CAPABILITIES if getattr(props.caps, name)],
    }


def _features(registry: int) -> dict[str, str]:
    """What a backend was compiled for, by its own list (CUDA: ARCHS, CPU: AVX2 …); empty where it
    has none."""
    address_of = ggml_function("ggml_backend_reg_get_proc_address")
    address = address_of(registry, b"ggml_backend_get_features")
    if not address:
        return {}
    prototype = ctypes.CFUNCTYPE(ctypes.POINTER(_Feature), ctypes.c_void_p)
    listed = prototype(address)(registry)
    found: dict[str, str] = {}
    for at in count():
        # A feature without a name ends the list.
        if not listed[at].name:
            break
        found[_text(listed[at].name)] = _text(listed[at].value)
    return found


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


def _answers() -> Iterator[dict[str, Any]]:
    yield devices()


if __name__ == "__main__":
    sys.exit(print_answers(_answers))
