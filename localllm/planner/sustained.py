"""What a power limit leaves of a speed under load that lasts: a stated factor, for machines known to have one."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from localllm.device.types import Device
from localllm.planner.types import Range

_LAPTOP = re.compile(r"\b(laptop|mobile|max-q)\b", re.I)
_T4 = re.compile(r"\btesla t4\b", re.I)


@dataclass(frozen=True, slots=True)
class Limit:
    """The share of a predicted speed that may be left, and what that rests on."""

    share: float
    why: str


# An RTX 3080 Ti Laptop held to 115 W decoded Qwen3.8-27B at 14.8 tokens/s where 25.6 are predicted (github.com/sudoingX/
# qwen38-mtp, pull request 56); an RTX 3090 held to 250 of its 350 W at 31.9 of 39 (pull request 42).
_LAPTOP_LIMIT = Limit(
    0.6, "a laptop's power limit may leave 60% of these speeds under lasting load (an RTX 3080 Ti held to 115 W: 58%)"
)
_T4_LIMIT = Limit(0.6, "70 W may leave a T4 60% of these speeds under lasting load (assumed, as of laptops)")


def limit_of(device: Device) -> Limit | None:
    """The limit of a laptop's graphics card or a T4; None for what holds its speed."""
    name = f"{device.match or ''} {device.name}"
    if device.kind != "discrete":
        return None
    if _LAPTOP.search(name):
        return _LAPTOP_LIMIT
    return _T4_LIMIT if _T4.search(name) else None


def within(device: Device, predicted: Range) -> Range:
    """`predicted` with its lower end where a lasting load may bring it."""
    limit = limit_of(device)
    return predicted if limit is None else replace(predicted, low=min(predicted.low, predicted.value * limit.share))
