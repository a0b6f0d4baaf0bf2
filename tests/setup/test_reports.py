"""What owners of cards reported in public, as far as it is about builds: the row of the collection, the machine, the right build."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from device import recordings
from localllm.cli.commands import setup as command
from localllm.device.machines import identify
from localllm.device.types import Readings
from localllm.setup.host import assumed

MORE = Path(__file__).parent / "recorded" / "machines"
Facts = dict[str, object]


@dataclass(frozen=True)
class Report:
    """`says`: what must stand in the dry run, in this order; `never`: what must not. `host`: what differs from an ordinary system."""

    number: int
    what: str
    machine: str
    host: Facts
    says: tuple[str, ...]
    never: tuple[str, ...] = ()
    backend: str = ""


ARCH_LINUX: Facts = {"glibc": (2, 42), "gcc": 15, "nvcc": (13, 0), "nvcc_path": "/opt/cuda/bin/nvcc"}
FEDORA_44: Facts = {"glibc": (2, 43), "gcc": 16, "nvcc": (13, 3), "nvcc_path": "/usr/bin/nvcc"}
REPORTS = [
    Report(4, "a Spark needs sm_121a alone", "gb10_table", {}, ("ARCHITECTURES=121a-real ",)),
    Report(6, "glibc 2.42 and CUDA 13.0", "rtx_5090_two", ARCH_LINUX, ("C library 2.42", ">=13.4"), ("/opt/cuda",)),
    Report(6, "glibc 2.42, no nvcc", "rtx_5090_two", {"glibc": (2, 42)}, (">=13.4",), ("==13.0.*'\n    $ link",)),
    Report(7, "GCC 16 of Fedora 44", "rtx_5090_two", FEDORA_44, ("does not take this system's GCC 16", ">=13.4")),
    Report(8, "3080, 5090 and 3080", "mixed_3080_5090_3080", {}, ("86-real;120a-real", "CUDA 13.0", "Vulkan")),
    Report(12, "driver 550", "rtx_4090_two", {"cuda_driver": (12, 4)}, ("whl/cu124", "Vulkan"), ("==13.0",)),
    Report(12, "driver 535", "rtx_4070_desktop", {"cuda_driver": (12, 2)}, ("whl/cu122", "580")),
    Report(12, "driver 470", "rtx_4070_desktop", {"cuda_driver": (11, 4)}, ("update", "Vulkan")),
    Report(13, "V100", "tesla_v100", {}, ("7.0 is covered", "whl/cu125", "else llama.cpp for Vulkan")),
    Report(13, "GTX 1080 Ti", "gtx_1080_ti", {"cuda_driver": (12, 2)}, ("whl/cu122", "else llama.cpp for Vulkan")),
    Report(14, "NVML mismatch", "nvml_mismatch", {}, ("does not answer", "nvidia-smi"), ("nothing to build",)),
    Report(15, "SIGILL of the wheel", "rtx_4090_two", {}, ("whl/cu130", "native code of sm_89", "else llama.cpp for Vulkan")),
    Report(16, "Arc B580", "arc_b580", {}, ("whl/vulkan",)),
    Report(16, "an Arc that no table knows, forced", "cpu_only_vm", {}, ("whl/vulkan",), backend="vulkan"),
    Report(17, "two Arc Pro B60", "arc_b60_two", {}, ("2 × Arc Pro B60", "whl/vulkan")),
    Report(18, "140T", "intel_140t", {}, ("whl/vulkan",)),
    Report(19, "RTX A2000 and Arc B60", "a2000_and_b60", {}, ("B60 is here too", "--backend vulkan", "whl/cu130")),
    Report(27, "ROCm 7.2 on Strix Halo", "halo_uma96", {"rocm": (7, 2)}, ("7.13",), backend="rocm"),
    Report(27, "ROCm 6 on Strix Halo", "halo_uma96", {"rocm": (6, 4)}, ("needs ROCm 7",), backend="rocm"),
    Report(29, "RX 9070 has code", "rx_9070_beside_740m", {"rocm": (7, 2)}, ("code of gfx1201",), backend="rocm"),
    Report(37, "hybrid laptop", "laptop_4060_arc", {}, ("whl/cu130",)),
]  # fmt: skip


def read(name: str) -> Readings:
    return recordings.load(name, MORE if name in recordings.names(MORE) else recordings.FOLDER)


def said(name: str, facts: Facts, backend: str = "") -> str:
    readings = read(name)
    machine = identify(readings)
    host = replace(assumed(machine, readings.architecture), version="0.3.36", **facts)  # type: ignore[arg-type]
    return "\n".join(command.lines(machine, command.recipes_of(machine, host, backend)))


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: f"{report.number}: {report.what}")
def test_the_build_is_right_where_owners_met_a_wrong_one(report: Report) -> None:
    text = said(report.machine, report.host, report.backend)
    place = 0
    for words in report.says:
        assert words in text[place:], text
        place = text.index(words, place)
    for words in report.never:
        assert words not in text


def test_no_machine_with_a_gpu_ends_in_nothing_to_build() -> None:
    for folder in (recordings.FOLDER, MORE):
        for name in recordings.names(folder):
            machine = identify(recordings.load(name, folder))
            if machine.accelerator != "cpu":
                assert "nothing to build" not in said(name, {}), name
