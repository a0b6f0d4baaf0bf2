"""What a board's power leaves of the arithmetic of its units: prompts run at the power limit, not at the boost clock.

Cards of one generation multiply more a unit the more watts a unit has: of llama.cpp's scoreboard for CUDA (Llama 2 7B,
512 tokens) an RTX 4080 with 4.2 W for each of its SMs reaches 1.14 times the nominal rate of a unit, an RTX 4090 with 3.5
W 0.94, an L40 with 2.1 W 0.67; on Blackwell 5.2 W 1.20 and 1.6 W 0.71, on Ampere 4.7 W 1.16 and 2.9 W 0.82. Decoding waits
for memory and stays below the limit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from localllm.device.types import Device
from localllm.planner.types import Range

# Board power in watts by `families.part`: the TDP of the pages that devices.toml names, in its notes; of what has none there
# techpowerup.com's (Quadro RTX, RTX A4500, Titan V, V620, Instinct) and of a GB10 its maker's, of an Arc Pro B70
# https://huggingface.co/hardware/arc-pro-b70. A laptop's card is sold with many, so none of them is here.
_BOARD_W = {
    "a100 pcie": 250, "a100 sxm4": 400, "a10g": 150, "a30": 165, "a40": 300, "arc a750": 225, "arc a770": 225,
    "arc b570": 150, "arc b580": 190, "arc pro b50": 70, "arc pro b60": 200, "arc pro b70": 230, "gb10": 140,
    "gtx 1080 ti": 250, "h100 nvl": 400, "h100 pcie": 350, "h100 sxm5": 700, "h200 sxm": 700, "instinct mi100": 300,
    "instinct mi50": 300, "instinct mi60": 300, "l4": 72, "l40": 300, "l40s": 300, "p100": 250, "p40": 250,
    "quadro rtx 6000": 260, "quadro rtx 8000": 260, "radeon ai pro r9700": 300, "radeon pro v620": 300,
    "radeon pro w7900": 295, "radeon rx 6600 xt": 160, "radeon rx 6700 xt": 230, "radeon rx 6800": 250,
    "radeon rx 6800 xt": 300, "radeon rx 6900 xt": 300, "radeon rx 6950 xt": 335, "radeon rx 7600": 165,
    "radeon rx 7600 xt": 190, "radeon rx 7700 xt": 245, "radeon rx 7800 xt": 263, "radeon rx 7900 gre": 260,
    "radeon rx 7900 xt": 300, "radeon rx 7900 xtx": 355, "radeon rx 9060 xt": 160, "radeon rx 9070": 220,
    "radeon rx 9070 xt": 304, "rtx 2060": 160, "rtx 2060 super": 175, "rtx 2070": 175, "rtx 2070 super": 215,
    "rtx 2080": 215, "rtx 2080 super": 250, "rtx 2080 ti": 250, "rtx 3050": 130, "rtx 3060": 170, "rtx 3060 ti": 200,
    "rtx 3060 ti gddr6x": 225, "rtx 3070": 220, "rtx 3070 ti": 290, "rtx 3080": 320, "rtx 3080 ti": 350,
    "rtx 3090": 350, "rtx 3090 ti": 450, "rtx 4060": 115, "rtx 4060 ti": 160, "rtx 4070": 200, "rtx 4070 gddr6": 200,
    "rtx 4070 super": 220, "rtx 4070 ti": 285, "rtx 4070 ti super": 285, "rtx 4080": 320, "rtx 4080 super": 320,
    "rtx 4090": 450, "rtx 4090 d": 425, "rtx 5050": 130, "rtx 5060": 145, "rtx 5060 ti": 180, "rtx 5070": 250,
    "rtx 5070 ti": 300, "rtx 5080": 360, "rtx 5090": 575, "rtx 5090 d": 575, "rtx 5090 d v2": 575,
    "rtx 6000 ada": 300, "rtx a4000": 140, "rtx a4500": 200, "rtx a5000": 230, "rtx a6000": 300,
    "rtx pro 2000 blackwell": 70, "rtx pro 4000 blackwell": 140, "rtx pro 4500 blackwell": 200,
    "rtx pro 5000 blackwell": 300, "rtx pro 6000 blackwell": 600, "rtx pro 6000 blackwell max-q": 300,
    "rtx pro 6000 blackwell server": 600, "t4": 70, "titan v": 250, "v100": 250,
}  # fmt: skip
# Chosen by the devices and files that were left out of benchmarks/planner_fit: exponents from 0.5 to 0.7 do as well.
_EXPONENT = 0.6
_REFERENCE_W_PER_UNIT = 3.5


def share(part: str, units: float) -> float:
    """Of the nominal rate of `units` of a part, the share that its power lets them hold; 1.0 where it is not known."""
    watts = _BOARD_W.get(part, 0)
    return (watts / units / _REFERENCE_W_PER_UNIT) ** _EXPONENT if watts and units else 1.0


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
