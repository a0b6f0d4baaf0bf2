"""All that asks this machine anything: I/O and no judgement. Here, a command's output or a file: an
absent tool is an absent reading."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path


def run(*command: str, timeout_s: float = 5.0) -> str:
    """What `command` printed on stdout, "" if it is missing, hangs or cannot start (its exit status
    is ignored)."""
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace")


def read_text(path: str, limit_bytes: int = 1 << 20) -> str | None:
    """The first `limit_bytes` of a file as text, None if it can't be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(limit_bytes).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None


def llama_cpp_folder() -> Path | None:
    """Where the installed llama_cpp package has its libraries, without importing it; None if it is
    not installed."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "lib"
