"""Measure energy in joules with RAPL and NVML, as far as they are available."""

from __future__ import annotations

import glob
import re
import time
from dataclasses import dataclass

from localllm.device.parsers import power
from localllm.device.probes import nvidia, read_text


@dataclass(frozen=True, slots=True)
class PowerUse:
    """Joules in `seconds`, and their source.

    The joules include the use of other programs.
    """

    joules: float
    seconds: float
    source: str

    @property
    def watts(self) -> float:
        return self.joules / self.seconds


def counters() -> list[power.EnergyCounter]:
    """Return the energy counters of processors and GPUs, or an empty list if they cannot be read."""
    folders = sorted(glob.glob("/sys/class/powercap/intel-rapl*:*"))
    zone_texts = {}
    for folder in folders:
        zone_texts[folder] = (
            read_text(f"{folder}/name"),
            read_text(f"{folder}/energy_uj"),
            read_text(f"{folder}/max_energy_range_uj"),
        )
    zones = power.rapl(zone_texts)
    return [
        *zones,
        *(power.EnergyCounter(*name_and_joules, 0.0) for name_and_joules in nvidia.energy()),
    ]


def power_figures() -> dict[str, float]:
    """Return the joules of each counter by its Prometheus name, or {} without counters."""
    return {
        f"localllm_energy_{re.sub(r'[^a-z0-9]', '_', zone.name)}_{n}_joules_total": zone.joules
        for n, zone in enumerate(counters())
    }


class PowerMeter:
    """Measure the energy used inside a `with` block.

    `use` is the result after the block, or None if no counter could be read.
    """

    use: PowerUse | None = None

    def __enter__(self) -> PowerMeter:
        self._before = counters()
        self._began_s = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.monotonic() - self._began_s
        joules = power.used_j(self._before, counters())
        if joules is not None:
            self.use = PowerUse(joules, seconds, ", ".join(zone.name for zone in self._before))
