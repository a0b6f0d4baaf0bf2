"""Joules while something runs: read from RAPL and NVML, whichever says."""

from __future__ import annotations

import glob
import re
import time
from dataclasses import dataclass

from localllm.device.parsers import power
from localllm.device.probes import nvidia, read_text


@dataclass(frozen=True, slots=True)
class PowerUse:
    """Joules in `seconds`, and whose they are: all that the source counts, other programs' too."""

    joules: float
    seconds: float
    source: str

    @property
    def watts(self) -> float:
        return self.joules / self.seconds


def counters() -> list[power.EnergyCounter]:
    """The machine's energy counters, of its processors and GPUs; none where they can't be read."""
    folders = sorted(glob.glob("/sys/class/powercap/intel-rapl*:*"))
    read = {}
    for folder in folders:
        read[folder] = (
            read_text(f"{folder}/name"),
            read_text(f"{folder}/energy_uj"),
            read_text(f"{folder}/max_energy_range_uj"),
        )
    zones = power.rapl(read)
    return [*zones, *(power.EnergyCounter(*one, 0.0) for one in nvidia.energy())]


def power_figures() -> dict[str, float]:
    """What a monitor wants to know, by Prometheus' names: joules of each counter. Nothing where
    nothing says."""
    return {
        f"localllm_energy_{re.sub(r'[^a-z0-9]', '_', zone.name)}_{n}_joules_total": zone.joules
        for n, zone in enumerate(counters())
    }


class PowerMeter:
    """Measures what is used while it is entered: `use` afterwards, None where nothing says."""

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
