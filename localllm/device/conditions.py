"""What a model's speed depends on beside the machine itself: the driver, the power profile, and what goes on just now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
