"""llama.cpp's library: started once per process, its log (captured, never printed), and small calls
that fill a buffer.

The log's text is not an API: every reader here treats a line it does not find as "not known".
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

# CUDA counts the fastest card first, the driver's tools by PCI address. Plans name cards as the
# tools do; read when the library starts, in whichever process that is.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")

_MIB = 2**20
_BUFFER = re.compile(
    r"(\S+)\s+(KV|RS|compute|output|model|LoRA)\s+buffer size\s*=\s*([0-9.]+)\s*MiB"
)
_ERROR_LEVEL = 4
_CONTINUATION_LEVEL = 5


# Bytes that llama.cpp said it allocated (its log prints MiB with two decimals), by the name of the
# memory they are in and by purpose, in its own words.
Buffers: TypeAlias = Counter[tuple[str, str]]


def purpose_bytes(buffers: Buffers, purpose: str) -> int:
    """What all memories hold for one purpose: "KV", "RS" (recurrent states), "compute", "output",
    "model" or "LoRA"."""
    return sum(n_bytes for (_, kind), n_bytes in buffers.items() if kind == purpose)


@cache
def bindings(part: str = "llama_cpp") -> Any:
    """A low-level module of llama-cpp-python. The package's face above it (templates, grammars, a
    class for one sequence) is not read: nobody here uses it, and it takes as long as loading a small
    model. Raises ImportError."""
    beside = sys.modules.get("llama_cpp")
    if beside is None:
        found = importlib.util.find_spec("llama_cpp")
        if found is None:
            raise ModuleNotFoundError("llama-cpp-python is not installed", name="llama_cpp")
        sys.modules["llama_cpp"] = importlib.util.module_from_spec(found)
    try:
        return importlib.import_module(f"llama_cpp.{part}")
    finally:
        if beside is None:
            # Who imports the package itself reads all of it.
            del sys.modules["llama_cpp"]


@cache
def bindings_version() -> str:
    """The release of llama-cpp-python."""
    return importlib.metadata.version("llama-cpp-python")


def library_path(name: str) -> Path | None:
    """A library of the build of llama.cpp that runs here; None where it was built without. Loads
    nothing."""
    own = importlib.util.find_spec("llama_cpp")
    if own is None:
        return None
    other = os.environ.get("LLAMA_CPP_LIB_PATH")
    if other:
        folder = Path(other)
    else:
        folder = Path(str(own.origin)).parent / "lib"
    files = folder.glob(f"*{name}.*")
    return next((file for file in files if file.suffix in (".so", ".dylib", ".dll")), None)


def mappings() -> list[tuple[int, int, str]]:
    """(start, stop, file) of the files that are mapped into this process; none where that can't be
    read."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = (re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s+(/.*)", line) for line in lines)
    return [(int(match[1], 16), int(match[2], 16), match[3]) for match in found if match]


@dataclass
class NativeLog:
    """Collects llama.cpp's log lines; install once per process, before anything is loaded."""

    lines: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=100_000))
    # What llama.cpp's other libraries are told to write to.
    callback: Any = None
    _partial: str = ""
    _level: int = 0

    def install(self) -> None:
        """Take over llama.cpp's log callback."""
        llama_cpp = bindings()

        @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
        def callback(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
            if level != _CONTINUATION_LEVEL:
                self._level = level
            self._partial += text.decode("utf-8", "replace")
            while "\n" in self._partial:
                line, self._partial = self._partial.split("\n", 1)
                self.lines.append((self._level, line))

        self.callback = callback
        llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))

    def mark(self) -> None:
        self.lines.clear()
        self._partial = ""

    def reason(self, default: str = "llama.cpp gave no reason") -> str:
        """Why the last call failed, by the last errors it logged since the mark; `default` where it
        said nothing."""
        # Without llama.cpp's names of functions.
        said = [
            re.sub(r"^[a-z_0-9:~]+:\s+", "", line.strip())
            for level, line in self.lines
            if level >= _ERROR_LEVEL and line.strip()
        ]
        lines = [
            line.removeprefix("error loading model: ")
            for line in said
            if "failed to load model" not in line
        ]
        return "; ".join(dict.fromkeys(lines[-2:])) or default

    def buffers(self) -> Buffers:
        """The buffers named since the mark."""
        found: Buffers = Counter()
        for _, line in self.lines:
            # Most lines are of the header's entries: to search them all takes as long as a small
            # model's weights.
            if "buffer size" in line:
                match = _BUFFER.search(line)
            else:
                match = None
            if match:
                found[match[1], match[2]] += round(float(match[3]) * _MIB)
        return found


log = NativeLog()


# ggml.h: enum ggml_type
GGML_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20,
    "bf16": 30,
}  # fmt: skip


class GgmlInitParams(ctypes.Structure):
    """ggml.h: struct ggml_init_params."""

    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


