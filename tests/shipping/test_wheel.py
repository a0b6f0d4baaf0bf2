"""The wheel contains everything that the program needs. It is built, installed with its
dependencies alone, and used from an empty home."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from shipping import wheels

# packaging/test-clean.sh checks that dependencies install from an index, on every Python and at
# both ends of the version ranges.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the programs in an environment with our wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    return wheels.environment(folder / "env", wheels.built(wheels.ROOT, folder))


def used(installed: Path, home: Path, *words: str) -> str:
    """Return the output of `localllm` for `words`."""
    # A small model may generate without end, so the context limits it.
    environment = wheels.home_environment(home) | {"LOCALLLM_CONTEXT": "512"}
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


def test_an_installed_wheel_chats_plans_and_lists_licences_with_an_empty_home(
    installed: Path, tmp_path: Path
) -> None:
    where = subprocess.run(
        [installed / "python", "-c", "import localllm; print(localllm.__file__)"], cwd=tmp_path,
        capture_output=True, text=True,
        env={"PATH": os.environ["PATH"]}, check=True,
    ).stdout  # fmt: skip
    assert str(installed.parent) in where
    assert used(installed, tmp_path, "--version").startswith("localllm ")
    assert json.loads(used(installed, tmp_path, "recommend", "--json", "--device", "M4 Max 128GB"))[
        "plans"
    ]
    assert used(installed, tmp_path, "chat", "-m", "smollm2-135m-instruct", "Say hello.").strip()
    assert "uvicorn" in used(installed, tmp_path, "licences")
