"""Watts and joules while something runs: read from RAPL, nvidia-smi, powermetrics or the battery,
whichever says."""

from __future__ import annotations

import glob
import os
import re
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from types import TracebackType

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
    """What is drawn now, and who says so: a GPU before the battery, for the rest of the machine
    hardly changes."""
    if shutil.which("nvidia-smi"):
        said = power.nvidia_w(
            run("nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits")
        )
        if said is not None:
            return said, "nvidia-smi, the GPUs alone"
    if sys.platform == "darwin":
        if os.geteuid() == 0:
            said = power.powermetrics_w(
                run("powermetrics", "-n", "1", "-i", "200", "--samplers", "cpu_power")
            )
            if said is not None:
                return said, "powermetrics, the chip"
        said = power.mac_battery_w(run("ioreg", "-rn", "AppleSmartBattery"))
    else:
        texts = [read_text(file) for file in glob.glob("/sys/class/power_supply/*/uevent")]
        said = power.battery_w([text for text in texts if text])
    return (said, "the battery, the whole machine") if said is not None else None


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
        if not self._counters or shutil.which("nvidia-smi"):  # a processor's counters miss a GPU
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

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        seconds = time.monotonic() - self._began_s
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        counted = power.used_j(self._counters, counters()) if self._counters else None
        mean_w = (
            sum(watts for _, watts in self._samples) / len(self._samples) if self._samples else None
        )
        if mean_w is not None and counted is not None:
            self.use = PowerUse(mean_w * seconds + counted, seconds, f"{self._source}, and RAPL")
        elif mean_w is not None:
            self.use = PowerUse(mean_w * seconds, seconds, self._source)
        elif counted is not None:
            self.use = PowerUse(
                counted, seconds, f"RAPL: {', '.join(zone.name for zone in self._counters)}"
            )
