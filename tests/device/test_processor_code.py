"""`doctor` names the processor instructions that the installed llama.cpp was not compiled for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.device.backend_view import installed_build
from localllm.device.detect import hardware
from localllm.device.ggml import GgmlBuild, GgmlDevice
from localllm.device.name_lookup import resolve
from localllm.device.processor_code import processor_checks

COMPUTER = replace(resolve("8GB laptop"), os="Linux", cpu_vectors="AVX-512")
ALL = {"AVX": "1", "AVX2": "1", "FMA": "1", "F16C": "1", "AVX512": "1", "OPENMP": "1"}


def build(**features: str) -> GgmlBuild:
    return GgmlBuild("0.3.36", "/x", (), {"CPU": {**ALL, **features}})


@pytest.mark.parametrize(
    ("vectors", "features", "named"),
    [
        ("AVX-512", {"AVX512": "0"}, "AVX512"),
        ("AVX-512", {"AVX512": "0", "AVX2": "0"}, "AVX512, AVX2"),
        ("AVX2", {"AVX2": "0", "FMA": "0"}, "AVX2, FMA"),
        ("AVX2", {"OPENMP": "0"}, "OPENMP"),
    ],
)
def test_missing_instructions_are_named_with_the_command_that_compiles(
    vectors: str, features: dict[str, str], named: str
) -> None:
    (check,) = processor_checks(replace(COMPUTER, cpu_vectors=vectors), build(**features))
    assert check.status == "warning"
    assert f"does not use {named} of this machine" in check.message
    assert check.fix == "localllm setup --backend cpu"


def test_instructions_that_the_processor_lacks_are_not_missed() -> None:
    (check,) = processor_checks(replace(COMPUTER, cpu_vectors="AVX2"), build(AVX512="0"))
    assert check.status == "ok"


@pytest.mark.parametrize(
    "unknown",
    [
        None,
        GgmlBuild(failure="it does not start"),
        GgmlBuild("0.3.36", "/x"),
        replace(build(AVX512="0"), devices=(GgmlDevice("CUDA0", "", "CUDA", "gpu", 1, 1),)),
    ],
)
def test_without_facts_or_with_a_gpu_there_is_no_check(unknown: GgmlBuild | None) -> None:
    assert processor_checks(COMPUTER, unknown) == []


def test_the_installed_build_is_compared_with_this_processor() -> None:
    """The build was compiled here or is a ready wheel. In both cases the check reads its real
    features."""
    here = installed_build(fresh=True)
    assert here is not None
    assert "CPU" in here.features
    for check in processor_checks(hardware(), here):
        assert check.status in ("ok", "warning")
