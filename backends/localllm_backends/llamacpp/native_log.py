"""What llama.cpp says while it works: captured, never printed, and read for causes of errors and sizes of buffers.

The log's text is not an API: every reader here treats a line it does not find as "not known".
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter, deque
from dataclasses import dataclass, field, fields
from typing import Any

_MIB = 2**20
_BUFFER = re.compile(r"(\S+)\s+(KV|RS|compute|output|model)\s+buffer size\s*=\s*([0-9.]+)\s*MiB")
_ERROR_LEVEL = 4
_CONTINUATION_LEVEL = 5


@dataclass
class BufferSizes:
    """Bytes llama.cpp said it allocated, by purpose (its log prints MiB with two decimals).

    `places`: all of them again, by the name of the memory they are in.
    """

    kv_bytes: int = 0
    recurrent_bytes: int = 0
    compute_bytes: int = 0
    output_bytes: int = 0
    model_bytes: int = 0
    places: Counter[str] = field(default_factory=Counter)

    def plus(self, other: BufferSizes) -> BufferSizes:
        """The sums, purpose by purpose and place by place."""
        return BufferSizes(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass
class NativeLog:
    """Collects llama.cpp's log lines; install once per process, before anything is loaded."""

    lines: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=100_000))
    _callback: Any = None
    _partial: str = ""
    _level: int = 0

    def install(self) -> None:
        """Take over llama.cpp's log callback."""
        import llama_cpp

        if self._callback is not None:
            return

        @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
        def callback(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
            if level != _CONTINUATION_LEVEL:
                self._level = level
            self._partial += text.decode("utf-8", "replace")
            while "\n" in self._partial:
                line, self._partial = self._partial.split("\n", 1)
                self.lines.append((self._level, line))

        self._callback = callback
        llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))

    @property
    def callback(self) -> Any:
        """What llama.cpp's other libraries are told to write to."""
        return self._callback

    def mark(self) -> None:
        """Forget what was said so far."""
        self.lines.clear()
        self._partial = ""

    def errors(self) -> list[str]:
        """Error lines since the mark, without llama.cpp's function-name prefixes."""
        return [_strip(line) for level, line in self.lines if level >= _ERROR_LEVEL and line.strip()]

    def buffer_sizes(self) -> BufferSizes:
        """Sums of the buffers named since the mark."""
        sizes = BufferSizes()
        names = {
            "KV": "kv_bytes",
            "RS": "recurrent_bytes",
            "compute": "compute_bytes",
            "output": "output_bytes",
            "model": "model_bytes",
        }
        for _, line in self.lines:
            match = _BUFFER.search(line)
            if match:
                name, n_bytes = names[match.group(2)], round(float(match.group(3)) * _MIB)
                setattr(sizes, name, getattr(sizes, name) + n_bytes)
                sizes.places[match.group(1)] += n_bytes
        return sizes


def _strip(line: str) -> str:
    return re.sub(r"^[a-z_0-9:~]+:\s+", "", line.strip())


log = NativeLog()
