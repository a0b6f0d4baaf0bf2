"""Convert readings of energy counters to joules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from localllm.device.parsers import decimal


@dataclass(frozen=True, slots=True)
class EnergyCounter:
    """A RAPL zone or a GPU: joules since some time. The counter restarts at `range_j`."""

    name: str
    joules: float
    range_j: float


def rapl(zones: Mapping[str, tuple[str | None, str | None, str | None]]) -> list[EnergyCounter]:
    """Return the zones that add up to the machine's energy.

    `zones` maps folder names to (name, energy_uj, max_energy_range_uj). `psys` counts the whole
    platform. Without it, the packages and DRAM are added. DRAM is separate from the packages
    (https://docs.kernel.org/power/powercap/powercap.html). Unreadable zones are left out: only root
    can read energy_uj since CVE-2020-8694.
    """
    counters = []
    for name, energy, max_energy in zones.values():
        joules = decimal(energy or "")
        range_j = decimal(max_energy or "")
        if name and joules is not None:
            counters.append(EnergyCounter(name.strip(), joules / 1e6, (range_j or 0.0) / 1e6))
    platform_zones = [zone for zone in counters if zone.name.startswith("psys")]
    return platform_zones or [
        zone for zone in counters if zone.name.startswith(("package", "dram"))
    ]


def used_j(before: Sequence[EnergyCounter], after: Sequence[EnergyCounter]) -> float | None:
    """Return the joules between two readings of the same zones, or None if the zones differ.

    A counter that decreased has restarted.
    """
    if not before or [zone.name for zone in before] != [zone.name for zone in after]:
        return None
    return sum(
        earlier.joules - later.joules + (earlier.range_j if earlier.joules < later.joules else 0.0)
        for later, earlier in zip(before, after, strict=True)
    )
