"""The first minutes on a machine that lacks something: each ends in an answer, or in words that say
what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LOCALLLM = [sys.executable, "-m", "localllm"]


def run(
    *words: str, before: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, *LOCALLLM, *words], env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120, cwd=environment.get("HOME"),
    )  # fmt: skip


def test_where_nothing_can_be_written_a_model_answers_all_the_same(
    few_layers: Path, tmp_path: Path
) -> None:
    """As on a full disk or a read-only one, and for root too: the folders would lie within a
    file."""
    home = tmp_path / "Größe und Maß"
    home.mkdir()
    shutil.copy(few_layers, home / "mein Modell-Q4_1.gguf")
    (home / "eine Datei").write_text("")
    within = {
        f"LOCALLLM_{kind}_DIR": str(home / "eine Datei" / kind) for kind in ("DATA", "CACHE", "LOG")
    }
    done = run(
        "chat", "-m", "mein Modell-Q4_1.gguf", "--max-tokens", "2", "hi", HOME=str(home), **within
    )
    assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("unshare") is None, reason="needs Linux's unshare"
)
def test_a_namespace_without_loopback_is_called_one(few_layers: Path) -> None:
    apart = ("unshare", "--map-root-user", "--net")
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    done = run("chat", "-m", str(few_layers), "hi", before=apart)
    assert done.returncode == 1
    assert "127.0.0.1 can't be reached here" in done.stderr
    assert "ip link set lo up" in done.stderr


SETUP = Path(__file__).parents[2] / "packaging" / "setup.sh"
PROGRAMS = ("sh", "awk", "grep", "sed", "mktemp", "rm", "cat", "date", "getconf")
# What pip says, and what setup.sh makes of it.
SAID = [
    (
        "ERROR: Could not find a version that satisfies x (from versions: none)",
        "the package index can't be reached",
    ),
    (
        "NewConnectionError: Failed to establish a new connection",
        "the proxy 10.0.0.1:3128 (https_proxy)",
    ),
    ("OSError: [Errno 28] No space left on device", "the disk is full"),
    ("error: CMake failed", "a build needs a C++ compiler"),
]


def set_up(
    folder: Path, *, pip_says: str = "", free_kb: int = 9_000_000, compiler: bool = True
) -> str:
    """What setup.sh says in a folder with an environment whose pip fails with `pip_says`."""
    programs, python = folder / "programs", folder / ".venv" / "bin" / "python"
    stubs = {
        programs / "sleep": "exit 1",
        programs / "df": f"printf 'a b c d\\n1 2 3 {free_kb}\\n'",
        python: f"""case "$*" in *--version) exit 0 ;; *install*) echo '{pip_says}' >&2 ;; esac; exit 1""",
        **({programs / "c++": "exit 0"} if compiler else {}),
        **{programs / name: f'exec {shutil.which(name)} "$@"' for name in PROGRAMS},
    }  # fmt: skip
    for path, body in stubs.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    (folder / "pyproject.toml").write_text('  "llama-cpp-python>=0.3.36,<0.4",\n')
    environment = {
        "PATH": str(programs),
        "HOME": str(folder),
        "https_proxy": "http://me:secret@10.0.0.1:3128",
    }
    done = subprocess.run(
        ["/bin/sh", str(SETUP), "app"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "secret" not in done.stderr
    assert "hint: " in done.stderr
    return done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a script of the shell")
@pytest.mark.parametrize(
    ("pip_says", "told"), SAID, ids=["no index", "a proxy", "a full disk", "a build"]
)
def test_setup_tells_the_cause_by_what_pip_says(tmp_path: Path, pip_says: str, told: str) -> None:
    assert told in set_up(tmp_path, pip_says=pip_says)


@pytest.mark.skipif(sys.platform == "win32", reason="a script of the shell")
def test_setup_begins_only_where_it_can_end(tmp_path: Path) -> None:
    assert "only 9 MB are free" in set_up(tmp_path / "full", free_kb=9_000)
    assert "a C++ compiler is needed" in set_up(tmp_path / "no compiler", compiler=False)
