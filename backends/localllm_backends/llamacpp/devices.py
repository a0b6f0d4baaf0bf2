"""ggml's devices: their memory, the largest KV tensor each can use, and a program that lists them.

A broken driver may crash or hang the process that loads it. So the list is made by a program:

    python -m localllm_backends.llamacpp.devices        (prints one JSON object)

The fields are ggml's own (ggml-backend.h), with sizes in bytes. `largest_buffer_bytes` is the
largest possible allocation (null if ggml reports no limit). `id` is the PCI address, if the device
has one. `features` lists what each backend was compiled for. `capabilities` has the missing part of
each capability of the library (requirements.py), or "". `said` holds the lines that the backends
logged during device detection; some details of devices appear only there.
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
from localllm_backends.llamacpp.binding.engine_files import package_folder
from localllm_backends.llamacpp.native import (
    bindings,
    bindings_version,
    c_string,
    ggml_type,
    log,
    start_native,
)
from localllm_backends.probe_process import print_answers

_SCRATCH_BYTES = 64 * 1024  # for the descriptions of a few tensors without data
_CELLS = 256  # llama.cpp pads each context to a multiple of this


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device of the loaded library: its handle, ggml's name for it ("Vulkan0") and its free
    bytes.

    With GGML_CUDA_ENABLE_UNIFIED_MEMORY, ggml reports the system's free memory
    (https://github.com/ggml-org/llama.cpp/issues/17536). So the total memory limits the free bytes.
    """

    handle: int
    name: str
    free_bytes: int


def accelerators(cards: Sequence[int] = ()) -> list[Accelerator]:
    """Return the devices for layers: the cards, or the integrated GPU if there is no card.

    That is llama.cpp's own choice. If `cards` is given, only the devices with these indices, in the
    order of PCI addresses, are returned. Raises LoadError if an index does not exist.
    """
    found = devices_of_type("GPU") or devices_of_type("IGPU")
    if cards:
        found = _by_index(found, cards)
    return [_accelerator(device) for device in found]


def _accelerator(handle: int) -> Accelerator:
    props = _properties(handle)
    return Accelerator(handle, _text(props.name), min(props.memory_free, props.memory_total))


def _handles() -> list[int]:
    get = bindings().ggml_backend_dev_get
    return [get(i) for i in range(bindings().ggml_backend_dev_count())]


def devices_of_type(*types: str) -> list[int]:
    """Return the handles of all devices of these types ("CPU", "GPU", "IGPU"), in ggml's order."""
    llama = bindings()
    numbers = [getattr(llama, f"GGML_BACKEND_DEVICE_TYPE_{name}") for name in types]
    return [handle for handle in _handles() if llama.ggml_backend_dev_type(handle) in numbers]


def has_gpu() -> bool:
    """Return whether this llama.cpp build sees an accelerator.

    llama_supports_gpu_offload is not used, because it also counts plain RPC.
    """
    return bool(devices_of_type("GPU", "IGPU"))


def _by_index(handles: list[int], cards: Sequence[int]) -> list[int]:
    """Return the devices with these indices in the order of PCI addresses.

    CUDA gives the fastest card number 0 by default, and Vulkan uses its loader's order, but
    addresses are the same for all. If a device has no address, ggml's order is used.
    """
    addresses = [_text(_properties(handle).device_id).lower() for handle in handles]
    if all(addresses):
        handles = [handle for _, handle in sorted(zip(addresses, handles, strict=True))]
    if max(cards) >= len(handles):
        raise LoadError(
            f"the plan uses GPU {max(cards)}, but this llama.cpp sees only "
            f"{len(handles)} (counted from 0)"
        )
    return [handles[number] for number in cards]


def _properties(handle: int) -> Any:
    props = bindings().ggml_backend_dev_props()
    bindings().ggml_backend_dev_get_props(handle, ctypes.byref(props))
    return props


