"""Measure the cost of reading one header in a process of its own: CPU seconds, and additional bytes
of memory (Linux)."""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

from localllm_catalog import gguf
from localllm_catalog.errors import BadHeaderError

PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def peak_bytes() -> int:
    (peak_kb,) = PEAK.findall(Path("/proc/self/status").read_text())
    return int(peak_kb) * 1024


before_bytes, started_s = peak_bytes(), time.process_time()
with suppress(BadHeaderError):
    gguf.read(sys.argv[1])
print(json.dumps([time.process_time() - started_s, peak_bytes() - before_bytes]))
