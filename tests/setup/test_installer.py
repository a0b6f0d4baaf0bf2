"""Packages are installed without pip, and a first setup finds or names a Python. The environments
are real, the programs are stubs."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_ASK = (
    "from localllm.setup import installer; print('\\n'.join(installer.command(['install', "
    "'--target', 'x', 'y'])))"
)


@pytest.fixture
def without_pip(tmp_path: Path) -> Path:
    """An environment as `uv tool install` makes it: our package is importable, pip is not
    installed."""
    folder = tmp_path / "tool"
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "localllm.pth").write_text(str(ROOT))
    return folder / "bin" / "python"


def stub(folder: Path, name: str, script: str) -> Path:
    """Write a program to `folder` that records its arguments and then runs `script`."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f'#!/bin/sh\necho "$@" >> "{folder}/{name}.asked"\n{script}\n')
    program.chmod(0o755)
    return folder


def asked(python: Path, path: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path, "HOME": str(home)}
    return subprocess.run(
        [str(python), "-c", _ASK], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.parametrize("where", ["path", "home"])
def test_uv_installs_into_an_environment_without_pip(
    where: str, without_pip: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    (home / ".local").mkdir(parents=True)
    folder = stub(home / ".local" / "bin" if where == "home" else tmp_path / "bin", "uv", "exit 0")
    done = asked(without_pip, str(folder) if where == "path" else "/nowhere", home)
    assert done.stdout.split("\n") == [
        str(folder / "uv"), "pip", "install", "--python", str(without_pip), "--target", "x", "y",
        "",
    ]  # fmt: skip


@pytest.mark.long
def test_without_uv_the_pip_of_python_is_used(without_pip: Path, tmp_path: Path) -> None:
    done = asked(without_pip, "/nowhere", tmp_path)
    if done.returncode:  # Debian's Python lacks ensurepip without python3-venv
        assert "python3-venv" in done.stderr
        return
    assert done.stdout.split("\n")[:3] == [str(without_pip), "-m", "pip"]
    assert (
        subprocess.run(
            [str(without_pip), "-m", "pip", "--version"], capture_output=True, check=False
        ).returncode
        == 0
    )


def test_an_environment_with_pip_is_installed_with_pip() -> None:
    done = asked(Path(sys.executable), os.environ["PATH"], Path.home())
    assert done.stdout.split("\n")[:3] == [sys.executable, "-m", "pip"]


OLD = 'case "$1" in -c) exit 1;; --version) echo "Python 3.9.6";; esac'


def make(target: str, path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `make` with a PATH that has only the programs in `path` and the system's tools, without
    its Pythons."""
    tools = path / "tools"
    tools.mkdir()
    names = "sh make sed sleep date getconf kill touch awk mkdir dirname cat mktemp rm df"
    for name in names.split():
        found = next(
            (Path(p) / name for p in ("/bin", "/usr/bin") if (Path(p) / name).exists()), None
        )
        if found is not None:
            (tools / name).symlink_to(found)
    environment = {"PATH": f"{path}{os.pathsep}{tools}", "HOME": str(path)}
    command = ["make", f"--file={ROOT / 'Makefile'}", target, f"VENV={path / 'venv'}", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )


def test_a_fresh_macs_python_is_too_old_and_uv_makes_the_environment(tmp_path: Path) -> None:
    folder = stub(stub(tmp_path / "bin", "python3", OLD), "uv", "exit 3")
    done = make("chat", folder)
    assert done.returncode
    assert f"venv --seed --python 3.13 {folder / 'venv'}" in (folder / "uv.asked").read_text()
    assert "uv could not make an environment" in done.stderr


def test_without_uv_installers_that_need_no_homebrew_are_named(tmp_path: Path) -> None:
    done = make("chat", stub(tmp_path / "bin", "python3", OLD))
    assert done.returncode
    assert "Python 3.9.6" in done.stderr
    assert "https://www.python.org/downloads" in done.stderr
    assert "brew" not in done.stderr


def test_the_newest_python_is_found(tmp_path: Path) -> None:
    folder = stub(
        stub(tmp_path / "bin", "python3", OLD),
        "python3.14",
        'case "$1" in -c) exit 0;; esac; exit 4',
    )
    make("chat", folder)
    assert "-m venv" in (folder / "python3.14.asked").read_text()
