"""The backend with libraries of other releases of llama.cpp: the same contract, and the same texts,
drafts and images as the library itself.

Libraries are folders in LOCALLLM_TEST_ENGINES, or in ~/.cache/localllm-engines:

    NAME/lib       the libraries, with headers where headers_for looks for them
    NAME/python    if it exists, a program that runs Python with the libc that they need

A build with other kernels is a copy of the installed libraries, with ggml's CPU library of the same
release built for another processor:
cmake -S ggml -DGGML_NATIVE=OFF -DGGML_AVX2=OFF -DGGML_FMA=OFF
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

from localllm.engine.cache.identity import KvIdentity, identity_of
from localllm_backends.contract import Backend, Chunk
from support.exported_kv import kv_file, prompts, read_prompt
from support.library_checks import N_TOKENS, open_tiny

ENGINES = Path(os.environ.get("LOCALLLM_TEST_ENGINES", Path.home() / ".cache" / "localllm-engines"))
INSTALLED = "the installed one"
NAMES = (
    INSTALLED, "llama-cpp-python-0.3.30", "llama-cpp-py-sync-0.11739", "debian-0.7.0",
)  # fmt: skip
NEAR = 0.02
# Tokens per step when a prompt is prefilled a second time.
OTHER_STEP_TOKENS = 7


def found_by(
    name: str, folder: Path, model: Path, module: str = "support.library_checks"
) -> dict[str, Any]:
    """Return the output of `module` with the library `name`."""
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
        [python, "-m", module, str(folder), str(model)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, few_layers: Path) -> dict[str, Any]:
    return found_by(INSTALLED, tmp_path_factory.mktemp("installed"), few_layers)


@pytest.fixture(params=NAMES)
def found(
    request: pytest.FixtureRequest, installed: dict[str, Any], tmp_path: Path, few_layers: Path
) -> dict[str, Any]:
    if request.param == INSTALLED:
        return installed
    return found_by(request.param, tmp_path, few_layers)


@pytest.mark.timeout(600)
def test_a_release_works_with_its_capabilities_and_names_missing_ones(
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(path.name for path in ENGINES.glob("*")))
def test_kv_of_another_build_changes_no_more_tokens_than_other_steps(
    name: str, tmp_path: Path, smollm2: Path
) -> None:
    """Compare the best tokens after each of 480 positions: with KV of another build with the same
    layout, and with KV that this build computed in steps of another size."""
    sent = found_by(name, tmp_path, smollm2, "support.exported_kv")
    backend = open_tiny(smollm2)
    difference = identity_of(backend).difference(KvIdentity.from_json(sent))
    if difference:
        pytest.skip(f"{name} has another identity of KV: {difference}")
    counts = {"other steps": 0, "another build": 0}
    for i, prompt in enumerate(prompts(backend)):
        own = best_tokens(backend, read_prompt(backend, prompt), prompt[-1])
        steps = best_tokens(
            backend, read_prompt(backend, prompt, OTHER_STEP_TOKENS), prompt[-1], own
        )
        sequence = backend.new_sequence()
        backend.import_range(sequence, kv_file(tmp_path, i).read_bytes(), 0, len(prompt) - 1)
        theirs = best_tokens(backend, sequence, prompt[-1], own)
        counts["other steps"] += agreeing(own, steps)
        counts["another build"] += agreeing(own, theirs)
    backend.close()
    assert counts["another build"] >= counts["other steps"], counts


def best_tokens(
    backend: Backend, sequence: int, last: int, forced: list[int] | None = None
) -> list[int]:
    """Return the best token after `last`, and after each token of `forced` (None: of the best
    ones). Drop the sequence."""
    found: list[int] = []
    for i in range(N_TOKENS):
        found += backend.step([Chunk(sequence, [last])]).argmax(0)
        last = found[i] if forced is None else forced[i]
    backend.drop(sequence)
    return found


def agreeing(tokens: list[int], others: list[int]) -> int:
    return sum(a == b for a, b in zip(tokens, others, strict=True))
