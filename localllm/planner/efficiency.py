"""How close each kind of machine comes to its limits: the table (efficiency.toml), its keys,
nominal rates, power limits.

Every coefficient is exp(base + Σ effects): the keys of a machine and model (engine, chip
generation, part, format …) each add what was learnt about them, so an unseen part falls back on its
generation and an unseen generation on its engine. benchmarks/planner_fit writes the table from
published measurements.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from localllm.device.types import Device
from localllm.planner.kernel_facts import facts
from localllm.planner.types import Range
from localllm_backends import registry
from localllm_catalog.types import Variant

FILE = Path(__file__).with_name("efficiency.toml")


@dataclass(frozen=True, slots=True)
class Table:
    """Coefficients of one law ("decode", "prefill" or "batched"), and the effects of keys on them:
    natural logs. `rows` counts measurements behind each key, `width` has that of an 80 % range by
    stratum (localllm/planner/ranges.py)."""

    base: Mapping[str, float]
    effects: Mapping[str, Mapping[str, float]]
    rows: Mapping[str, int]
    width: Mapping[str, float]

    def nearest(self, hardware_keys: Iterable[str]) -> tuple[str, int]:
        """The most specific hardware key with measurements, and how many ("none", 0 where nothing
        is known)."""
        found = ("none", 0)
        for key in hardware_keys:
            if self.rows.get(key, 0) > 0:
                found = (key, self.rows[key])
        return found


@cache
def load() -> dict[str, Table]:
    """The shipped tables by law name. Package data: read once per process."""
    with FILE.open("rb") as f:
        raw = tomllib.load(f)
    return {
        name: Table(
            base=raw[name]["base"],
            effects=raw[name].get("effects", {}),
            rows=raw[name].get("rows", {}),
            width=raw[name].get("width", {}),
        )
        for name in ("decode", "prefill", "batched")
    }


@lru_cache(maxsize=4096)
def coefficients(law: str, keys: tuple[str, ...]) -> dict[str, float]:
    """Every coefficient of a law with the effects of `keys` (unknown ones add nothing), remembered
    (read-only: every caller gets the same dict)."""
    table = load()[law]
    logs = dict(table.base)
    for key in keys:
        for name, value in table.effects.get(key, {}).items():
            logs[name] = logs.get(name, 0.0) + value
    return {name: math.exp(value) for name, value in logs.items()}


# (pattern in the part's name, vendor, generation), first match wins. Grouped by what shares memory
# system and kernels.
_GENERATIONS: tuple[tuple[str, str, str], ...] = (
    (r"gb10|dgx spark|gx10|n1x|rtx spark", "nvidia", "gb10"),
    (r"jetson|orin|thor", "nvidia", "jetson"),
    (r"\bada\b|rtx 40\d\d|\bl40s?\b|\bl4\b", "nvidia", "ada"),
    (r"\b(a30|a100|a800|g?h[128]00|h20)\b", "nvidia", "hbm"),
    (r"\bg?b[123]00\b", "nvidia", "b200"),
    (r"rtx (pro )?50\d\d|rtx pro|blackwell", "nvidia", "blackwell"),
    (r"rtx 30\d\d|rtx a\d{4}|\ba40\b|a10g|\ba10\b", "nvidia", "ampere"),
    (r"rtx 20\d\d|quadro rtx|titan v|v100|\bt4\b|gtx 16", "nvidia", "turing"),
    (r"p40|p100|gtx 10", "nvidia", "pascal"),
    (r"strix halo|ai max|gorgon halo|8060s|8050s", "amd", "strix-halo"),
    (r"r9700|rx 90\d\d|rdna4", "amd", "rdna4"),
    (r"rx 7\d\d\d|w7\d\d\d|rdna3", "amd", "rdna3"),
    (r"rx 6\d\d\d|v620|w6\d\d\d", "amd", "rdna2"),
    (r"\brx 5[5-7]00\b", "amd", "rdna1"),
    (r"\bmi[56]0\b|radeon vii\b|rx vega", "amd", "gcn"),
    (r"\brx [45][5-9]0\b", "amd", "polaris"),
    (r"\bmi3\d\d[ax]?\b", "amd", "cdna3"),
    (r"instinct|mi\d{2,3}x?\b", "amd", "cdna"),
    (r"radeon|ryzen|amd", "amd", "apu"),
    (r"\barc\b|intel|core ultra|xe2?\b", "intel", "arc"),
    (r"snapdragon|adreno", "qualcomm", "adreno"),
    (r"nvidia|geforce|rtx", "nvidia", "cuda-other"),
)


# Parts whose cores, and so whose kernels, are those of another generation; memory and clocks are
# their own.
_KERNELS_OF = {"gb10": "blackwell", "strix-halo": "rdna3"}


@lru_cache(maxsize=1024)
def generation(name: str) -> tuple[str, str, str]:
    """(vendor, generation, tier) of a part's name; tier is Apple's base / pro / max / ultra, else
    ""."""
    lower = name.lower()
    apple = re.search(r"\b(m\d{1,2}|a1[4-9])(?: (pro|max|ultra))?\b", lower)
    if apple and ("apple" in lower or lower.startswith(apple.group(0)[:2])):
        tier = apple.group(2) if apple.group(1)[0] == "m" else None
        return "apple", apple.group(1), tier or "base"
    for pattern, vendor, name_of in _GENERATIONS:
        if re.search(pattern, lower):
            return vendor, name_of, ""
    return "", "", ""


@lru_cache(maxsize=1024)
def part(name: str) -> str:
    """A part's name as its measurements are filed: no vendor, no memory size, no core count, lower
    case."""
    vendor, gen, tier = generation(name)
    if vendor == "apple":
        if tier != "base":
            return f"{gen} {tier}"
        return gen
    if gen in ("gb10", "strix-halo"):
        return gen
    text = re.sub(
        r"\(.*?\)|\b\d+ ?gb\b|nvidia|geforce|amd|intel|tesla|generation", " ", name.lower()
    )
    return " ".join(text.split())


def engine_of(device: Device, backend: str) -> str:
    """The kernel set that runs: the backend's own, or that of the accelerator."""
    if registry.declared(backend).own_kernels:
        return backend
    return device.accelerator


