"""Check that the name `localllm` means this program.

Another distribution installs a package and a command of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from localllm.device.health import HealthCheck

NAME = "localllm"


def name_checks(
    distributions: Iterable[str], command: str | None, prefix: Path
) -> list[HealthCheck]:
    """Check the Python package and the shell command called `localllm`.

    `distributions`: those that installed a package of that name into this Python.
    `command`: the program that the shell starts (None: no such command).
    `prefix`: the folder of this Python, which contains its commands.
    """
    others = sorted(name for name in set(distributions) if name.lower().replace("_", "-") != NAME)
    checks = []
    if others:
        text = f"{' and '.join(others)} installed a package localllm over this one's files"
        fix = f"pip uninstall {' '.join(others)}, then install localllm again"
        checks.append(HealthCheck("name", "error", text, fix))
    else:
        checks.append(HealthCheck("name", "ok", "only this project owns the package name localllm"))
    if command is not None and not _runs_this_python(Path(command).resolve(), prefix.resolve()):
        text = (
            f"`localllm` in this shell starts {command}, "
            "which is another installation or another program with this name"
        )
        fix = f"call {prefix / 'bin' / NAME}, or put its folder first on PATH"
        checks.append(HealthCheck("name", "warning", text, fix))
    return checks


def _runs_this_python(file: Path, prefix: Path) -> bool:
    """True for this Python's command, or for a launcher (pipx, uv tool) whose first line names this
    Python."""
    if prefix in file.parents:
        return True
    try:
        with file.open("rb") as stream:
            first_line = stream.readline(4096).decode(errors="replace")
    except OSError:
        return False
    return first_line.startswith("#!") and str(prefix) in first_line
