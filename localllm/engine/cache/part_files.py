"""Names of incomplete files in a folder of cached prefixes, and their removal.

Each process has names of its own, because several servers may write the same file.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from pathlib import Path

import psutil

from localllm.engine.cache import tunables
from localllm.paths import regular_files


def machine_name() -> str:
    """This machine's name, as part of a file's name."""
    return re.sub(r"[^\w-]", "", platform.node()) or "machine"


def part_of(path: Path) -> Path:
    """The name under which this process writes the file `path`."""
    return path.with_suffix(f".{machine_name()}.{os.getpid()}.part")


def remove_parts(folder: Path) -> None:
    """Remove incomplete files of processes that have ended. Those of other machines are removed
    once they are old."""
    for path in regular_files(folder, "*.part"):
        with contextlib.suppress(OSError):
            _, _, owner = path.stem.partition(".")
            machine, _, pid = owner.rpartition(".")
            is_old = time.time() - path.stat().st_mtime > tunables.PART_UNUSED_S
            has_ended = False
            if machine == machine_name() and pid.isdigit():
                # This process has just started, so it does not write yet.
                has_ended = int(pid) == os.getpid() or not psutil.pid_exists(int(pid))
            if not owner or is_old or has_ended:
                path.unlink(missing_ok=True)
