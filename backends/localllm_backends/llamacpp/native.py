"""The door to llama.cpp: started once per process, and the calls that fill a buffer or ask about this machine."""

from __future__ import annotations

import ctypes
from typing import Any

from localllm_backends.llamacpp.native_log import log

# ggml.h: enum ggml_type
GGML_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip

# ggml-backend.h: enum ggml_backend_dev_type
_GGML_DEVICE_GPU, _GGML_DEVICE_IGPU = 1, 2
# A list of devices that ends where it begins.
_NO_DEVICES = (ctypes.c_void_p * 1)()
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


def ggml_function(name: str, result: Any, *arguments: Any) -> Any:
    """ggml's function `name`, of the very library that llama.cpp runs on. The bindings' own handle on ggml may be of another
    copy (a wheel holds `libggml.so` and `libggml.so.0`, `LLAMA_CPP_LIB_PATH` names a foreign build) that knows no device."""
    from llama_cpp import llama_cpp

    try:
        # A library's handle finds what it is linked to as well.
        function = llama_cpp._lib[name]
    except AttributeError:
        # Not on Windows, where there is one copy under each name.
        from llama_cpp._ggml import libggml

        function = libggml[name]
    function.restype, function.argtypes = result, list(arguments)
    return function


def has_gpu() -> bool:
    """True when this llama.cpp build sees an accelerator here (llama_supports_gpu_offload also counts plain RPC)."""
    find = ggml_function("ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)
    return any(find(kind) for kind in (_GGML_DEVICE_GPU, _GGML_DEVICE_IGPU))


def offload(params: Any, n_gpu_layers: int) -> None:
    """Have model parameters put that many layers on the accelerators, all for a negative number. For 0 the model is given no
    device at all: it would otherwise hold memory on each, and large products of the CPU's layers would be sent there."""
    params.n_gpu_layers = n_gpu_layers if n_gpu_layers >= 0 else 999
    if not n_gpu_layers:
        params.devices = ctypes.addressof(_NO_DEVICES)


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
