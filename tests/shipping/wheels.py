"""Our wheel as an installer gets it: built from a tree, and installed with this environment's
libraries but without our checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Variables that are passed on. All others come from the home that the program is given.
KEPT = ("PATH", "SYSTEMROOT", "TMPDIR", "LANG", "OPENBLAS_CORETYPE")


def built(tree: Path, folder: Path) -> Path:
    """Build the wheel of `tree` in `folder`."""
    hatchling = pytest.importorskip(
        "hatchling", reason="hatchling builds the wheel: pip install hatchling"
    )
    assert hatchling
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def environment(folder: Path, wheel: Path) -> Path:
    """Create an environment in `folder` with `wheel` and this environment's libraries, but without
    our checkout. Return the folder of its programs."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    install(python.parent, wheel)
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
    # These paths come after our wheel in sys.path. The paths of an editable install are .pth files,
    # which Python does not read there.
    behind = [path for path in sys.path if path.endswith("site-packages")]
    (Path(site) / "behind.pth").write_text("\n".join(behind))
    return python.parent


def install(programs: Path, wheel: Path) -> None:
    """Install `wheel` over the version that is there."""
    command = [
        programs / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--upgrade",
        "--no-index",
        "--no-deps",
        wheel,
    ]
    subprocess.run(command, check=True)


def home_environment(home: Path) -> dict[str, str]:
    """Return the environment of a user whose home is `home`."""
    return {name: value for name, value in os.environ.items() if name in KEPT} | {"HOME": str(home)}


def next_version(folder: Path) -> Path:
    """Make a copy of the tree with the version 9.9.9."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in listed.split("\0"):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    changed = {"pyproject.toml": "\nversion = ", "localllm/__init__.py": "\n__version__ = "}
    for name, before in changed.items():
        text = (folder / name).read_text(encoding="utf-8")
        head, found, tail = text.partition(before)
        assert found, name
        (folder / name).write_text(
            f'{head}{before}"9.9.9"\n' + tail.partition("\n")[2], encoding="utf-8"
        )
    return folder
