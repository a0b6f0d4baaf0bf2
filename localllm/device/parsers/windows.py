"""Parse text from Windows' registry, GlobalMemoryStatusEx and CIM."""

from __future__ import annotations

import re
from dataclasses import dataclass

from localllm.device.parsers import from_json, integer, key_values
from localllm.device.parsers.dimms import Ram, Stick, ram_of


@dataclass(frozen=True, slots=True)
class Adapter:
    """A display adapter from the registry.

    - `name`: the driver's name for it.
    - `memory_bytes`: its own memory.
    - `vendor`: the vendor's PCI id ("" = not PCI).
    """

    name: str
    memory_bytes: int
    vendor: str


_DISPLAY_CLASS = "{4d36e968-e325-11ce-bfc1-08002be10318}"


def adapters(text: str) -> list[Adapter]:
    """Parse `reg query` of the display class.

    Each subkey gives DriverDesc, HardwareInformation.qwMemorySize and MatchingDeviceId.
    Win32_VideoController.AdapterRAM is not used: it is a uint32 and stops at 4 GB. Two identical
    entries are two cards. A removed card may still be listed, because its key stays.
    """
    adapters_listed: list[Adapter] = []
    for block in re.split(r"(?m)^HKEY_LOCAL_MACHINE", text):
        if _DISPLAY_CLASS not in block.lower():
            continue
        values = {
            name.strip(): value.strip()
            for name, value in re.findall(r"(?m)^ {4}(\S.*?) {4}REG_[A-Z_]+ {4}(.*)$", block)
        }
        name = values.get("DriverDesc", "")
        if not name:
            continue
        memory = _registry_number(values.get("HardwareInformation.qwMemorySize"))
        vendor_match = re.search(r"ven_([0-9a-f]{4})", values.get("MatchingDeviceId", "").lower())
        adapters_listed.append(
            Adapter(name[:120], memory, vendor_match.group(1) if vendor_match else "")
        )
    return adapters_listed


def _registry_number(value: str | None) -> int:
    """Parse a REG_QWORD (0x5fee00000) or a little-endian REG_BINARY of up to eight bytes.

    Returns 0 for anything else.
    """
    text = (value or "").lower()
    if re.fullmatch(r"0x[0-9a-f]{1,16}", text):
        return int(text, 16)
    if re.fullmatch(r"(?:[0-9a-f]{2}){1,8}", text):
        return int.from_bytes(bytes.fromhex(text), "little")
    return 0


def processor(text: str) -> str:
    """Return ProcessorNameString of the registry's CentralProcessor key."""
    match = re.search(r"ProcessorNameString\s+REG_SZ\s+(.+)", text)
    if match:
        return " ".join(match.group(1).split())[:120]
    return ""


def memory_status(text: str) -> tuple[int, int] | None:
    """Return (total, available) bytes from the lines of our GlobalMemoryStatusEx probe.

    A line is, for example, "ullTotalPhys: N".
    """
    values = key_values(text)
    total = integer(values.get("ullTotalPhys"))
    available = integer(values.get("ullAvailPhys"))
    if not total or total <= 0:
        return None
    return total, min(max(available or 0, 0), total)


def physical_memory(text: str, channels: int = 0) -> Ram | None:
    """Parse `Get-CimInstance Win32_PhysicalMemory | Select … | ConvertTo-Json`.

    It prints a list with one object per stick, or a single object. `channels` is passed to ram_of.
    """
    data = from_json(text)
    if not isinstance(data, list):
        data = [data]
    sticks = []
    for stick in data:
        if not isinstance(stick, dict):
            continue
        position = f"{stick.get('BankLabel', '')} {stick.get('DeviceLocator', '')}"
        speed = stick.get("ConfiguredClockSpeed") or stick.get("Speed")
        bits = stick.get("DataWidth") or 64
        sticks.append(Stick(position, _number_or_0(speed), _number_or_0(bits)))
    return ram_of(sticks, channels)


def _number_or_0(value: object) -> int:
    return value if isinstance(value, int) else 0
