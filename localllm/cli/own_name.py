"""Whether the name `localllm` means this program here: another distribution installs a package and
a command of that name."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from localllm.device.health import HealthCheck

_NAME = "localllm"


def name_checks(
    distributions: Callable[[], list[str]] | None = None,
    which: Callable[[str], str | None] = shutil.which,
    prefix: Path | None = None,
) -> list[HealthCheck]:
    """Who else installed a package `localllm` into this Python, and whose command a shell would
    start. The arguments: what importlib.metadata lists, what PATH has, and where this Python's
    commands are."""
    checks = [_package((distributions or _installing)())]
    command = _command(which(_NAME), (prefix or Path(sys.prefix)).resolve())
    return [*checks, command] if command is not None else checks


def _installing() -> list[str]:
    from importlib.metadata import packages_distributions

    return list(packages_distributions().get(_NAME, ()))


def _package(distributions: list[str]) -> HealthCheck:
    others = sorted({d for d in distributions if d.lower().replace("_", "-") != _NAME})
    if not others:
        return HealthCheck("name", "ok", "the package localllm is this one alone")
    said = f"{' and '.join(others)} installed a package localllm over this one's files"
    return HealthCheck(
        "name", "error", said, f"pip uninstall {' '.join(others)}, then install localllm again"
    )


def _command(found: str | None, prefix: Path) -> HealthCheck | None:
    """A warning where the shell starts another program; nothing where it starts this one or, by its
    name alone, none."""
    if found is None:
        return None
    file = Path(found).resolve()
    if prefix in file.parents or _starts_here(file, prefix):
        return None
    said = (
        f"`localllm` in this shell starts {file}, another installation or another program of "
        "that "
        "name"
    )
    return HealthCheck(
        "name", "warning", said, f"call {prefix / 'bin' / _NAME}, or put its folder first on PATH"
    )


def _starts_here(file: Path, prefix: Path) -> bool:
    """True for a launcher (pipx, uv tool) whose first line names this Python."""
    try:
        with file.open("rb") as opened:
            first = opened.readline(4096).decode(errors="replace")
    except OSError:
        return False
    return first.startswith("#!") and str(prefix) in first
