"""Our wheel as an installer gets it: built from a tree, installed beside this environment's
libraries and nothing else of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Whatever is not named here comes from the home the program is given.
KEPT = ("PATH", "SYSTEMROOT", "TMPDIR", "LANG", "OPENBLAS_CORETYPE")


def built(tree: Path, folder: Path) -> Path:
    """The wheel of `tree`, in `folder`."""
    hatchling = pytest.importorskip(
        "hatchling", reason="hatchling builds the wheel: pip install hatchling"
    )
    assert hatchling
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def environment(folder: Path, wheel: Path) -> Path:
    """A new environment in `folder` with `wheel`, the libraries of this one behind it, and no
    checkout in sight. Returns where its programs are."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    install(python.parent, wheel)
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
    # Behind our wheel in sys.path; the paths of an editable install are .pth files, which are not
    # read there.
    behind = [path for path in sys.path if path.endswith("site-packages")]
    (Path(site) / "behind.pth").write_text("\n".join(behind))
    return python.parent


def install(programs: Path, wheel: Path) -> None:
    """Install `wheel` in the place of whatever version is there."""
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
    """The environment of a person whose home is `home`."""
    return {name: value for name, value in os.environ.items() if name in KEPT} | {"HOME": str(home)}


def next_version(folder: Path) -> Path:
    """A copy of the tree whose version is 9.9.9."""
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