class GgufInitParams(ctypes.Structure):
    """gguf.h: struct gguf_init_params."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


@cache
def start_native() -> Any:
    """Initialise llama.cpp once per process and return the bindings module."""
    log.install()
    bindings().llama_backend_init()
    return bindings()


_POINTER, _TEXT, _INT, _SIZE, _LONG, _BOOL = (
    ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_int64, ctypes.c_bool,
)  # fmt: skip
# ggml.h, ggml-backend.h, gguf.h: what each function returns, and what it takes. Structures go by
# their address.
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "gguf_init_from_file": (_POINTER, [_TEXT, GgufInitParams]),
    "gguf_free": (None, [_POINTER]),
    "gguf_find_key": (_LONG, [_POINTER, _TEXT]),
    "gguf_find_tensor": (_LONG, [_POINTER, _TEXT]),
    "gguf_get_kv_type": (_INT, [_POINTER, _LONG]),
    "gguf_get_arr_type": (_INT, [_POINTER, _LONG]),
    "gguf_get_arr_n": (_SIZE, [_POINTER, _LONG]),
    "gguf_get_val_str": (_TEXT, [_POINTER, _LONG]),
    "gguf_get_val_data": (_POINTER, [_POINTER, _LONG]),
    "gguf_get_arr_data": (_POINTER, [_POINTER, _LONG]),
    "ggml_init": (_POINTER, [GgmlInitParams]),
    "ggml_free": (None, [_POINTER]),
    "ggml_type_name": (_TEXT, [_INT]),
    "ggml_nbytes": (_SIZE, [_POINTER]),
    "ggml_nelements": (_LONG, [_POINTER]),
    "ggml_new_tensor_2d": (_POINTER, [_POINTER, _INT, _LONG, _LONG]),
    "ggml_new_tensor_3d": (_POINTER, [_POINTER, _INT, _LONG, _LONG, _LONG]),
    "ggml_reshape_2d": (_POINTER, [_POINTER, _POINTER, _LONG, _LONG]),
    "ggml_get_rows": (_POINTER, [_POINTER] * 3),
    "ggml_set_rows": (_POINTER, [_POINTER] * 4),
    "ggml_cont": (_POINTER, [_POINTER] * 2),
    "ggml_soft_max": (_POINTER, [_POINTER] * 2),
    "ggml_mul_mat": (_POINTER, [_POINTER] * 3),
    "ggml_mul_mat_id": (_POINTER, [_POINTER] * 4),
    "ggml_set_output": (None, [_POINTER]),
    "ggml_new_graph": (_POINTER, [_POINTER]),
    "ggml_build_forward_expand": (None, [_POINTER] * 2),
    "ggml_backend_register": (None, [_POINTER]),
    "ggml_backend_dev_count": (_SIZE, []),
    "ggml_backend_dev_get": (_POINTER, [_SIZE]),
    "ggml_backend_dev_by_type": (_POINTER, [_INT]),
    "ggml_backend_dev_type": (_INT, [_POINTER]),
    "ggml_backend_dev_get_props": (None, [_POINTER] * 2),
    "ggml_backend_dev_buffer_type": (_POINTER, [_POINTER]),
    "ggml_backend_dev_supports_op": (_BOOL, [_POINTER] * 2),
    "ggml_backend_dev_init": (_POINTER, [_POINTER, _TEXT]),
    "ggml_backend_dev_backend_reg": (_POINTER, [_POINTER]),
    "ggml_backend_reg_name": (_TEXT, [_POINTER]),
    "ggml_backend_reg_get_proc_address": (_POINTER, [_POINTER, _TEXT]),
    "ggml_backend_buft_get_max_size": (_SIZE, [_POINTER]),
    "ggml_backend_buffer_free": (None, [_POINTER]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_POINTER, [_POINTER] * 2),
    "ggml_backend_graph_compute": (_INT, [_POINTER] * 2),
    "ggml_backend_tensor_get": (None, [_POINTER, _POINTER, _SIZE, _SIZE]),
    "ggml_backend_tensor_set": (None, [_POINTER, _TEXT, _SIZE, _SIZE]),
}


@cache
def ggml_function(name: str) -> Any:
    """ggml's function `name`, of the very library that llama.cpp runs on. The bindings' own handle
    on ggml may be of another copy (a wheel holds `libggml.so` and `libggml.so.0`,
    `LLAMA_CPP_LIB_PATH` names a foreign build) that knows no device."""
    try:
        # A library's handle finds what it is linked to as well.
        function = bindings()._lib[name]
    except AttributeError:
        # Not on Windows, where there is one copy under each name.
        function = bindings("_ggml").libggml[name]
    function.restype, function.argtypes = _SIGNATURES[name]
    return function


def c_string(function: Any, *args: Any, size: int = 2048) -> str | None:
    """Call one of llama.cpp's fill-this-buffer functions; grows the buffer when told it is too
    small."""
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = function(*args, buffer, size)
        if n < 0:
            return None
        if n < size:
            return buffer.value.decode("utf-8", "replace")
        size = n + 1