def check_kv(llama: Any, model: Any, spec: LoadSpec, n_ctx: int) -> None:
    """Check that each layer's K and V cache of `n_ctx` tokens fits into one buffer of an
    accelerator.

    The limit for Vulkan storage buffers is 4 GiB on cards, and 128 MiB if the driver promises no
    more. Raises OutOfMemoryError; llama.cpp would abort the process.
    """
    if spec.n_gpu_layers == 0:
        return
    k_width, v_width = _kv_widths(llama, model)
    caches = ((k_width, spec.kv_type_k), (v_width, spec.kv_type_v))
    n_cells = -(-n_ctx // _CELLS) * _CELLS
    for device in accelerators(spec.placement.cards):
        for width, kind in caches:
            max_cells = _max_cells(device, ggml_type(kind), width, n_cells)
            if max_cells is not None:
                raise OutOfMemoryError(
                    f"not enough memory for a context of {n_ctx} tokens: {device.name} supports "
                    f"a KV cache of at most {max_cells} tokens per layer ({kind}); use a smaller "
                    "context or a smaller KV type"
                )


def _kv_widths(llama: Any, model: Any) -> tuple[int, int]:
    """Return the number of elements per token in the first layer's K and V.

    Returns (0, 0) if the layer has no KV (recurrent).
    """
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


def _max_cells(device: Accelerator, kind: int, width: int, cells: int) -> int | None:
    """Return the largest number of cells that the device supports, or None without such a limit.

    None means that the device can write rows into a cache of `cells` cells. It also means that the
    device does not support the type at all; then another device does the work, slowly.
    """

    def too_many(n: int) -> bool:
        return not _writes_rows(device, kind, width, n)

    if not width or not too_many(cells) or too_many(_CELLS):
        return None
    sizes = range(_CELLS, cells, _CELLS)
    return _CELLS * bisect(sizes, False, key=too_many)


def _writes_rows(device: Accelerator, kind: int, width: int, cells: int) -> bool:
    """Return whether the device can write into a KV cache of this size. Asks with tensors without
    data."""
    llama = bindings()
    tensor = llama.ggml_new_tensor_2d
    scratch = llama.ggml_init(llama.ggml_init_params(_SCRATCH_BYTES, None, True))
    try:
        cache = tensor(scratch, kind, width, cells)
        new = tensor(scratch, llama.GGML_TYPE_F32, width, 1)
        at = tensor(scratch, llama.GGML_TYPE_I64, 1, 1)
        rows = llama.ggml_set_rows(scratch, cache, new, at)
        return bool(llama.ggml_backend_dev_supports_op(device.handle, rows))
    finally:
        llama.ggml_free(scratch)


# ggml-backend.h: enum ggml_backend_dev_type
_TYPES = ("cpu", "gpu", "igpu", "accelerator", "meta")
_UNLIMITED = ctypes.c_size_t(-1).value


def devices() -> dict[str, Any]:
    """Describe every device of this process's llama.cpp; see the module docstring.

    Loads every driver that llama.cpp was compiled for.
    """
    start_native()
    found: list[dict[str, Any]] = []
    features: dict[str, dict[str, str]] = {}
    for handle in _handles():
        registry = bindings().ggml_backend_dev_backend_reg(handle)
        backend = _text(bindings().ggml_backend_reg_name(registry))
        found.append(_facts(handle, backend))
        if backend not in features:
            features[backend] = _features(registry)
    return {
        "version": bindings_version(),
        "folder": str(_folder()),
        "devices": found,
        "features": features,
        "capabilities": bindings().capabilities(),
        "said": [line for _, line in log.lines if line.strip()],
    }


def _folder() -> Path:
    """Return the folder of the package llama_cpp, or of the libraries used instead of its own."""
    llama = bindings()
    package = package_folder()
    if package is not None and llama.folder == package / "lib":
        return package
    return llama.folder


def _facts(handle: int, backend: str) -> dict[str, Any]:
    """Return one entry of the device list."""
    props = _properties(handle)
    kind = str(props.type)
    if 0 <= props.type < len(_TYPES):
        kind = _TYPES[props.type]
    buffers = bindings().ggml_backend_dev_buffer_type(handle)
    limit = bindings().ggml_backend_buft_get_max_size(buffers)
    return {
        "name": _text(props.name),
        "description": _text(props.description),
        "backend": backend,
        "type": kind,
        "memory_free_bytes": props.memory_free,
        "memory_total_bytes": props.memory_total,
        "largest_buffer_bytes": None if limit >= _UNLIMITED else limit,
        "id": _text(props.device_id),
        "capabilities": [name for name, _ in props.caps._fields_ if getattr(props.caps, name)],
    }


def _features(registry: int) -> dict[str, str]:
    """Return what a backend was compiled for, by its own list (CUDA: ARCHS, CPU: AVX2 …).

    Returns an empty dict if the backend has no list.
    """
    address_of = bindings().ggml_backend_reg_get_proc_address
    address = address_of(registry, b"ggml_backend_get_features")
    if not address:
        return {}
    listed = bindings().ggml_backend_get_features_t(address)(registry)
    found: dict[str, str] = {}
    for at in count():
        # The list ends with a feature without a name.
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
