"""Parse facts about an Apple Silicon Mac from sysctl, ioreg, Metal and vm_stat."""

from __future__ import annotations

import re
from dataclasses import dataclass

from localllm.device.parsers import from_json, integer, key_values
from localllm.memory.macos import available_bytes


@dataclass(frozen=True, slots=True)
class Mac:
    """A Mac according to sysctl.

    `wired_limit_mb` 0 means macOS' own default (not "no limit"). None means that it is not
    readable.
    """

    chip: str
    model: str
    memory_bytes: int | None
    cpu_cores: int
    wired_limit_mb: int | None
    pressure: int | None
    translated: bool


def sysctl(text: str) -> Mac:
    """Parse "key: value" lines of `sysctl machdep.cpu.brand_string hw.model hw.memsize …`."""
    values = key_values(text)
    memory = integer(values.get("hw.memsize"))
    if memory is not None and not 0 < memory < 1 << 50:
        memory = None
    chip = values.get("machdep.cpu.brand_string", "")
    cores = integer(values.get("hw.physicalcpu") or values.get("hw.ncpu"))
    return Mac(
        chip=" ".join(chip.split())[:80],
        model=values.get("hw.model", "")[:80],
        memory_bytes=memory,
        cpu_cores=max(cores or 0, 0),
        wired_limit_mb=integer(values.get("iogpu.wired_limit_mb")),
        pressure=integer(values.get("kern.memorystatus_vm_pressure_level")),
        translated=integer(values.get("sysctl.proc_translated")) == 1,
    )


def gpu_cores(ioreg: str, system_profiler: str = "") -> int | None:
    """Return GPU cores from `ioreg -rc AGXAccelerator -d1` ("gpu-core-count" = 40).

    Falls back to system_profiler's sppci_cores.
    """
    match = re.search(r'"gpu-core-count"\s*=\s*(0x[0-9a-fA-F]{1,8}|[0-9]{1,6})', ioreg)
    if match is None:
        _, cores = displays(system_profiler)
        return cores
    base = 16 if match[1].startswith("0x") else 10
    return _plausible(int(match[1], base))


def _plausible(cores: int) -> int | None:
    return cores if 0 < cores <= 1024 else None


def displays(system_profiler: str) -> tuple[str, int | None]:
    """Return chip name and GPU cores from `system_profiler SPDisplaysDataType -json`."""
    data = from_json(system_profiler)
    if not isinstance(data, dict):
        return "", None
    entries = data.get("SPDisplaysDataType")
    if not isinstance(entries, list):
        return "", None
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        cores = integer(str(entry.get("sppci_cores", "")))
        if cores:
            return str(entry.get("sppci_model", ""))[:80], _plausible(cores)
    return "", None


def metal_working_set(text: str) -> int | None:
    """Return the bytes of Metal's recommendedMaxWorkingSetSize.

    Our probe prints them as "… = 115964116992 bytes".
    """
    match = re.search(r"recommendedMaxWorkingSetSize = ([0-9]{1,15}) bytes", text)
    if match:
        return int(match[1]) or None
    return None


_FREE_KINDS = ("free", "inactive", "speculative", "purgeable")
# xnu's AVAILABLE_NON_COMPRESSED_MEMORY (osfmk/vm/vm_pageout.h). kern.memorystatus_level is its
# percentage.
_AVAILABLE_KINDS = ("free", "active", "inactive", "speculative")


def vm_stat(text: str, kinds: tuple[str, ...] = _FREE_KINDS) -> int | None:
    """Return the bytes in pages of these kinds in `vm_stat`.

    The default kinds are those that macOS can provide without swapping. The page size is read from
    the header: it is 16 KiB on Apple Silicon, not 4.
    """
    page_size = re.search(r"page size of ([0-9]{1,8}) bytes", text)
    values = key_values(text)
    if not page_size or "Pages free" not in values:
        return None
    n_pages = sum(max(integer(values.get(f"Pages {kind}")) or 0, 0) for kind in kinds)
    return n_pages * int(page_size[1])


def memory(total_bytes: int, sysctl: str, vm_stat_output: str) -> tuple[int | None, int | None]:
    """Return the bytes that are free without swapping, and all bytes that can be had.

    Free pages are free, inactive, speculative and purgeable ones. The second figure includes memory
    that macOS frees by compressing other programs' pages. It comes from kern.memorystatus_level, or
    from the same page kinds in vm_stat's output `vm_stat_output`. A figure is None if it is
    unknown.
    """
    free_percent = integer(key_values(sysctl).get("kern.memorystatus_level"))
    available = available_bytes(total_bytes, free_percent)
    counted_bytes = vm_stat(vm_stat_output, _AVAILABLE_KINDS)
    if available is None and counted_bytes is not None:
        available = min(counted_bytes, total_bytes)
    return vm_stat(vm_stat_output), available
