"""The base of every Linux Device: the system's memory and processor."""

from __future__ import annotations

from dataclasses import dataclass, replace

from localllm.device import cpus
from localllm.device.machines.common import (
    modules_bandwidth,
    ram_bandwidth,
    ram_disagrees,
    with_findings,
)
from localllm.device.parsers import linux
from localllm.device.parts_table import DeviceRow
from localllm.device.types import (
    GIB,
    Device,
    DeviceUnreadableError,
    Figure,
    Finding,
    Memory,
    Readings,
)
from localllm.memory.account import shared_pool
from localllm.memory.linux import LinuxMemory, MemInfo


@dataclass(frozen=True, slots=True)
class LinuxSystem:
    """The base of every Linux Device: the system's memory and processor."""

    memory: LinuxMemory
    machine: MemInfo
    cpu: linux.CpuInfo
    reported_bandwidth: Figure | None
    base: Device


def read_system(readings: Readings, measured: Figure | None) -> LinuxSystem:
    """Return the system of these readings. Raises DeviceUnreadableError without a MemTotal."""
    memory = LinuxMemory(readings.file)
    machine_memory = memory.machine()
    if machine_memory is None:
        raise DeviceUnreadableError(
            "/proc/meminfo has no MemTotal, so the memory of this machine is unknown"
        )
    pool, is_limited = system_pool(memory)
    cpu = linux.cpuinfo(readings.file("/proc/cpuinfo"))
    findings = _limits(readings, pool if is_limited else None, machine_memory.total_bytes)
    if cpu.apple and "/.dockerenv" in readings.files:
        no_metal = (
            "Docker on a Mac has no Metal, so models run on the CPU; run localllm on macOS instead"
        )
        findings.append(Finding("info", no_metal))
    dimms = None
    records = readings.file("/run/udev/data/+dmi:id")
    if records:
        dimms = linux.udev_memory(records, cpus.channels(cpu.name))
    modules_figure = modules_bandwidth(dimms, "udev")
    # The name of a board or of Apple's computer: "Raspberry Pi 5 Model B Rev 1.0", "Apple MacBook
    # Air (M1, 2020)".
    board = readings.file("/proc/device-tree/model")[:80]
    if "model name" in readings.file("/proc/cpuinfo"):
        board = ""
    row = _board_row(board)
    bandwidth_figure = modules_figure
    if modules_figure is None and row is not None:
        bandwidth_figure = row.bandwidth()
    bandwidth = ram_bandwidth(measured, bandwidth_figure, cpu.name, cpu.vectors)
    findings += ram_disagrees(measured, modules_figure)
    base = Device(
        name=board or cpu.name or f"Linux {readings.architecture}",
        kind="system",
        accelerator="cpu",
        family="CPU",
        memory=pool,
        bandwidth_gbps=bandwidth,
        os="Linux (WSL2)" if linux.is_wsl(readings) else "Linux",
        cpu=cpu.name,
        n_cpu_cores=cpu.cores,
        cpu_vectors=cpu.vectors,
        match=row.name if row else "",
        findings=tuple(findings),
    )
    return LinuxSystem(memory, machine_memory, cpu, modules_figure, base)


def _limits(readings: Readings, container: Memory | None, total_bytes: int) -> list[Finding]:
    """Return findings if a container or WSL shows only a part of the machine's memory.

    `container` is the memory of a container with a smaller limit.
    """
    findings = []
    total_text = f"{total_bytes / GIB:.1f} GiB"
    if container is not None:
        message = (
            f"this container may use {container.total_bytes / GIB:.1f} GiB of "
            f"the host's {total_text}"
        )
        fix = "start it with a larger memory limit (docker run --memory …)"
        findings.append(Finding("info", message, fix))
    if linux.is_wsl(readings):
        message = f"WSL can use {total_text} of this PC's memory (half of it by default)"
        fix = "set [wsl2] memory= in %UserProfile%\\.wslconfig, then wsl --shutdown"
        findings.append(Finding("info", message, fix))
    return findings


def _board_row(board: str) -> DeviceRow | None:
    """Return the row with the board's name, or the slowest of several.

    The row's bandwidth is also that of the processor.
    """
    if not board:
        return None
    # Imported here because it indexes all rows' names, which only boards need.
    from localllm.device import lookup, name_parser

    parsed_name = name_parser.read(board)
    rows, _ = lookup.find(parsed_name)
    if not rows:
        rows, _ = lookup.run_of(parsed_name)
    return min(rows, key=lambda row: row.bandwidth().value, default=None)


def system_pool(memory: LinuxMemory, huge_free_bytes: int | None = None) -> tuple[Memory, bool]:
    """Return the account of system memory, and whether a container's limit makes it smaller.

    /proc/meminfo shows the host's memory even in a container. On some boards with reserved huge
    pages (`huge_free_bytes`), only those pages can hold a model.
    """
    smallest_limit = memory.smallest_limit()
    source = "/proc/meminfo MemAvailable"
    if huge_free_bytes is not None:
        source = "/proc/meminfo HugePages_Free"
    if smallest_limit is not None:
        source = f"limited by {smallest_limit[1]}"
    available_bytes = memory.available_bytes(machine_bytes=huge_free_bytes)
    return shared_pool(
        memory.total_bytes() or 0, available_bytes or 0, source
    ), smallest_limit is not None


def with_system_findings(system: LinuxSystem, findings: list[Finding]) -> LinuxSystem:
    """Return `system` with more findings."""
    return replace(system, base=with_findings(system.base, findings))