@lru_cache(maxsize=1024)
def hardware_keys(name: str, engine: str) -> tuple[str, ...]:
    """Keys of efficiency.toml that apply to a part, general first: engine, vendor, generation,
    tier, the part."""
    if engine == "cpu":
        return ("cpu",)
    vendor, gen, tier = generation(name)
    kernels = facts((engine,))
    # (does it apply, key)
    keys = (
        (True, engine),
        (kernels.by_vendor and vendor, f"{vendor}.{engine}"),
        (gen in _KERNELS_OF, f"{vendor}-{_KERNELS_OF.get(gen)}.{engine}"),
        *((gen in lacking, key) for key, lacking in kernels.emulated_on_generations.items()),
        (gen, f"{vendor}-{gen}.{engine}"),
        *(
            (re.search(pattern, name, re.I), key)
            for key, pattern in kernels.emulated_on_parts.items()
        ),
        (tier, f"apple-{tier}.{engine}"),
        (True, f"part:{part(name)}.{engine}"),
    )
    return tuple(key for applies, key in keys if applies)


def device_keys(device: Device, backend: str) -> tuple[str, ...]:
    """`hardware_keys` of a Device: by its devices.toml row when it has one."""
    name = device.match or device.name
    if device.family.startswith("Apple") and not name.lower().startswith(("m", "a", "apple")):
        name = device.name
    return hardware_keys(name, engine_of(device, backend))


# (pattern in a quant's name, its class), first match wins.
_CLASSES = (
    ("^BF16$", "bf16"),
    ("^F(16|32)$", "f16"),
    ("IQ", "iq"),
    ("^MXFP4", "mxfp4"),
    ("Q8", "q8"),
    ("^Q[45]_[01]$", "q4_0"),
    ("Q[123]", "k23"),
    ("", "k"),
)


@lru_cache(maxsize=4096)
def quant_class(variant: Variant) -> str:
    """Formats whose kernels behave alike: f16, bf16, q8, q4_0, k, k23 (2-3 bit), iq, mxfp4; of
    MLX's mlx2 … mlx8, mlx16."""
    quant = variant.quant.upper()
    if variant.is_folder:
        named = "16" if quant in ("BF16", "FP16") else "4"
        return f"{variant.format}{quant[0] if quant[:1].isdigit() else named}"
    return next(name for pattern, name in _CLASSES if re.search(pattern, quant))


