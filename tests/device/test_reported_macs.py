"""Posted Macs: GPUs that are not available and why, core counts, low power mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.device import health
from localllm.device.machines import identify
from localllm.device.types import Device, Readings


def said(device: Device) -> str:
    return "\n".join(f"{finding.message} {finding.fix}" for finding in device.findings)


def mac(sysctl: str, architecture: str = "arm64", **outputs: str) -> Device:
    return identify(Readings("macos", architecture, {}, {"sysctl": sysctl, **outputs}))


SIZE = "hw.memsize: 17179869184\nhw.physicalcpu: 8\n"
NO_CORES = '{"SPDisplaysDataType": [{"_name": "Display", "sppci_model": "Apple something"}]}'


@pytest.mark.parametrize(
    ("sysctl", "architecture", "outputs", "why"),
    [
        ("machdep.cpu.brand_string: Apple M1 (Virtual)\nhw.model: VirtualMac2,1\n", "arm64", {}, "a "
                                                                                                 "virtual "
                                                                                                 "machine"),
        ("machdep.cpu.brand_string: Apple M4\nhw.model: VirtualMac2,1\n", "arm64", {}, "a virtual "
                                                                                       "machine"),
        ("machdep.cpu.brand_string: Apple M4\n", "arm64", {"system_profiler": NO_CORES}, "a "
                                                                                         "virtual "
                                                                                         "machine"),
        ("machdep.cpu.brand_string: VirtualApple @ 2.50GHz processor\nsysctl.proc_translated: "
         "1\n", "x86_64",
         {"ioreg": '"gpu-core-count" = 8'}, "Rosetta"),
        ("machdep.cpu.brand_string: Intel(R) Core(TM) i9-9880H CPU @ 2.30GHz\n", "x86_64", {}, "an "
                                                                                               "Intel "
                                                                                               "Mac"),
    ],
)  # fmt: skip
def test_a_mac_without_a_gpu_reports_the_reason(
    sysctl: str, architecture: str, outputs: dict[str, str], why: str
) -> None:
    device = mac(
        sysctl + SIZE,
        architecture,
        metal="recommendedMaxWorkingSetSize = 5010795178 bytes",
        **outputs,
    )
    assert (device.accelerator, device.kind) == ("cpu", "system")
    assert why in said(device)
    assert ("Intel Mac" in said(device)) == (why == "an Intel Mac")


def test_the_smaller_m5_pro_has_a_row() -> None:
    device = mac(
        "machdep.cpu.brand_string: Apple M5 Pro\nhw.memsize: 25769803776\n",
        ioreg='"gpu-core-count" = 16',
    )
    assert (device.match, device.compute_units) == ("M5 Pro (16-core GPU)", 16)


@pytest.mark.parametrize(
    ("pmset", "status"),
    [
        ("Battery Power:\n powermode            1\n", "warning"),  # macOS 26
        (" lowpowermode 1\n", "warning"),
        ("AC Power:\n powermode            2\n", "ok"),
        (" powermode 0\n", "ok"),
        (" lowpowermode 0\n", "ok"),
    ],
)
def test_low_power_mode_is_detected_under_both_names(pmset: str, status: str) -> None:
    facts = replace(health.HealthFacts(), pmset=pmset)
    device = mac("machdep.cpu.brand_string: Apple M2\n" + SIZE, ioreg='"gpu-core-count" = 10')
    found = next(check for check in health.health_checks(device, facts) if check.name == "power")
    assert found.status == status
    if status == "warning":
        assert pmset.split()[-2] in found.fix
