"""What every Linux Device starts from: the system's own memory and processor."""

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
from localllm.device.table import DeviceRow
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
    """What every Linux Device starts from: the system's own memory and processor."""

    memory: LinuxMemory
    machine: MemInfo
    cpu: linux.CpuInfo
    told_bandwidth: Figure | None
    base: Device


def read_system(readings: Readings, measured: Figure | None) -> LinuxSystem:
    """The system of these readings; raises DeviceUnreadableError without a MemTotal."""
    memory = LinuxMemory(readings.file)
    machine = memory.machine()
    if machine is None:
        raise DeviceUnreadableError(
            "/proc/meminfo has no MemTotal, so the memory of this machine is unknown"
        )
    pool, is_limited = system_pool(memory)
    cpu = linux.cpuinfo(readings.file("/proc/cpuinfo"))
    findings = _limits(readings, pool if is_limited else None, machine.total_bytes)
    if cpu.apple and "/.dockerenv" in readings.files:
        no_metal = "Docker on a Mac has no Metal: models run on the CPU here, run on macOS instead"
        findings.append(Finding("info", no_metal))
    modules = None
    records = readings.file("/run/udev/data/+dmi:id")
    if records:
        modules = linux.udev_memory(records, cpus.channels(cpu.name))
    told = modules_bandwidth(modules, "udev")
    # A board, or Apple's computer: "Raspberry Pi 5 Model B Rev 1.0", "Apple MacBook Air (M1, 2020)".
    board = readings.file("/proc/device-tree/model")[:80]
    if "model name" in readings.file("/proc/cpuinfo"):
        board = ""
    row = _board_row(board)
    known = told
    if told is None and row is not None:
        known = row.bandwidth()
    bandwidth = ram_bandwidth(measured, known, cpu.name, cpu.vectors)
    findings += ram_disagrees(measured, told)
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
    return LinuxSystem(memory, machine, cpu, told, base)


def _limits(readings: Readings, container: Memory | None, total_bytes: int) -> list[Finding]:
    """What a container or WSL shows of the machine's memory. `container`: the pool of one whose
    limit is smaller."""
    findings = []
    total = f"{total_bytes / GIB:.1f} GiB"
    if container is not None:
        part = f"this container may use {container.total_bytes / GIB:.1f} GiB of the host's {total}"
        fix = "start it with a larger memory limit (docker run --memory …)"
        findings.append(Finding("info", part, fix))
    if linux.is_wsl(readings):
        part = f"WSL sees {total} of this PC's memory (half of it unless told otherwise)"
        fix = "set [wsl2] memory= in %UserProfile%\\.wslconfig, then wsl --shutdown"
        findings.append(Finding("info", part, fix))
    return findings


def _board_row(board: str) -> DeviceRow | None:
    """The row of that name, of several the slowest: its memory is the processor's too."""
    if not board:
        return None
    from localllm.device import lookup, typed  # names of all rows: on boards alone

    named = typed.read(board)
    rows, _ = lookup.find(named)
    if not rows:
        rows, _ = lookup.run_of(named)
    return min(rows, key=lambda row: row.bandwidth().value, default=None)


def system_pool(memory: LinuxMemory, huge_free_bytes: int | None = None) -> tuple[Memory, bool]:
    """The account of system memory, and whether a container's limit makes it smaller: /proc/meminfo
    shows the host's. Where huge pages are reserved (`huge_free_bytes`), those alone can hold a
    model on some boards."""
    smallest = memory.smallest_limit()
    source = "/proc/meminfo MemAvailable"
    if huge_free_bytes is not None:
        source = "/proc/meminfo HugePages_Free"
    if smallest is not None:
        source = f"limited by {smallest[1]}"
    available = memory.available_bytes(machine_bytes=huge_free_bytes)
    return shared_pool(memory.total_bytes() or 0, available or 0, source), smallest is not None


def noted(system: LinuxSystem, findings: list[Finding]) -> LinuxSystem:
    """`system` with what else there is to say of it."""
    return replace(system, base=with_findings(system.base, findings))