# Nominal dense FP16 TFLOP/s of one compute unit, for parts whose datasheet figure is not in
# devices.toml. Units: Apple GPU cores, NVIDIA SMs, AMD CUs, Intel Xe cores. From devices.toml rows
# of the same generation that have one (e.g. RTX 4090: 165 / 128). GB10's 125 / 48 is with FP16
# sums: it has the other Blackwell parts' rate. GeForce RTX 30 and 20: FP32-accumulate rates of
# NVIDIA's whitepapers. Strix Halo: 36.9 TFLOP/s are the most that its 40 units were measured to
# multiply at, of 59.4 on paper (mamf-finder with hipBLASLt,
# https://llm-tracker.info/_TOORG/Strix-Halo). Hopper's and its successors' own instructions llama.cpp
# does not use: an H200 multiplies at 1.2 to 1.3 TFLOP/s a unit, an A100 at 0.8 of four bits.
_TFLOPS_PER_UNIT = {
    "m1": 0.332, "m2": 0.358, "m3": 0.36, "m4": 0.46, "m5": 0.57, "m6": 0.6, "a18": 0.38,
    "a19": 0.4,
    "ada": 1.29, "blackwell": 1.235, "ampere": 0.866, "turing": 0.79, "pascal": 0.39, "hbm": 1.0, "b200": 1.0,
    "gb10": 1.235,
    "jetson": 1.3, "strix-halo": 0.92, "rdna4": 1.52, "rdna3": 1.28, "rdna2": 0.66, "cdna": 1.5, "cdna3": 1.5,
    "rdna1": 0.49, "gcn": 0.44, "polaris": 0.17, "apu": 1.4,
    "arc": 1.3, "adreno": 0.5,
}  # fmt: skip
# GHz that GPUs run at, by generation (boost clocks of their datasheets; boards of one differ by
# less than the law can tell), and of boards for machine rooms, which run slower than their kin:
# what is short and waited for, a launch or a small kernel, takes as long as its clock says. Apple
# names no clocks: a core's TFLOP/s above, of 256 FLOP a tick, stand for them.
REFERENCE_GHZ = 1.8
_CLOCK_GHZ = {
    "ada": 2.5, "blackwell": 2.5, "gb10": 2.4, "ampere": 1.75, "turing": 1.65, "pascal": 1.58,
    "hbm": 1.98, "jetson": 1.3,
    "strix-halo": 2.9, "rdna4": 2.9, "rdna3": 2.45, "rdna2": 2.3, "cdna": 1.5, "gcn": 1.75,
    "rdna1": 1.9, "polaris": 1.34,
    "arc": 2.4,
}  # fmt: skip
# FP32 lanes of one unit, two FLOP a tick each, of NVIDIA's chips: 128 but where it is named
# (NVIDIA's white papers).
_FEW_LANES = re.compile(r"rtx 20\d\d|quadro rtx|titan v|v100|\bt4\b|gtx 16|p100|a100|a30\b", re.I)
_BOARD_CLOCK_GHZ = (
    (r"\bp100\b", 1.3),
    (r"\bv100\b", 1.38),
    (r"\ba30\b", 1.44),
    (r"\ba100\b", 1.41),
    (r"titan v", 1.45),
    (r"\bl4\b", 2.04),
)
# What cores multiply matrices of Q4_K at, TFLOP/s of one by its widest vectors, and the power of
# their number: together they run slower. Two Zen cores with AVX-512 289 GFLOP/s (llama.cpp 0.3.36,
# 512 tokens); 64 of an EPYC 7702 (AVX2) read 301 tokens/s of a 3B in Q4_K_M, 1.9 TFLOP/s
# (https://huggingface.co/bartowski, llama-bench in his model cards): 0.054 by this law. Desktops'
# cores run half as fast again as that server's: between the two.
_CORE_TFLOPS = {"AVX-512": 0.12, "AVX2": 0.07}
_CORES_POWER = 0.85
# The type of weights whose product, where it was timed, is a processor's nominal rate.
CPU_YARDSTICK = "Q4_K"


