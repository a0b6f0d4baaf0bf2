"""Figures measured on this machine, kept in the cache for its next starts, with how busy the
machine was meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm import json_store
from localllm.device.types import Figure

# Where other programs have more than this share of the processor, what is left of a machine is not
# what it gives. Such a figure serves until a better one, which is tried for so many times: some
# machines are never quiet.
BUSY_SHARE = 0.15
_MOST_TRIES = 5


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured on `date`, in the unit of its shelf, and by what (`how`). `others_share`: of
    the processor's time, what other programs had meanwhile."""

    value: float
    how: str
    date: str
    others_share: float = 0.0

    @property
    def busy(self) -> bool:
        """True where other programs had so much of the machine that the figure is theirs as much as
        the machine's."""
        return self.others_share > BUSY_SHARE

    @property
    def figure(self) -> Figure:
        """The figure, with how and when it was found."""
        source = f"{self.how}, {self.date}"
        if self.busy:
            source += f", while other programs had {self.others_share:.0%} of the processor"
        return Figure(self.value, "measured", source, self.busy)


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """Processor time so far, in seconds over all cores: of this process, of all, and what there was
    of it."""

    own_s: float
    all_s: float
    there_s: float

    @classmethod
    def now(cls, *, child_s: float = 0.0) -> ProcessorTimes:
        """`child_s`: what a child that measured for us had, which is ours too."""
        import psutil

        times = psutil.cpu_times()._asdict()
        # A guest's time is part of its host's `user` (proc_stat(5)).
        spent = {name: s for name, s in times.items() if not name.startswith("guest")}
        idle = spent.get("idle", 0.0) + spent.get("iowait", 0.0)
        there = sum(spent.values())
        return cls(time.process_time() + child_s, there - idle, there)

    def others_share(self, later: ProcessorTimes) -> float:
        """Of the processor's time between this and `later`, what other programs had."""
        there = later.there_s - self.there_s
        others = (later.all_s - self.all_s) - (later.own_s - self.own_s)
        if there > 0:
            return min(max(others / there, 0.0), 1.0)
        return 0.0


@dataclass(frozen=True, slots=True)
class FigureFile:
    """A file of figures in the cache's folder, one of each machine; what is outside `sane` is none.
    `folder` is the cache's in every call, `machine` names what was measured."""

    file_name: str
    sane: tuple[float, float]

    def cached(self, folder: Path, machine: str) -> Figure | None:
        """The figure kept for `machine`, None if there is none or it is unreadable."""
        return self._figure(json_store.read(folder / self.file_name).get(machine))

    def reliable(self, folder: Path, machine: str) -> Figure | None:
        """The figure kept for `machine` that later ones won't better: what plans count on, which
        must not go by the load."""
        return self.reliable_of(folder, machine).get("")

    def reliable_of(self, folder: Path, start: str) -> dict[str, Figure]:
        """The `reliable` figures of every machine whose name begins so, by the rest of the name."""
        found = {}
        for name, entry in json_store.read(folder / self.file_name).items():
            if not name.startswith(start) or 0 < _tries(entry) < _MOST_TRIES:
                continue
            figure = self._figure(entry)
            if figure is not None:
                found[name.removeprefix(start)] = figure
        return found

    def due(self, folder: Path, machine: str) -> bool:
        """True where `machine` has no figure, or one of a busy moment that was not tried often
        enough to better."""
        return self.reliable(folder, machine) is None

    def keep(self, folder: Path, machine: str, taken: Measurement) -> Figure:
        """Remember what was `taken` for `machine`, and return it: see `keep_all`."""
        return self.keep_all(folder, {machine: taken})[machine]

    def keep_all(self, folder: Path, taken: Mapping[str, Measurement]) -> dict[str, Figure]:
        """Remember what was `taken` for each machine, and return it; a cache that can't be written
        is no error (it is measured again). A figure of a busy moment gives way to a higher one
        alone, and is never put in place of a higher one: no machine is faster than it is."""
        known = json_store.read(folder / self.file_name)
        figures = {
            machine: self._better(known, machine, measured) for machine, measured in taken.items()
        }
        json_store.keep(folder / self.file_name, known)
        return figures

    def _better(self, known: dict[str, Any], machine: str, taken: Measurement) -> Figure:
        """What counts for `machine` from now on, `known` brought up to it."""
        kept = self._figure(known.get(machine))
        tries = _tries(known.get(machine))
        figure = taken.figure
        if kept is not None and kept.value > figure.value:
            if taken.busy and not tries:
                return kept
            if tries:
                figure = kept
        entry = {"value": figure.value, "source": figure.source}
        if taken.busy:
            entry["tries"] = tries + 1
        known[machine] = entry
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
    """How often a machine was measured while it was busy; 0 once it was measured in quiet."""
    tries = entry.get("tries", 0) if isinstance(entry, dict) else 0
    if isinstance(tries, int):
        return tries
    return 0
