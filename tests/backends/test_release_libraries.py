"""The backend on libraries of other releases of llama.cpp: the same contract, and the texts, drafts
and images of the library itself.

Libraries are folders in LOCALLLM_TEST_ENGINES, or in ~/.cache/localllm-engines:

    NAME/lib       the libraries, with headers where headers_for looks for them
    NAME/python    if it exists, a program that runs Python with the libc that they need
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ENGINES = Path(os.environ.get("LOCALLLM_TEST_ENGINES", Path.home() / ".cache" / "localllm-engines"))
INSTALLED = "the installed one"
NAMES = (
    INSTALLED, "llama-cpp-python-0.3.30", "llama-cpp-py-sync-0.11739", "debian-0.7.0",
)  # fmt: skip
NEAR = 0.02


def found_by(name: str, folder: Path, model: Path) -> dict[str, Any]:
    """What the library `name` does (support/library_checks.py)."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    python = sys.executable
    if name != INSTALLED:
        engine = ENGINES / name
        if not (engine / "lib").is_dir():
            pytest.skip(f"{name} is not in {ENGINES}")
        environment["LLAMA_CPP_LIB_PATH"] = str(engine / "lib")
        if (engine / "python").exists():
            python = str(engine / "python")
    done = subprocess.run(
        [python, "-m", "support.library_checks", str(folder), str(model)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> dict[str, Any]:
    return found_by(INSTALLED, tmp_path_factory.mktemp("installed"), smollm2)


@pytest.fixture(params=NAMES)
def found(
    request: pytest.FixtureRequest, installed: dict[str, Any], tmp_path: Path, smollm2: Path
) -> dict[str, Any]:
    if request.param == INSTALLED:
        return installed
    return found_by(request.param, tmp_path, smollm2)


@pytest.mark.timeout(600)
def test_a_release_does_what_it_can_and_names_what_it_lacks(
    found: dict[str, Any], installed: dict[str, Any]
) -> None:
    lacks = found["lacks"]
    assert len(found["greedy"]) == 20
    assert found["greedy"] == found["bare"], "the text of the library itself"
    for memory in ("full attention", "sliding windows", "recurrent"):
        assert found[memory], memory
        assert {check: why for check, why in found[memory].items() if why} == {}
    for kind, capability in (("mtp", "mtp"), ("eagle3", "drafters")):
        if capability in lacks:
            assert lacks[capability] in found[kind]
        else:
            assert found[kind] == installed[kind]
            assert sum(len(draft) for draft in found[kind]) > 8
    if "images" in lacks:
        assert found["image"] == lacks["images"]
    elif "images" not in installed["lacks"]:
        np.testing.assert_allclose(found["image"], installed["image"], atol=NEAR)
