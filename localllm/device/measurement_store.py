"""Cache of figures measured on this machine, with the load during each measurement."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm import json_store
from localllm.device.types import Figure

# If other programs use more than this share of the processor, a measurement shows only what they
# left. Such a figure is used until a better one replaces it. Measurements are repeated at most
# `_MAX_TRIES` times, because some machines are never idle.
BUSY_SHARE = 0.15
_MAX_TRIES = 5


@dataclass(frozen=True, slots=True)
class Measurement:
    """A value measured on `date` by the method `how`, in the unit of its FigureFile.

    `others_share` is the share of processor time that other programs used during the measurement.
    """

    value: float
    how: str
    date: str
    others_share: float = 0.0

    @property
    def busy(self) -> bool:
        """True if other programs used so much of the machine that the figure is unreliable."""
        return self.others_share > BUSY_SHARE

    @property
    def figure(self) -> Figure:
        """The value as a Figure, with the method and the date."""
        source = f"{self.how}, {self.date}"
        if self.busy:
            source += f", while other programs used {self.others_share:.0%} of the CPU"
        return Figure(self.value, "measured", source, self.busy)


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """Processor time so far, in seconds over all cores.

    `own_s` is the time of this process, `all_s` the time of all processes, and `elapsed_s` the time
    including idle.
    """

    own_s: float
    all_s: float
    elapsed_s: float

    @classmethod
    def now(cls, *, child_s: float = 0.0) -> ProcessorTimes:
        """Read the current times.

        `child_s` is the time of a child that measured for us. It counts as our own.
        """
        import psutil

        cpu_times = psutil.cpu_times()._asdict()
        # A guest's time is already part of its host's `user` (proc_stat(5)).
        seconds_by_kind = {
            name: seconds for name, seconds in cpu_times.items() if not name.startswith("guest")
        }
        idle_s = seconds_by_kind.get("idle", 0.0) + seconds_by_kind.get("iowait", 0.0)
        elapsed_s = sum(seconds_by_kind.values())
        return cls(time.process_time() + child_s, elapsed_s - idle_s, elapsed_s)

    def others_share(self, later: ProcessorTimes) -> float:
        """Return the share of processor time that other programs used between this and `later`."""
        elapsed_s = later.elapsed_s - self.elapsed_s
        others_s = (later.all_s - self.all_s) - (later.own_s - self.own_s)
        if elapsed_s > 0:
            return min(max(others_s / elapsed_s, 0.0), 1.0)
        return 0.0


@dataclass(frozen=True, slots=True)
class FigureFile:
    """A file in the cache folder with one figure for each machine.

    Values outside `sane` are ignored. In every method, `folder` is the cache folder and `machine`
    names the measured machine.
    """

    file_name: str
    sane: tuple[float, float]

    def cached(self, folder: Path, machine: str) -> Figure | None:
        """Return the figure cached for `machine`, or None if it is missing or unreadable."""
        return self._figure(json_store.read(folder / self.file_name).get(machine))

    def reliable(self, folder: Path, machine: str) -> Figure | None:
        """Return the cached figure for `machine`, unless it is due for another measurement.

        Plans use these figures, because a plan must not depend on the load.
        """
        return self.reliable_of(folder, machine).get("")

    def reliable_of(self, folder: Path, start: str) -> dict[str, Figure]:
        """Return the `reliable` figures of all machines whose name begins with `start`.

        The keys are the rest of each name.
        """
        figures = {}
        for name, entry in json_store.read(folder / self.file_name).items():
            if not name.startswith(start) or 0 < _tries(entry) < _MAX_TRIES:
                continue
            figure = self._figure(entry)
            if figure is not None:
                figures[name.removeprefix(start)] = figure
        return figures

    def due(self, folder: Path, machine: str) -> bool:
        """Return True if `machine` needs a measurement.

        It has no figure, or only one measured while busy that has tries left.
        """
        return self.reliable(folder, machine) is None

    def keep(self, folder: Path, machine: str, measurement: Measurement) -> Figure:
        """Cache the measurement for `machine` and return its figure: see `keep_all`."""
        return self.keep_all(folder, {machine: measurement})[machine]

    def keep_all(self, folder: Path, measurements: Mapping[str, Measurement]) -> dict[str, Figure]:
        """Cache the measurements for each machine and return the figures that now apply.

        A cache that cannot be written is no error: the figure is measured again later. A figure
        measured on a busy machine never replaces a higher one, and only a higher one replaces it,
        because load can only lower a figure.
        """
        stored = json_store.read(folder / self.file_name)
        figures = {
            machine: self._better(stored, machine, measured)
            for machine, measured in measurements.items()
        }
        json_store.keep(folder / self.file_name, stored)
        return figures

    def _better(
        self, stored_entries: dict[str, Any], machine: str, measurement: Measurement
    ) -> Figure:
        """Return the figure that applies to `machine` from now on, and update `stored_entries`."""
        stored_figure = self._figure(stored_entries.get(machine))
        tries = _tries(stored_entries.get(machine))
        figure = measurement.figure
        if stored_figure is not None and stored_figure.value > figure.value:
            if measurement.busy and not tries:
                return stored_figure
            if tries:
                figure = stored_figure
        entry = {"value": figure.value, "source": figure.source}
        if measurement.busy:
            entry["tries"] = tries + 1
        stored_entries[machine] = entry
        return figure

    def _figure(self, entry: Any) -> Figure | None:
        try:
            value = float(entry["value"])
            figure = Figure(value, "measured", str(entry["source"]), _tries(entry) > 0)
        except (ValueError, KeyError, TypeError):
            return None
        if self.sane[0] <= figure.value <= self.sane[1]:
            return figure
        return None


def _tries(entry: object) -> int:
    """Return how many busy measurements a machine has had since its last quiet one."""
    tries = entry.get("tries", 0) if isinstance(entry, dict) else 0
    if isinstance(tries, int):
        return tries
    return 0
