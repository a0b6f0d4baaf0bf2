"""The door to llama.cpp: started once per process, and the calls that fill a buffer or ask about this machine."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from localllm_backends.llamacpp.native_log import log

# ggml.h: enum ggml_type
GGML_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip

# ggml-backend.h: enum ggml_backend_dev_type
_GGML_DEVICE_GPU, _GGML_DEVICE_IGPU = 1, 2
_started = False


def start_native() -> Any:
    """Initialise llama.cpp once per process and return the bindings module."""
    global _started
    import llama_cpp

    log.install()
    if not _started:
        llama_cpp.llama_backend_init()
        _started = True
    return llama_cpp


def usable_cores() -> int:
    """Physical cores this process may run on: more threads than that slow decode down."""
    import psutil

    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, min(affinity, psutil.cpu_count(logical=False) or affinity))


def has_gpu() -> bool:
    """True when this llama.cpp build sees an accelerator here (llama_supports_gpu_offload also counts plain RPC)."""
    from llama_cpp._ggml import libggml

    find = libggml.ggml_backend_dev_by_type
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_int]
    return any(find(kind) for kind in (_GGML_DEVICE_GPU, _GGML_DEVICE_IGPU))


def token_piece(llama: Any, vocab: Any, token: int, *, special: bool) -> bytes:
    """The bytes of one token."""
    size = 64
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = llama.llama_token_to_piece(vocab, token, buffer, size, 0, special)
        if n >= 0:
            return bytes(buffer.raw[:n])
        size = -n


def c_string(function: Any, *args: Any, size: int = 2048) -> str | None:
    """Call one of llama.cpp's fill-this-buffer functions; grows the buffer when told it is too small."""
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = function(*args, buffer, size)
        if n < 0:
            return None
        if n < size:
            return buffer.value.decode("utf-8", "replace")
        size = n + 1


def cause(default: str) -> str:
    """Why llama.cpp refused the last load, in its own words; `default` where it said nothing."""
    lines = log.errors()
    useful = [line for line in lines if "failed to load model" not in line and "error loading model" not in line]
    loading = [line.split("error loading model:", 1)[1].strip() for line in lines if "error loading model:" in line]
    return "; ".join(dict.fromkeys((loading or useful)[:2])) or default
