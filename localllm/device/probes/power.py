"""Watts and joules while something runs: read from RAPL and nvidia-smi, whichever says."""

from __future__ import annotations

import glob
import re
import shutil
import threading
import time
from dataclasses import dataclass

from localllm.device.parsers import power
from localllm.device.probes import read_text, run

# nvidia-smi's own figure is an average over as long.
_EVERY_S = 0.25


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
    """The machine's energy counters; none where they can't be read."""
    folders = sorted(glob.glob("/sys/class/powercap/intel-rapl*:*"))
    return power.rapl(
        {
            folder: (
                read_text(f"{folder}/name"),
                read_text(f"{folder}/energy_uj"),
                read_text(f"{folder}/max_energy_range_uj"),
            )
            for folder in folders
        }
    )


def watts_now() -> tuple[float, str] | None:
    """What the GPUs draw now, and who says so; None where nobody does."""
    if not shutil.which("nvidia-smi"):
        return None
    drawn = run("nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits")
    watts = power.nvidia_w(drawn)
    return (watts, "nvidia-smi, the GPUs alone") if watts is not None else None


def power_figures() -> dict[str, float]:
    """What a monitor wants to know, by Prometheus' names: joules of each counter, watts now.
    Nothing where nothing says."""
    figures: dict[str, float] = {}
    for n, zone in enumerate(counters()):
        figures[f"localllm_energy_{re.sub(r'[^a-z0-9]', '_', zone.name)}_{n}_joules_total"] = (
            zone.joules
        )
    now = watts_now()
    return figures | {"localllm_power_watts": now[0]} if now is not None else figures


class PowerMeter:
    """Measures what is used while it is entered: `use` afterwards, None where nothing says."""

    def __init__(self) -> None:
        self.use: PowerUse | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="power", daemon=True)
        self._samples: list[tuple[float, float]] = []
        self._source = ""

    def __enter__(self) -> PowerMeter:
        self._counters, self._began_s = counters(), time.monotonic()
        self._thread.start()
        return self

    def _sample(self) -> None:
        while True:
            now = watts_now()
            if now is None:
                return
            self._samples.append((time.monotonic(), now[0]))
            self._source = now[1]
            if self._ended.wait(_EVERY_S):
                return

    def __exit__(self, *_: object) -> None:
        seconds = time.monotonic() - self._began_s
        self._ended.set()
        self._thread.join()
        joules, sources = 0.0, []
        if self._samples:
            watts = sum(watts for _, watts in self._samples) / len(self._samples)
            joules += watts * seconds
            sources.append(self._source)
        counted = power.used_j(self._counters, counters())
        if counted is not None:
            joules += counted
            sources.append(f"RAPL: {', '.join(zone.name for zone in self._counters)}")
        if sources:
            self.use = PowerUse(joules, seconds, ", and ".join(sources))
