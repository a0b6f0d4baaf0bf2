"""What NVML or nvidia-smi said about NVIDIA GPUs to facts, whichever of the two answered."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.device.parsers.numbers import decimal, integer, key_values

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class NvidiaGpu:
    """One GPU. Bytes; MHz; None where the driver said N/A, NOT_SUPPORTED or nothing at all.

    `addressing` is "none", "hmm", "ats" or "": ATS means CPU and GPU share page tables (GB10, Thor, Grace).
    """

    name: str
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    compute_capability: str = ""
    bus_bits: int | None = None
    max_memory_mhz: int | None = None
    addressing: str = ""
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None

    @property
    def derived_bandwidth_gbps(self) -> float | None:
        """2 × maximum memory clock × bus width ÷ 8 (decimal GB/s): a double data rate on what NVML calls the clock.

        Agrees with the datasheets of RTX 4090 (10501 MHz × 384 bit → 1008) and 5090 (14001 × 512 → 1792).
        """
        if not self.bus_bits or not self.max_memory_mhz:
            return None
        value = 2 * self.max_memory_mhz * self.bus_bits / 8 / 1000
        return value if 10 <= value <= 50_000 else None


def nvml(text: str) -> list[NvidiaGpu]:
    """The NVML probe's JSON: one object per GPU, each field a value or absent where the call raised."""
    try:
        listed = json.loads(text) if text.strip() else []
    except (ValueError, RecursionError):
        return []
    if not isinstance(listed, list):
        return []
    return [_from_nvml(entry) for entry in listed if isinstance(entry, dict) and isinstance(entry.get("name"), str)]


def _from_nvml(entry: Mapping[str, Any]) -> NvidiaGpu:
    def whole(key: str) -> int | None:
        value = entry.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None

    def milliwatts(key: str) -> float | None:
        value = whole(key)
        return None if value is None else value / 1000

    major, minor = whole("cc_major"), whole("cc_minor")
    modes = {0: "none", 1: "hmm", 2: "ats"}
    return NvidiaGpu(
        name=" ".join(str(entry["name"]).split())[:120],
        total_bytes=whole("total") or None,
        used_bytes=whole("used"),
        free_bytes=whole("free"),
        reserved_bytes=whole("reserved"),
        compute_capability="" if major is None or minor is None else f"{major}.{minor}",
        bus_bits=whole("bus_bits") or None,
        max_memory_mhz=whole("max_memory_mhz") or None,
        addressing=modes.get(whole("addressing") or 0, "") if "addressing" in entry else "",
        power_limit_w=milliwatts("power_limit_mw"),
        default_power_limit_w=milliwatts("default_power_limit_mw"),
    )


# Column names nvidia-smi prints in its CSV header, as --help-query-gpu documents them.
SMI_FIELDS = "name,memory.total,memory.used,memory.free,compute_cap,clocks.max.memory,power.limit"


def smi(text: str) -> list[NvidiaGpu]:
    """What nvidia-smi printed, in any of its three forms: CSV query, -q log, or the table it prints by default.

    "[N/A]", "[Not Supported]", "N/A" and errors in place of a number mean: unknown.
    """
    return _smi_csv(text) or _smi_log(text) or _smi_table(text)


def _smi_csv(text: str) -> list[NvidiaGpu]:
    """`nvidia-smi --query-gpu=… --format=csv` with its header line, whatever columns were asked for."""
    lines = [line for line in text.splitlines() if line.strip()]
    start = next((i for i, line in enumerate(lines) if "name" in [cell.strip() for cell in line.split(",")]), None)
    if start is None:
        return []
    header = [cell.split("[")[0].strip() for cell in lines[start].split(",")]
    gpus = []
    try:
        for cells in csv.reader(lines[start + 1 :], skipinitialspace=True):
            row = dict(zip(header, (cell.strip() for cell in cells), strict=False))
            if row.get("name") and len(cells) == len(header):
                gpus.append(_from_smi(row))
    except csv.Error:
        pass
    return gpus


def _from_smi(row: Mapping[str, str]) -> NvidiaGpu:
    capability = row.get("compute_cap", "")
    return NvidiaGpu(
        name=row["name"][:120],
        total_bytes=_mib(row.get("memory.total")) or None,
        used_bytes=_mib(row.get("memory.used")),
        free_bytes=_mib(row.get("memory.free")),
        compute_capability=capability if decimal(capability) is not None else "",
        max_memory_mhz=integer(row.get("clocks.max.memory") or row.get("clocks.max.mem")),
        power_limit_w=decimal(row.get("power.limit")),
    )


def _smi_log(text: str) -> list[NvidiaGpu]:
    """`nvidia-smi -q`: indented "key : value" lines under headings, one block per "GPU 00000000:01:00.0"."""
    gpus = []
    for block in re.split(r"(?m)^GPU [0-9A-Fa-f:.]+[ \t]*$", text)[1:]:
        name = re.search(r"(?m)^\s+Product Name\s*: (.+)$", block)
        if name is None:
            continue
        memory, clocks = _section(block, "FB Memory Usage"), _section(block, "Max Clocks")
        mode = re.search(r"(?m)^\s+Addressing Mode\s*: (\w+)", block)
        limit = re.search(r"(?m)^\s+(?:Current |Enforced )?Power Limit\s*: ([0-9.]+) W", block)
        gpus.append(
            NvidiaGpu(
                name=" ".join(name.group(1).split())[:120],
                total_bytes=_mib(memory.get("Total")) or None,
                used_bytes=_mib(memory.get("ProcessorTimes")),
                free_bytes=_mib(memory.get("Free")),
                reserved_bytes=_mib(memory.get("Reserved")),
                max_memory_mhz=integer(clocks.get("Memory")),
                addressing=mode.group(1).lower() if mode and mode.group(1) in ("None", "HMM", "ATS") else "",
                power_limit_w=decimal(limit.group(1)) if limit else None,
            )
        )
    return gpus


def _section(block: str, heading: str) -> dict[str, str]:
    """The "key : value" lines right below `heading`, which sit deeper than it."""
    found = re.search(rf"(?m)^( +){re.escape(heading)}[ \t]*\n((?:\1 +\S.*\n?)*)", block)
    return key_values(found.group(2)) if found else {}


def _mib(text: str | None) -> int | None:
    number = integer(text)
    return None if number is None or number < 0 else number * MIB


def _smi_table(text: str) -> list[NvidiaGpu]:
    """The table nvidia-smi prints by default: two lines per GPU, "507MiB / 24564MiB" or "Not Supported".

    Older drivers cut long names ("NVIDIA GeForce RTX 3070 ..."): such a name tells a laptop's GPU from a desktop's no
    longer, so it matches no row.
    """
    rows = re.findall(
        r"(?m)^\s*\|\s+[0-9]{1,3}\s{2,}(\S.*?)\s{2,}\S.*\|.*\|.*\|[ \t]*\n"
        r"\s*\|[^|\n]*\|([^|\n]*)\|",
        text,
    )
    gpus = []
    for name, memory in rows:
        figures = re.search(r"([0-9]{1,9})MiB\s*/\s*([0-9]{1,9})MiB", memory)
        gpus.append(
            NvidiaGpu(
                name=" ".join(name.split())[:120],
                total_bytes=int(figures.group(2)) * MIB if figures else None,
                used_bytes=int(figures.group(1)) * MIB if figures else None,
            )
        )
    return gpus
