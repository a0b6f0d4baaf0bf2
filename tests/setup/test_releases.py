"""The archive of a llama.cpp release for each kind of machine, with the file names of a real
release."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.device.name_lookup import resolve
from localllm.setup import releases
from localllm.setup.builds import SetupError
from localllm.setup.host import BuildHost, assumed

# The assets of b11158 (24 September 2026). Their sizes and digests are made up.
NAMES = (Path(__file__).parent / "recorded" / "release_b11158.txt").read_text().split()


def answer(names: list[str], tag: str = "b11158") -> dict[str, Any]:
    rows = [
        {
            "name": name,
            "size": 1000,
            "digest": f"sha256:{number:064x}",
            "browser_download_url": f"https://github.com/download/{tag}/{name}",
        }
        for number, name in enumerate(names)
    ]
    return {"tag_name": tag, "assets": rows}


RELEASE = releases.read(answer(NAMES))


def chosen(machine: str, backend: str, **host: Any) -> list[str]:
    device = resolve(machine)
    found = releases.choose(RELEASE, backend, device, replace(assumed(device), **host))
    return [asset.name for asset in found]


@pytest.mark.parametrize(
    ("machine", "backend", "host", "names"),
    [
        ("8GB laptop", "cpu", {}, ["llama-b11158-bin-ubuntu-x64.tar.gz"]),
        (
            "8GB laptop",
            "cpu",
            {"architecture": "aarch64"},
            ["llama-b11158-bin-ubuntu-arm64.tar.gz"],
        ),
        (
            "8GB laptop",
            "cpu",
            {"system": "windows", "architecture": "AMD64"},
            ["llama-b11158-bin-win-cpu-x64.zip"],
        ),
        ("M4 Max 128GB", "metal", {}, ["llama-b11158-bin-macos-arm64.tar.gz"]),
        ("strix halo", "vulkan", {}, ["llama-b11158-bin-ubuntu-vulkan-x64.tar.gz"]),
        (
            "rtx 5090",
            "cuda",
            {"cuda_driver": (13, 0)},
            [
                "llama-b11158-bin-ubuntu-cuda-13.4-x64.tar.gz",
                "cudart-llama-b11158-bin-ubuntu-cuda-13.4-x64.tar.gz",
            ],
        ),
        (
            "rtx 3060",
            "cuda",
            {"cuda_driver": (12, 4)},
            [
                "llama-b11158-bin-ubuntu-cuda-12.8-x64.tar.gz",
                "cudart-llama-b11158-bin-ubuntu-cuda-12.8-x64.tar.gz",
            ],
        ),
        (
            "gtx 1080",
            "cuda",
            {"cuda_driver": (13, 0)},
            [
                "llama-b11158-bin-ubuntu-cuda-12.8-x64.tar.gz",
                "cudart-llama-b11158-bin-ubuntu-cuda-12.8-x64.tar.gz",
            ],
        ),
        (
            "rtx 5090",
            "cuda",
            {"system": "windows", "architecture": "AMD64", "cuda_driver": (13, 1)},
            [
                "llama-b11158-bin-win-cuda-13.4-x64.zip",
                "cudart-llama-bin-win-cuda-13.4-x64.zip",
            ],
        ),
        (
            "strix halo",
            "rocm",
            {"rocm": (10, 0)},
            ["llama-b11158-bin-ubuntu-rocm-10.0-x64.tar.gz"],
        ),
        (
            "strix halo",
            "rocm",
            {"system": "windows", "architecture": "AMD64"},
            ["llama-b11158-bin-win-rocm-10.0-x64.zip"],
        ),
    ],
)
def test_a_machine_gets_the_archive_for_its_system_and_accelerator(
    machine: str, backend: str, host: dict[str, Any], names: list[str]
) -> None:
    assert chosen(machine, backend, **host) == names


@pytest.mark.parametrize(
    ("machine", "backend", "host", "said"),
    [
        ("8GB laptop", "cpu", {"architecture": "riscv64"}, "no archive for riscv64"),
        ("8GB laptop", "cpu", {"glibc": (2, 31)}, "glibc 2.34 or newer, and this system has 2.31"),
        ("rtx 3060", "cuda", {"cuda_driver": (11, 8)}, "needs a newer driver"),
        ("gb10", "cuda", {"cuda_driver": (12, 8)}, "this one has CUDA 12.8"),
        ("strix halo", "rocm", {"rocm": (7, 2)}, "needs ROCm 10.0, and this system has 7.2"),
        ("jetson orin nano", "cuda", {"cuda_driver": (13, 0)}, "no code for this Jetson"),
        ("strix halo", "rocm", {}, "AMD's libraries, which are not installed"),
        ("M4 Max 128GB", "vulkan", {}, "no archive for vulkan on macos arm64 (it has metal"),
    ],
)
def test_without_a_fitting_archive_the_reason_is_given(
    machine: str, backend: str, host: dict[str, Any], said: str
) -> None:
    with pytest.raises(SetupError) as caught:
        chosen(machine, backend, **host)
    assert said in caught.value.message
    assert caught.value.hint


def test_a_file_without_a_digest_or_with_an_unusual_name_is_left_out() -> None:
    listed = answer(["llama-b1234-bin-ubuntu-x64.tar.gz", "../llama.tar.gz", "huge.zip"], "b1234")
    listed["assets"][0]["digest"] = None
    listed["assets"][2]["size"] = 1 << 50
    assert releases.read(listed).assets == ()


@pytest.mark.parametrize("damaged", [{}, [], None, {"tag_name": "../x", "assets": []}, "<html>"])
def test_an_answer_that_is_no_release_is_an_error(damaged: Any) -> None:
    with pytest.raises(SetupError):
        releases.read(damaged)


def test_a_version_points_to_the_release_with_the_archives() -> None:
    pointing = releases.read(answer(["nightly-tag.txt"], "v1.0.0"))
    assert pointing.tag_file is not None
    assert releases.tag_in("b12110\n") == "b12110"
    with pytest.raises(SetupError):
        releases.tag_in("<html>")
    assert releases.Release("b12110", (), "v1.0.0").title == "v1.0.0 (b12110)"


def test_a_cuda_archive_without_cuda_libraries_is_not_used() -> None:
    names = [name for name in NAMES if not name.startswith("cudart")]
    device = resolve("rtx 5090")
    host = replace(assumed(device), cuda_driver=(13, 0))
    with pytest.raises(SetupError, match="no archive with CUDA's libraries"):
        releases.choose(releases.read(answer(names)), "cuda", device, host)


def test_a_host_without_known_limits_gets_an_archive() -> None:
    """A simulated machine has no glibc and no driver version."""
    host = BuildHost("linux", "x86_64", "0.3.36", 8)
    assert releases.unfit("cuda", resolve("rtx 5090"), host) == ""
