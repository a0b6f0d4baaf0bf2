"""llama.cpp's library: start-up once per process, its log (captured, never printed), and calls that
fill a buffer.

The log's text is not an API. All code here treats a missing line as "not known".
"""

from __future__ import annotations

import ctypes
import os
import re
from collections import Counter, deque
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from localllm_backends.contract import LoadError, MemoryReport, UnusableEngineError
from localllm_backends.installed_packages import version
from localllm_backends.llamacpp.binding.engine_files import OTHER_FOLDER
from localllm_backends.llamacpp.binding.layout import check_layout
from localllm_backends.llamacpp.binding.library import Library, open_library

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


def memory_report(buffers: Buffers, weights_bytes: int, projector_bytes: int) -> MemoryReport:
    """Return the bytes of these buffers by purpose, with the given sizes of weights (without
    adapters) and projector."""
    places: Counter[str] = Counter()
    for (place, _), n_bytes in buffers.items():
        places[place] += n_bytes
    return MemoryReport(
        weights_bytes=weights_bytes + purpose_bytes(buffers, "LoRA"),
        kv_bytes=purpose_bytes(buffers, "KV"),
        recurrent_bytes=purpose_bytes(buffers, "RS"),
        compute_bytes=purpose_bytes(buffers, "compute"),
        output_bytes=purpose_bytes(buffers, "output"),
        projector_bytes=projector_bytes,
        places=dict(places),
    )


@cache
def bindings() -> Library:
    """Load llama.cpp's libraries once per process, and make bindings from their headers.

    Raises ModuleNotFoundError if there is no llama.cpp, and UnusableEngineError.
    """
    return open_library()


@cache
def bindings_version() -> str:
    """Return the release of llama-cpp-python, or of the library that is used instead of its own."""
    if os.environ.get(OTHER_FOLDER):
        return bindings().version()
    return version("llama-cpp-python") or ""


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
        llama = bindings()

        @llama.ggml_log_callback  # type: ignore[untyped-decorator]
        def callback(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
            if level != _CONTINUATION_LEVEL:
                self._level = level
            self._partial += text.decode("utf-8", "replace")
            while "\n" in self._partial:
                line, self._partial = self._partial.split("\n", 1)
                self.lines.append((self._level, line))

        self.callback = callback
        llama.llama_log_set(callback, None)

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


@cache
def start_native() -> Library:
    """Initialise llama.cpp once per process and return its bindings. Raises UnusableEngineError."""
    llama = bindings()
    missing = llama.missing("decoding")
    if missing:
        raise UnusableEngineError(
            f"this llama.cpp ({llama.version()}) can't be used: {missing}",
            "localllm setup, or unset LLAMA_CPP_LIB_PATH if it is set",
        )
    check_layout(llama)
    log.install()
    llama.llama_backend_init()
    if not llama.ggml_backend_dev_count():
        # ggml's backends are plugins in this build.
        llama.ggml_backend_load_all_from_path(os.fsencode(llama.folder))
        if not llama.ggml_backend_dev_count():
            llama.ggml_backend_load_all()
    return llama


def ggml_type(kind: str) -> int:
    """Return ggml's number of a type ("q8_0"). Raises LoadError for a type that ggml lacks."""
    number = getattr(bindings(), f"GGML_TYPE_{kind.upper()}", None)
    if number is None:
        raise LoadError(f"llama.cpp has no type {kind}", "choose another one, for example q8_0")
    return int(number)


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
