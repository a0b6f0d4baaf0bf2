"""Probe this machine. Probes do I/O and do not interpret the results.

The functions here read a command's output or a file. If a tool is absent, its reading is absent.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

# The environment variable with the folder of llama.cpp's libraries that replaces the one in the
# package llama_cpp.
LIBRARY_VARIABLE = "LLAMA_CPP_LIB_PATH"


def run(*command: str, timeout_s: float = 5.0) -> str:
    """Return stdout of `command`, or "" if it is missing, hangs or cannot start.

    Its exit status is ignored.
    """
    try:
        result = subprocess.run(
            command, capture_output=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return result.stdout.decode("utf-8", "replace")


def read_text(path: str, limit_bytes: int = 1 << 20) -> str | None:
    """Return the first `limit_bytes` of a file as text, or None if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(limit_bytes).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None


def llama_cpp_folder() -> Path | None:
    """Return the library folder of the installed llama_cpp package without importing it.

    Returns None if it is not installed.
    """
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "lib"


def library_folder() -> Path | None:
    """Return the folder of the llama.cpp that a worker would run, or None without one."""
    installed = llama_cpp_folder()
    if installed is None:
        return None
    return folder_in_environment(LIBRARY_VARIABLE) or installed


def folder_in_environment(variable: str) -> Path | None:
    """Return the folder that this environment variable names, or None if it is not set."""
    folder = os.environ.get(variable)
    if not folder:
        return None
    return Path(folder).expanduser()
