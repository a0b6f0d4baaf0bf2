"""Writes and removes a manager's files, and runs its programs: all the I/O of this room."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from localllm.service.types import CommandResult, ServiceError

_NOT_INSTALLED = 127
# A restart waits for the server to write what it knows (systemd.py: TimeoutStopSec).
_LONGEST_S = 90


def call(command: Sequence[str]) -> CommandResult:
    """Run `command` and wait for it; code 127 where there is no such program. Raises ServiceError when it hangs."""
    try:
        done = subprocess.run(
            list(command), capture_output=True, text=True, errors="replace", timeout=_LONGEST_S, check=False
        )
    except FileNotFoundError:
        return CommandResult(_NOT_INSTALLED, "", f"{command[0]} is not installed")
    except subprocess.TimeoutExpired as e:
        raise ServiceError(f"`{' '.join(command)}` did not answer in {_LONGEST_S} s") from e
    return CommandResult(done.returncode, done.stdout, done.stderr)


def write_all(files: Mapping[Path, str], encoding: str = "utf-8") -> list[Path]:
    """Write each text to its file, another text there moved to `.bak`; returns those that changed. Raises ServiceError."""
    changed = []
    for path, text in files.items():
        try:
            if path.exists():
                if path.read_bytes() == text.encode(encoding):
                    continue
                shutil.copy2(path, path.with_name(path.name + ".bak"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode(encoding))
        except OSError as e:
            raise ServiceError(f"{path} can't be written: {e.strerror}") from e
        changed.append(path)
    return changed


def remove_all(paths: Sequence[Path]) -> list[Path]:
    """Remove those of `paths` that are there; returns them. Raises ServiceError."""
    gone = []
    for path in paths:
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        except OSError as e:
            raise ServiceError(f"{path} can't be removed: {e.strerror}") from e
        gone.append(path)
    return gone
