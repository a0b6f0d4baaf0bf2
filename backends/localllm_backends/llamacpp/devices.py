"""Asks the loaded llama.cpp which devices it can compute on: the only one who knows what a build will really use.

A driver that is broken may crash or hang whoever loads it, so this is a program of its own; who wants to know runs it:

    python -m localllm_backends.llamacpp.devices        (prints one JSON object)

The fields are ggml's own (ggml-backend.h): sizes in bytes, `largest_buffer_bytes` the most one allocation may have (null
where ggml names no limit), `id` the PCI address where the device has one. `features` is what each backend says it was
compiled for, `said` the lines it logged while it looked for its devices: the only place where some capabilities stand.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from localllm_backends.llamacpp.native import ggml_function
from localllm_backends.llamacpp.native_log import log

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
        ("_later", ctypes.c_char * 64),  # what a newer ggml may add must not be written past our end
    ]


class _Feature(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("value", ctypes.c_char_p)]


def devices() -> dict[str, Any]:
    """Every device of this process's llama.cpp, as the module says. Loads every driver that it was compiled for."""
    import llama_cpp

    log.install()
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    at = ggml_function("ggml_backend_dev_get", pointer, size)
    registry = ggml_function("ggml_backend_dev_backend_reg", pointer, pointer)
    registry_name = ggml_function("ggml_backend_reg_name", ctypes.c_char_p, pointer)
    properties = ggml_function("ggml_backend_dev_get_props", None, pointer, ctypes.POINTER(_Props))
    buffer_type = ggml_function("ggml_backend_dev_buffer_type", pointer, pointer)
    largest = ggml_function("ggml_backend_buft_get_max_size", size, pointer)
    found: list[dict[str, Any]] = []
    features: dict[str, dict[str, str]] = {}
    for index in range(ggml_function("ggml_backend_dev_count", size)()):
        device = at(index)
        props = _Props()
        properties(device, ctypes.byref(props))
        backend = _text(registry_name(registry(device)))
        limit = largest(buffer_type(device))
        found.append(
            {
                "name": _text(props.name),
                "description": _text(props.description),
                "backend": backend,
                "type": _TYPES[props.type] if 0 <= props.type < len(_TYPES) else str(props.type),
                "memory_free_bytes": props.memory_free,
                "memory_total_bytes": props.memory_total,
                "largest_buffer_bytes": None if limit >= _UNLIMITED else limit,
                "id": _text(props.device_id),
                "capabilities": [name for name in _CAPABILITIES if getattr(props.caps, name)],
            }
        )
        if backend not in features:
            features[backend] = _features(registry(device))
    return {
        "version": str(llama_cpp.__version__),
        "folder": str(Path(llama_cpp.__file__).parent),
        "devices": found,
        "features": features,
        "said": [line for _, line in log.lines if line.strip()],
    }


def _features(registry: int) -> dict[str, str]:
    """What a backend was compiled for, by its own list (CUDA: ARCHS, CPU: AVX2 …); empty where it has none."""
    ask = ggml_function("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    address = ask(registry, b"ggml_backend_get_features")
    if not address:
        return {}
    listed = ctypes.CFUNCTYPE(ctypes.POINTER(_Feature), ctypes.c_void_p)(address)(registry)
    found: dict[str, str] = {}
    index = 0
    while listed and listed[index].name:
        found[_text(listed[index].name)] = _text(listed[index].value)
        index += 1
    return found


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


def _main() -> int:
    try:
        answer = devices()
    except (ImportError, OSError, RuntimeError, AttributeError) as e:
        # The bindings load the library, and look up every symbol of it, while they are imported.
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
