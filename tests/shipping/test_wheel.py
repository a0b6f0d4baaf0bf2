"""The wheel holds all that the program needs: built, installed beside its dependencies alone, used from an empty home."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# (That dependencies install from an index, on every Python and at both ends, is packaging/test-clean.sh's.)
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with our wheel, the libraries of this one behind it, and no checkout in sight."""
    hatchling = pytest.importorskip("hatchling", reason="hatchling builds the wheel: pip install hatchling")
    assert hatchling
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    [wheel] = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel], check=True)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    # Behind our wheel in sys.path; the paths of an editable install are .pth files, which are not read there.
    behind = [path for path in sys.path if path.endswith("site-packages")]
    (Path(site) / "behind.pth").write_text("\n".join(behind))
    return python.parent


def used(installed: Path, home: Path, *words: str) -> str:
    """What `localllm` prints for `words`."""
    environment = {
        name: value for name, value in os.environ.items() if name in ("PATH", "SYSTEMROOT", "TMPDIR", "LANG", "OPENBLAS_CORETYPE")
    }  # fmt: skip
    # A small model may go on for ever: the context ends it.
    environment |= {"HOME": str(home), "LOCALLLM_CONTEXT": "512"}
    done = subprocess.run(
        [installed / "localllm", *words],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_chat_a_plan_and_the_licences_from_an_empty_home(installed: Path, tmp_path: Path) -> None:
    where = subprocess.run(
        [installed / "python", "-c", "import localllm; print(localllm.__file__)"], cwd=tmp_path, capture_output=True, text=True,
        env={"PATH": os.environ["PATH"]}, check=True,
    ).stdout  # fmt: skip
    assert str(installed.parent) in where
    assert used(installed, tmp_path, "--version").startswith("localllm ")
    assert json.loads(used(installed, tmp_path, "recommend", "--json", "--device", "M4 Max 128GB"))["plans"]
    assert used(installed, tmp_path, "chat", "-m", "smollm2-135m-instruct", "Say hello.").strip()
    assert "uvicorn" in used(installed, tmp_path, "licences")
