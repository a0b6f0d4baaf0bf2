"""What a model's speed depends on beside the machine: driver, power profile, heat, other programs. Cheap: read at each start."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.device.probes import nvidia, read_text, run

# Processors throttle themselves near here; graphics cards somewhat below.
_HOT_C = 90.0
_STALLED_PERCENT = 5.0


@dataclass(frozen=True, slots=True)
class Conditions:
    """`lasting`: what stays until somebody changes it, by name ("" or absent: it can't be read here). `now`: sentences on
    what goes on in this moment and slows a model down, none where nothing is known to."""

    lasting: Mapping[str, str] = field(default_factory=dict)
    now: Sequence[str] = ()


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What is otherwise than before, as "name: then → now"; what could not be read at one of the times is not said."""
    return [
        f"{name}: {before[name]} → {value}"
        for name, value in after.items()
        if value and before.get(name) and before[name] != value
    ]


def moment(
    *,
    hottest_c: float | None = None,
    stalled_percent: float | None = None,
    on_battery: bool | None = None,
    throttled: Sequence[str] = (),
    beside: Sequence[str] = (),
) -> list[str]:
    """Sentences on what slows a model down now. `throttled`: the graphics card's reasons; `beside`: other programs that
    compute on it."""
    said = []
    if hottest_c is not None and hottest_c >= _HOT_C:
        said.append(f"the machine is {hottest_c:.0f} °C hot, and slows itself down")
    if throttled:
        said.append(f"the graphics card holds itself back: {', '.join(throttled)}")
    if stalled_percent is not None and stalled_percent > _STALLED_PERCENT:
        said.append(f"programs wait for memory ({stalled_percent:.0f} % of the last 10 s)")
    if on_battery:
        said.append("the machine runs on battery")
    if beside:
        said.append(f"{', '.join(beside)} computes on the graphics card too")
    return said


# NVML's bits for clocks that are lowered by heat or by power, of which the card's idling is none.
_THROTTLES = {0x8: "a hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "a power brake"}


def read(ours: frozenset[int] = frozenset()) -> Conditions:
    """The conditions now; `ours` are process ids that are no neighbours. What can't be read is not there."""
    governor = read_text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or ""
    lasting = {"power profile": _profile(), "governor": governor.strip()}
    throttled: list[str] = []
    beside: list[str] = []
    with nvidia.session() as api:
        if api is not None:
            lasting["NVIDIA driver"] = nvidia.text(api.nvmlSystemGetDriverVersion())
            for handle in map(api.nvmlDeviceGetHandleByIndex, range(int(api.nvmlDeviceGetCount()))):
                throttled += _throttles(api, handle)
                beside += _neighbours(api, handle, ours)
    found = re.search(r"some avg10=([0-9]+\.[0-9]+)", read_text("/proc/pressure/memory") or "")
    now = moment(
        hottest_c=_hottest_c(),
        stalled_percent=float(found.group(1)) if found else None,
        on_battery=on_battery(),
        throttled=sorted(set(throttled)),
        beside=sorted(set(beside)),
    )
    return Conditions({name: value for name, value in lasting.items() if value}, now)


def _profile() -> str:
    if sys.platform == "darwin":
        found = re.search(r"\b(?:lowpowermode|powermode)\s+(\d)", run("/usr/bin/pmset", "-g") or "")
        return {"0": "normal", "1": "low power", "2": "high power"}.get(found.group(1), "") if found else ""
    return (read_text("/sys/firmware/acpi/platform_profile") or "").strip()


def _hottest_c() -> float | None:
    import psutil

    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError, RuntimeError, ValueError):
        return None
    return max((s.current for group in sensors.values() for s in group if s.current), default=None)


def on_battery() -> bool | None:
    """Whether this machine runs on its battery; None where it does not say."""
    import psutil

    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError):
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def _throttles(api: Any, handle: Any) -> list[str]:
    with contextlib.suppress(api.NVMLError, AttributeError):
        bits = int(api.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return [said for bit, said in _THROTTLES.items() if bits & bit]
    return []


def _neighbours(api: Any, handle: Any, ours: frozenset[int]) -> list[str]:
    import psutil

    found = []
    with contextlib.suppress(api.NVMLError, AttributeError):
        for process in api.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid in ours or process.pid == os.getpid():
                continue
            try:
                found.append(psutil.Process(process.pid).name())
            except (psutil.Error, OSError):
                found.append(f"process {process.pid}")
    return found
