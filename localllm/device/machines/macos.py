"""Turn a Mac's readings into its Device: Metal's memory limit and the chip's bin.

Values that can be queried are not computed.
"""

from __future__ import annotations

import re

from localllm.device import cpus, parts_table, usable
from localllm.device.parsers import macos
from localllm.device.types import Device, DeviceUnreadableError, Figure, Finding, Readings
from localllm.memory.account import shared_pool

_UNDER_ROSETTA = Finding(
    "warning",
    "Python runs under Rosetta (x86): Metal and MLX need an arm64 Python",
    "install an arm64 Python (`arch -arm64 /bin/zsh`, then reinstall localllm)",
)


def identify(readings: Readings, ram_bandwidth: Figure | None = None) -> Device:
    """Return the Device of a Mac.

    `ram_bandwidth` is used only on machines without Apple's GPU (Intel Macs, virtual machines). On
    others, a CPU measurement is too low, because the CPU cores cannot reach the SoC's full rate.
    """
    mac = macos.sysctl(readings.output("sysctl"))
    if mac.memory_bytes is None:
        raise DeviceUnreadableError(
            "macOS did not report hw.memsize, so the memory of this Mac is unknown"
        )
    findings: list[Finding] = []
    display_chip, _ = macos.displays(readings.output("system_profiler"))
    chip = mac.chip if mac.chip.startswith("Apple ") else display_chip
    cores = macos.gpu_cores(readings.output("ioreg"), readings.output("system_profiler"))
    free_bytes, available_bytes = macos.memory(
        mac.memory_bytes, readings.output("sysctl"), readings.output("vm_stat")
    )
    if mac.translated:
        findings.append(_UNDER_ROSETTA)
    reason = _no_gpu_reason(mac, chip, cores, readings)
    if reason:
        return _without_gpu(mac, available_bytes, ram_bandwidth, reason, findings)

    row = parts_table.by_chip(chip, cores, mac.memory_bytes)
    working_set = macos.metal_working_set(readings.output("metal"))
    memory = usable.mac(
        mac.memory_bytes, working_set, mac.wired_limit_mb, free_bytes, available_bytes
    )
    findings += _limit_findings(mac, memory.basis == "assumed", working_set)
    if row is None:
        family = " ".join(chip.split()[:2])
        bandwidth = _unlisted_bandwidth(chip)
        findings.append(Finding("warning", f"{chip} with {cores} GPU cores is not in the table"))
    else:
        family = row.family
        bandwidth = row.bandwidth()
        if cores is None:
            message = f"the number of GPU cores could not be read; assumed {row.name}"
            findings.append(Finding("warning", message))
    facts = parts_table.device_fields(row)
    facts["compute_units"] = cores or 0
    return Device(
        name=f"{chip} ({cores}-core GPU)" if cores else chip,
        kind="unified",
        accelerator="metal",
        family=family,
        memory=memory,
        bandwidth_gbps=bandwidth,
        **facts,
        os="macOS",
        cpu=chip,
        n_cpu_cores=mac.cpu_cores,
        findings=tuple(findings),
    )


def _unlisted_bandwidth(chip: str) -> Figure:
    """Return an assumed bandwidth for an unlisted chip, or an unlisted bin of a chip.

    It comes from the chip's other bins, or from its tier ("Pro", "Max") in the newest listed
    generation of its series (M, A).
    """
    macs = [row for row in parts_table.rows() if row.vendor == "Apple" and row.chip]
    same_chip = [row for row in macs if row.chip == chip]
    if same_chip:
        return parts_table.slowest(same_chip)
    series, _, tier_name = _chip_parts(chip)
    same_tier = [row for row in macs if _chip_parts(row.chip)[::2] == (series, tier_name)]
    newest = max((_chip_parts(row.chip)[1] for row in same_tier), default=0)
    return parts_table.slowest(
        [row for row in same_tier if _chip_parts(row.chip)[1] == newest] or macs
    )


def _chip_parts(chip: str) -> tuple[str, int, str]:
    """Return series, generation and tier of a chip: ("M", 5, "Pro") for "Apple M5 Pro"."""
    match = re.fullmatch(r"Apple ([A-Z])([0-9]+)(?: (\w+))?", chip)
    if match is None:
        return "", 0, ""
    return match[1], int(match[2]), match[3] or ""


def _no_gpu_reason(mac: macos.Mac, chip: str, cores: int | None, readings: Readings) -> str:
    """Return the reason why this process cannot use an Apple GPU, or "" if it can.

    Under Rosetta, the processor calls itself VirtualApple. A virtual machine has a paravirtual GPU
    without an AGX accelerator, and Metal on it cannot compute matrices.
    """
    profile = readings.output("system_profiler")
    virtual = "a virtual machine"
    if mac.translated:
        return "Rosetta hides it from an x86 Python"
    if "(Virtual)" in chip or chip == "Apple processor" or mac.model.startswith("VirtualMac"):
        return virtual
    if "Paravirtual" in readings.output("metal") + profile:
        return virtual
    if not chip.startswith("Apple "):
        return virtual if readings.architecture == "arm64" else "an Intel Mac"
    if cores is None and "sppci_" in profile:
        return virtual
    return ""


def _limit_findings(mac: macos.Mac, assumed: bool, working_set: int | None) -> list[Finding]:
    findings = []
    limit_mb = mac.wired_limit_mb or 0
    if limit_mb * usable.MIB > (mac.memory_bytes or 0):
        message = f"iogpu.wired_limit_mb ({limit_mb} MiB) is above this Mac's RAM"
        fix = "sudo sysctl iogpu.wired_limit_mb=0"
        findings.append(Finding("warning", f"{message}; filling it hangs the Mac", fix))
    if assumed and not working_set:
        unqueried = "Metal could not be queried (no GPU session?)"
        share = "a low share of RAM is assumed for the GPU"
        findings.append(Finding("info", f"{unqueried}: {share}"))
    if mac.pressure == 4:
        message_text = "macOS reports critical memory pressure"
        close = "close other apps before loading a model"
        findings.append(Finding("warning", f"{message_text}: {close}"))
    return findings


def _without_gpu(
    mac: macos.Mac,
    available_bytes: int | None,
    bandwidth: Figure | None,
    reason: str,
    findings: list[Finding],
) -> Device:
    total_bytes = mac.memory_bytes or 0
    findings.append(Finding("info", f"no Apple GPU was found ({reason}), so models run on the CPU"))
    return Device(
        name=mac.chip or mac.model or "Mac",
        kind="system",
        accelerator="cpu",
        family="CPU",
        memory=shared_pool(
            total_bytes,
            total_bytes // 2 if available_bytes is None else available_bytes,
            "hw.memsize, vm_stat",
        ),
        bandwidth_gbps=bandwidth or cpus.usual_bandwidth(mac.chip, ""),
        os="macOS",
        cpu=mac.chip,
        n_cpu_cores=mac.cpu_cores,
        findings=tuple(findings),
    )
