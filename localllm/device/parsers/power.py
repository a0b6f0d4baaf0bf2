"""What RAPL, nvidia-smi, batteries and powermetrics say to watts and joules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from localllm.device.parsers import decimal, key_values


@dataclass(frozen=True, slots=True)
class EnergyCounter:
    """A RAPL zone: joules since some time, which begin anew at `range_j`."""

    name: str
    joules: float
    range_j: float


def rapl(zones: Mapping[str, tuple[str | None, str | None, str | None]]) -> list[EnergyCounter]:
    """The zones that add up to the machine, of (name, energy_uj, max_energy_range_uj) by their
    folders' names.

    `psys` counts the whole platform; else the packages, and DRAM, which is beside them and not in
    them (https://docs.kernel.org/power/powercap/powercap.html). What can't be read is left out:
    energy_uj is root's alone since CVE-2020-8694.
    """
    found = []
    for name, energy, most in zones.values():
        joules, range_j = decimal(energy or ""), decimal(most or "")
        if name and joules is not None:
            found.append(EnergyCounter(name.strip(), joules / 1e6, (range_j or 0.0) / 1e6))
    whole = [zone for zone in found if zone.name.startswith("psys")]
    return whole or [zone for zone in found if zone.name.startswith(("package", "dram"))]


def used_j(before: Sequence[EnergyCounter], after: Sequence[EnergyCounter]) -> float | None:
    """Joules between two readings of the same zones; a counter that is less began anew. None where
    they differ."""
    if not before or [zone.name for zone in before] != [zone.name for zone in after]:
        return None
    pairs = zip(before, after, strict=True)
    return sum(b.joules - a.joules + (b.range_j if b.joules < a.joules else 0.0) for a, b in pairs)


def nvidia_w(csv: str) -> float | None:
    """Watts of all GPUs of `nvidia-smi --query-gpu=power.draw --format=csv,noheader,nounits`; None
    where one does not say."""
    drawn = [decimal(line.strip()) for line in csv.splitlines() if line.strip()]
    return sum(w for w in drawn if w is not None) if drawn and None not in drawn else None


def battery_w(uevents: Sequence[str]) -> float | None:
    """Watts that Linux's batteries give (their `uevent` files); None where none is being emptied or
    one does not say."""
    watts = []
    for text in uevents:
        told = key_values(text, "=")
        if (
            told.get("POWER_SUPPLY_TYPE") != "Battery"
            or told.get("POWER_SUPPLY_STATUS") != "Discharging"
        ):
            continue
        power = decimal(told.get("POWER_SUPPLY_POWER_NOW", ""))
        current, volts = (
            decimal(told.get(f"POWER_SUPPLY_{name}_NOW", "")) for name in ("CURRENT", "VOLTAGE")
        )
        if power is not None:
            watts.append(power / 1e6)
        elif current is not None and volts is not None:
            watts.append(abs(current) * volts / 1e12)
    return sum(watts) if watts else None


def mac_battery_w(ioreg: str) -> float | None:
    """Watts out of a Mac's battery, of `ioreg -rn AppleSmartBattery`; None at the mains. The
    current is a signed number that is printed without its sign."""
    if re.search(r'"ExternalConnected" = Yes', ioreg):
        return None
    found = {
        name: re.search(rf'"{name}" = (\d+)', ioreg)
        for name in ("InstantAmperage", "Amperage", "Voltage")
    }
    current, volts = found["InstantAmperage"] or found["Amperage"], found["Voltage"]
    if current is None or volts is None:
        return None
    milliamperes = int(current[1])
    milliamperes -= (1 << 64) if milliamperes >= 1 << 63 else 0
    return -milliamperes * int(volts[1]) / 1e6 if milliamperes < 0 else None


def powermetrics_w(said: str) -> float | None:
    """Watts of the chip, of `powermetrics -n 1 --samplers cpu_power`, which root alone may run."""
    found = re.search(r"Combined Power \(CPU \+ GPU(?: \+ ANE)?\): (\d+) mW", said)
    return int(found[1]) / 1000 if found else None
