"""`make test-oldest` installs exactly the oldest versions that pyproject.toml allows."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "packaging" / "floors.py"


@pytest.fixture(scope="module")
def floors() -> ModuleType:
    """Load the file by its path, because packaging/ is deliberately not a package."""
    spec = importlib.util.spec_from_file_location("floors", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_floors_and_the_oldest_constraints_are_the_same() -> None:
    said = subprocess.run([sys.executable, FILE], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stderr) == (0, "")


def test_differences_between_floors_and_constraints_are_listed(floors: ModuleType) -> None:
    """Dependencies and extras are compared, without their markers. Two spellings of one version are
    equal."""
    project = """
[project]
dependencies = ["a>=1.5,<2", "b>=2", "c>=12.560"]
[project.optional-dependencies]
gpu = ["d>=3; sys_platform == 'darwin'", "d[cpu]>=3; sys_platform == 'linux'"]
docs = ["e>=9"]
"""
    assert (
        floors.differences(
            project, "# none of them == newer\na==1.5.0\nb==2.0\nc==12.560.30\nd==3.0.0\n"
        )
        == []
    )
    assert floors.differences(project, "a==1.6\nb==2.0\nc==12.560.30\ne==9\n") == [
        "a: pyproject.toml has 1.5, constraints-oldest has 1.6",
        "d: pyproject.toml has 3, constraints-oldest has nothing",
        "e: pyproject.toml has nothing, constraints-oldest has 9",
    ]