def nominal_tflops(device: Device, backend: str = "") -> tuple[float, str]:
    """(dense FP16 TFLOP/s, basis) a device nominally has: the yardstick `prefill` efficiencies are
    fractions of."""
    if device.accelerator == "cpu":
        timed = next(
            (rates.usual for rates in device.matrix_rates if rates.type == CPU_YARDSTICK), None
        )
        if timed is not None:
            return timed.prompt_tflops.value, timed.prompt_tflops.basis
        core = _CORE_TFLOPS.get(device.cpu_vectors, _CORE_TFLOPS["AVX2"])
        return max(1, device.n_cpu_cores) ** _CORES_POWER * core, "assumed"
    return part_tflops(
        device.match or device.name,
        device.compute_units,
        device.fp16_tflops.value if device.fp16_tflops else 0.0,
        engine=engine_of(device, backend),
    )


@lru_cache(maxsize=1024)
def clock_ghz(name: str) -> float:
    """GHz of a part's GPU; `REFERENCE_GHZ` where nothing is known."""
    vendor, kind, _ = generation(name)
    if vendor == "apple":
        return _TFLOPS_PER_UNIT.get(kind, 0.0) / 0.256 or REFERENCE_GHZ
    boards = (ghz for pattern, ghz in _BOARD_CLOCK_GHZ if re.search(pattern, name.lower()))
    return next(boards, _CLOCK_GHZ.get(kind, REFERENCE_GHZ))


def lane_tflops(name: str, units: float) -> float:
    """TFLOP/s of an NVIDIA part's plain FP32 lanes at its clock."""
    return units * (64 if _FEW_LANES.search(name) else 128) * 2 * clock_ghz(name) / 1e3


def part_tflops(
    name: str, units: float, datasheet: float = 0.0, *, engine: str = ""
) -> tuple[float, str]:
    """(dense FP16 TFLOP/s, basis) of a part from its units, else its datasheet figure, else a guess
    of 10."""
    per_unit = _TFLOPS_PER_UNIT.get(generation(name)[1])
    if engine:
        per_unit = facts(hardware_keys(name, engine)).tflops_per_unit or per_unit
    if per_unit and units:
        return per_unit * units, "derived"
    if datasheet:
        return datasheet, "datasheet"
    return 10.0, "assumed"


