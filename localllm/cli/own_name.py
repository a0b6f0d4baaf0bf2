"""Whether the name `localllm` means this program here: another distribution installs a package and
a command of that name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from localllm.device.health import HealthCheck

NAME = "localllm"


def name_checks(
    distributions: Iterable[str], command: str | None, prefix: Path
) -> list[HealthCheck]:
    """Who else installed a package `localllm` into this Python (`distributions` that have one), and
    a warning where the shell starts another program (`command`, None for none) than the one of this
    Python, whose commands are below `prefix`."""
    others = sorted(d for d in set(distributions) if d.lower().replace("_", "-") != NAME)
    checks = []
    if others:
        text = f"{' and '.join(others)} installed a package localllm over this one's files"
        fix = f"pip uninstall {' '.join(others)}, then install localllm again"
        checks.append(HealthCheck("name", "error", text, fix))
    else:
        checks.append(HealthCheck("name", "ok", "the package localllm is this one alone"))
    if command is not None and not _starts_here(Path(command).resolve(), prefix.resolve()):
        text = (
            f"`localllm` in this shell starts {command}, "
            "another installation or another program of that name"
        )
        fix = f"call {prefix / 'bin' / NAME}, or put its folder first on PATH"
        checks.append(HealthCheck("name", "warning", text, fix))
    return checks


def _starts_here(file: Path, prefix: Path) -> bool:
    """True for this Python's command, and for a launcher (pipx, uv tool) whose first line names
    this Python."""
    if prefix in file.parents:
        return True
    try:
        with file.open("rb") as opened:
            first = opened.readline(4096).decode(errors="replace")
    except OSError:
        return False
    return first.startswith("#!") and str(prefix) in first
