"""llama.cpp's library: start-up once per process, its log (captured, never printed), and calls that
fill a buffer.

The log's text is not an API. All code here treats a missing line as "not known".
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections import Counter, deque
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

# CUDA numbers the fastest card first; the driver's tools go by PCI address. Plans use the tools'
# order. CUDA reads this variable when the library starts, so it is set in every process.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")

_MIB = 2**20
_BUFFER = re.compile(
    r"(\S+)\s+(KV|RS|compute|output|model|LoRA)\s+buffer size\s*=\s*([0-9.]+)\s*MiB"
)
_ERROR_LEVEL = 4
_CONTINUATION_LEVEL = 5


# Bytes that llama.cpp logged as allocated (MiB with two decimals), by its names of the memory and
# the purpose.
Buffers: TypeAlias = Counter[tuple[str, str]]


def purpose_bytes(buffers: Buffers, purpose: str) -> int:
    """Return the bytes of one purpose in all memories.

    Purposes are "KV", "RS" (recurrent states), "compute", "output", "model" and "LoRA".
    """
    return sum(n_bytes for (_, kind), n_bytes in buffers.items() if kind == purpose)


@cache
def bindings(part: str = "llama_cpp") -> Any:
    """Import a low-level module of llama-cpp-python. Raises ImportError.

    The package's high-level part (templates, grammars, a class for one sequence) is not imported:
    it is not used here and takes as long as loading a small model.
    """
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
            # A later import of the package itself then loads all of it.
            del sys.modules["llama_cpp"]


@cache
def bindings_version() -> str:
    """Return the release of llama-cpp-python."""
    return importlib.metadata.version("llama-cpp-python")


def library_path(name: str) -> Path | None:
    """Return the path of a library of the llama.cpp build in use; None if it was built without it.

    Loads no library.
    """
    own = importlib.util.find_spec("llama_cpp")
    if own is None:
        return None
    folder = Path(str(own.origin)).parent / "lib"
    other = os.environ.get("LLAMA_CPP_LIB_PATH")
    if other:
        folder = Path(other)
    files = folder.glob(f"*{name}.*")
    return next((file for file in files if file.suffix in (".so", ".dylib", ".dll")), None)


def mappings() -> list[tuple[int, int, str]]:
    """Return (start, stop, file) of the files mapped into this process; [] if that can't be
    read."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s+(/.*)", line)
        if match:
            found.append((int(match[1], 16), int(match[2], 16), match[3]))
    return found


class NativeLog:
    """Collects llama.cpp's log lines. Install it once per process, before loading a model."""

    def __init__(self) -> None:
        self.lines: deque[tuple[int, str]] = deque(maxlen=100_000)
        # The callback for llama.cpp's other libraries.
        self.callback: Any = None
        self._partial = ""
        self._level = 0

    def install(self) -> None:
        """Set llama.cpp's log callback."""
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
        """Return why the last call failed: the last errors that were logged since the mark.

        Returns `default` if there are no logged errors.
        """
        reasons = []
        for level, line in self.lines:
            if level < _ERROR_LEVEL or not line.strip():
                continue
            # Remove llama.cpp's function names.
            reason = re.sub(r"^[a-z_0-9:~]+:\s+", "", line.strip())
            if "failed to load model" not in reason:
                reasons.append(reason.removeprefix("error loading model: "))
        last = dict.fromkeys(reasons[-2:])
        return "; ".join(last) or default

    def buffers(self) -> Buffers:
        """Return the buffers that were logged since the mark."""
        found: Buffers = Counter()
        for _, line in self.lines:
            # Most lines list header entries. Searching all of them takes as long as loading the
            # weights of a small model.
            match = _BUFFER.search(line) if "buffer size" in line else None
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


_C_TYPES: dict[str, Any] = {
    "void": None,
    "pointer": ctypes.c_void_p,
    "text": ctypes.c_char_p,
    "int": ctypes.c_int,
    "size": ctypes.c_size_t,
    "int64": ctypes.c_int64,
    "bool": ctypes.c_bool,
    "ggml_init_params": GgmlInitParams,
    "gguf_init_params": GgufInitParams,
}
# ggml.h, ggml-backend.h, gguf.h: function, result, arguments. Structures are passed by address.
_SIGNATURES = """
gguf_init_from_file pointer text gguf_init_params
gguf_free void pointer
gguf_find_key int64 pointer text
gguf_find_tensor int64 pointer text
gguf_get_kv_type int pointer int64
gguf_get_arr_type int pointer int64
gguf_get_arr_n size pointer int64
gguf_get_val_str text pointer int64
gguf_get_val_data pointer pointer int64
gguf_get_arr_data pointer pointer int64
ggml_init pointer ggml_init_params
ggml_free void pointer
ggml_type_name text int
ggml_nbytes size pointer
ggml_nelements int64 pointer
ggml_new_tensor_2d pointer pointer int int64 int64
ggml_new_tensor_3d pointer pointer int int64 int64 int64
ggml_reshape_2d pointer pointer pointer int64 int64
ggml_get_rows pointer pointer pointer pointer
ggml_set_rows pointer pointer pointer pointer pointer
ggml_cont pointer pointer pointer
ggml_soft_max pointer pointer pointer
ggml_mul_mat pointer pointer pointer pointer
ggml_mul_mat_id pointer pointer pointer pointer pointer
ggml_set_output void pointer
ggml_new_graph pointer pointer
ggml_build_forward_expand void pointer pointer
ggml_backend_register void pointer
ggml_backend_dev_count size
ggml_backend_dev_get pointer size
ggml_backend_dev_by_type pointer int
ggml_backend_dev_type int pointer
ggml_backend_dev_get_props void pointer pointer
ggml_backend_dev_buffer_type pointer pointer
ggml_backend_dev_supports_op bool pointer pointer
ggml_backend_dev_init pointer pointer text
ggml_backend_dev_backend_reg pointer pointer
ggml_backend_reg_name text pointer
ggml_backend_reg_get_proc_address pointer pointer text
ggml_backend_buft_get_max_size size pointer
ggml_backend_buffer_free void pointer
ggml_backend_alloc_ctx_tensors_from_buft pointer pointer pointer
ggml_backend_graph_compute int pointer pointer
ggml_backend_tensor_get void pointer pointer size size
ggml_backend_tensor_set void pointer text size size
"""


@cache
def _signatures() -> dict[str, tuple[Any, list[Any]]]:
    """Return the types of each function's result and arguments."""
    found = {}
    for line in _SIGNATURES.strip().splitlines():
        name, result, *arguments = line.split()
        found[name] = (_C_TYPES[result], [_C_TYPES[kind] for kind in arguments])
    return found


@cache
def ggml_function(name: str) -> Any:
    """Return ggml's function `name` from the library that llama.cpp uses.

    The bindings' own ggml handle may belong to another copy without devices: a wheel holds
    `libggml.so` and `libggml.so.0`, and `LLAMA_CPP_LIB_PATH` may name a foreign build.
    """
    try:
        # A library's handle also finds the symbols of libraries it is linked to.
        function = bindings()._lib[name]
    except AttributeError:
        # Not on Windows, but there is only one copy there.
        function = bindings("_ggml").libggml[name]
    function.restype, function.argtypes = _signatures()[name]
    return function


def c_string(function: Any, *args: Any, size: int = 2048) -> str | None:
    """Call a llama.cpp function that fills a buffer, with a larger buffer if it was too small."""
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = function(*args, buffer, size)
        if n < 0:
            return None
        if n < size:
            return buffer.value.decode("utf-8", "replace")
        size = n + 1
