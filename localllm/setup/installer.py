"""How packages get into this environment: by its pip, by uv where it has none, or by the pip that
Python itself brings."""

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
    """The command that does what `pip` would with these words, in this environment. Raises
    SetupError where there is none.

    The environments of `uv tool install` have no pip, and uv installs into them. Elsewhere
    `ensurepip` brings one.
    """
    if importlib.util.find_spec("pip") is None:
        uv = _uv()
        if uv:
            # Its pip takes the same words.
            return [uv, "pip", words[0], "--python", sys.executable, *words[1:]]
        _bring_pip()
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]


def _uv() -> str | None:
    """uv, in the folders that its installers use as well."""
    folders = [
        os.environ.get("PATH", ""),
        str(Path.home() / ".local" / "bin"),
        str(Path.home() / ".cargo" / "bin"),
    ]
    return shutil.which("uv", path=os.pathsep.join(folders))


def _bring_pip() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ensurepip", "--default-pip"],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2] or "ensurepip failed"
        raise SetupError(
            f"this environment has no pip, and Python brings none: {said[:300]}",
            hint="install uv (https://docs.astral.sh/uv) or, on Debian, python3-venv; then run "
            "`localllm setup` again",
        )