# Board power in watts by `part`: the TDP of the pages that devices.toml names, in its notes; of
# what has none there techpowerup.com's (Quadro RTX, RTX A4500, Titan V, V620, Instinct) and of a
# GB10 its maker's, of an Arc Pro B70 https://huggingface.co/hardware/arc-pro-b70. A laptop's card
# is sold with many, so none of them is here.
_BOARD_W = {
    "a100 pcie": 250, "a100 sxm4": 400, "a10g": 150, "a30": 165, "a40": 300, "arc a750": 225,
    "arc a770": 225,
    "arc b570": 150, "arc b580": 190, "arc pro b50": 70, "arc pro b60": 200, "arc pro b70": 230,
    "gb10": 140,
    "gtx 1080 ti": 250, "h100 nvl": 400, "h100 pcie": 350, "h100 sxm5": 700, "h200 sxm": 700,
    "instinct mi100": 300,
    "instinct mi50": 300, "instinct mi60": 300, "l4": 72, "l40": 300, "l40s": 300, "p100": 250,
    "p40": 250,
    "quadro rtx 6000": 260, "quadro rtx 8000": 260, "radeon ai pro r9700": 300,
    "radeon pro v620": 300,
    "radeon pro w7900": 295, "radeon rx 6600 xt": 160, "radeon rx 6700 xt": 230,
    "radeon rx 6800": 250,
    "radeon rx 6800 xt": 300, "radeon rx 6900 xt": 300, "radeon rx 6950 xt": 335,
    "radeon rx 7600": 165,
    "radeon rx 7600 xt": 190, "radeon rx 7700 xt": 245, "radeon rx 7800 xt": 263,
    "radeon rx 7900 gre": 260,
    "radeon rx 7900 xt": 300, "radeon rx 7900 xtx": 355, "radeon rx 9060 xt": 160,
    "radeon rx 9070": 220,
    "radeon rx 9070 xt": 304, "rtx 2060": 160, "rtx 2060 super": 175, "rtx 2070": 175,
    "rtx 2070 super": 215,
    "rtx 2080": 215, "rtx 2080 super": 250, "rtx 2080 ti": 250, "rtx 3050": 130, "rtx 3060": 170,
    "rtx 3060 ti": 200,
    "rtx 3060 ti gddr6x": 225, "rtx 3070": 220, "rtx 3070 ti": 290, "rtx 3080": 320,
    "rtx 3080 ti": 350,
    "rtx 3090": 350, "rtx 3090 ti": 450, "rtx 4060": 115, "rtx 4060 ti": 160, "rtx 4070": 200,
    "rtx 4070 gddr6": 200,
    "rtx 4070 super": 220, "rtx 4070 ti": 285, "rtx 4070 ti super": 285, "rtx 4080": 320,
    "rtx 4080 super": 320,
    "rtx 4090": 450, "rtx 4090 d": 425, "rtx 5050": 130, "rtx 5060": 145, "rtx 5060 ti": 180,
    "rtx 5070": 250,
    "rtx 5070 ti": 300, "rtx 5080": 360, "rtx 5090": 575, "rtx 5090 d": 575, "rtx 5090 d v2": 575,
    "rtx 6000 ada": 300, "rtx a4000": 140, "rtx a4500": 200, "rtx a5000": 230, "rtx a6000": 300,
    "rtx pro 2000 blackwell": 70, "rtx pro 4000 blackwell": 140, "rtx pro 4500 blackwell": 200,
    "rtx pro 5000 blackwell": 300, "rtx pro 6000 blackwell": 600,
    "rtx pro 6000 blackwell max-q": 300,
    "rtx pro 6000 blackwell server": 600, "t4": 70, "titan v": 250, "v100": 250,
}  # fmt: skip
# Cards multiply more a unit the more watts a unit has: at 512 tokens of prefill an RTX 4080 (4.2 W
# per SM) 1.14 times the nominal rate, an L40 (2.1 W) 0.67 (llama.cpp's scoreboard for CUDA). Decode
# waits for memory and stays below the limit. Chosen by the devices and files that were left out of
# benchmarks/planner_fit: exponents from 0.5 to 0.7 do as well.
_EXPONENT = 0.6
_REFERENCE_W_PER_UNIT = 3.5


def share(part: str, units: float) -> float:
    """Of the nominal rate of `units` of a part, the share that its power lets them hold; 1.0 where
    it is not known."""
    watts = _BOARD_W.get(part, 0)
    if not watts or not units:
        return 1.0
    return math.pow(watts / units / _REFERENCE_W_PER_UNIT, _EXPONENT)


_LAPTOP = re.compile(r"\b(laptop|mobile|max-q)\b", re.I)
_T4 = re.compile(r"\btesla t4\b", re.I)
# The share of a predicted speed that a lasting load may leave of these. An RTX 3080 Ti Laptop held
# to 115 W decoded Qwen3.8-27B at 14.8 tokens/s where 25.6 are predicted (github.com/sudoingX/
# qwen38-mtp, pull request 56); an RTX 3090 held to 250 of its 350 W at 31.9 of 39 (pull request 42).
_LASTING_SHARE = 0.6


def limit_of(device: Device) -> str | None:
    """What limits a laptop's graphics card or a T4, in a sentence; None for what holds its
    speed."""
    name = f"{device.match or ''} {device.name}"
    limits = (
        (
            _LAPTOP,
            f"a laptop's power limit may leave {_LASTING_SHARE:.0%} of these speeds under lasting "
            "load (an RTX 3080 Ti held to 115 W: 58%)",
        ),
        (
            _T4,
            f"70 W may leave a T4 {_LASTING_SHARE:.0%} of these speeds under lasting load (assumed, "
            "as of laptops)",
        ),
    )
    is_card = device.kind == "discrete"
    return next((limit for pattern, limit in limits if is_card and pattern.search(name)), None)


def under_lasting_load(device: Device, predicted: Range) -> Range:
    """`predicted` with its lower end where a lasting load may bring it."""
    if limit_of(device) is None:
        return predicted
    return replace(predicted, low=min(predicted.low, predicted.value * _LASTING_SHARE))
