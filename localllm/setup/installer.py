"""Install packages into this environment.

The environment's pip is used, or uv if it has no pip, or the pip included in Python.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from localllm.setup.builds import SetupError


def command(words: Sequence[str]) -> list[str]:
    """Return the command for these `pip` arguments in this environment.

    Environments made by `uv tool install` have no pip, so uv installs into them. In other
    environments, `ensurepip` installs pip. Raises SetupError if that fails.
    """
    if importlib.util.find_spec("pip") is None:
        uv = _uv()
        if uv:
            # uv's pip takes the same arguments.
            return [uv, "pip", words[0], "--python", sys.executable, *words[1:]]
        _install_pip()
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]


def _uv() -> str | None:
    """Find uv on the path or in the folders that its installers use."""
    folders = [
        os.environ.get("PATH", ""),
        str(Path.home() / ".local" / "bin"),
        str(Path.home() / ".cargo" / "bin"),
    ]
    return shutil.which("uv", path=os.pathsep.join(folders))


def _install_pip() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ensurepip", "--default-pip"],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode:
        reason = result.stderr.strip().rpartition("\n")[2] or "ensurepip failed"
        raise SetupError(
            f"this environment has no pip, and Python could not install it: {reason[:300]}",
            hint="install uv (https://docs.astral.sh/uv) or, on Debian, python3-venv; then run "
            "`localllm setup` again",
        )
