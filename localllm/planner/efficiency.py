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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from localllm.device.types import Device
from localllm.planner.kernel_facts import facts
from localllm.planner.types import Range
from localllm_backends import registry
from localllm_catalog.types import Variant

FILE = Path(__file__).with_name("efficiency.toml")
_PARTS_FILE = Path(__file__).with_name("parts.toml")


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
    return {name: Table(**raw[name]) for name in ("decode", "prefill", "batched")}


@dataclass(frozen=True, slots=True)
class PartFacts:
    """Facts about parts (parts.toml): generations by a pattern of the name, nominal FP16 TFLOP/s of
    a compute unit and GHz by generation, GHz of boards by a pattern of the name, watts of boards by
    `part`."""

    generations: Sequence[tuple[str, str, str]]
    tflops_per_unit: Mapping[str, float]
    clock_ghz: Mapping[str, float]
    board_clock_ghz: Mapping[str, float]
    board_watts: Mapping[str, float]


@cache
def part_facts() -> PartFacts:
    """The shipped figures. Package data: read once per process."""
    return PartFacts(**tomllib.loads(_PARTS_FILE.read_text(encoding="utf-8")))


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


# Parts whose cores, and so whose kernels, are those of another generation; memory and clocks are
# their own.
_KERNELS_OF = {"gb10": "blackwell", "strix-halo": "rdna3"}


@lru_cache(maxsize=1024)
def generation(name: str) -> tuple[str, str, str]:
    """(vendor, generation, tier) of a part's name; tier is Apple's base / pro / max / ultra, else
    ""."""
    lower = name.lower()
    apple = re.search(r"\b(m\d{1,2}|a1[4-9])(?: (pro|max|ultra))?\b", lower)
    if apple and ("apple" in lower or lower.startswith(apple[0][:2])):
        chip, tier = apple.groups()
        if tier is None or chip.startswith("a"):
            tier = "base"
        return "apple", chip, tier
    for pattern, vendor, name_of in part_facts().generations:
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
    keys = [engine]
    if kernels.by_vendor and vendor:
        keys.append(f"{vendor}.{engine}")
    if gen in _KERNELS_OF:
        keys.append(f"{vendor}-{_KERNELS_OF[gen]}.{engine}")
    for key, lacking in kernels.emulated_on_generations.items():
        if gen in lacking:
            keys.append(key)
    if gen:
        keys.append(f"{vendor}-{gen}.{engine}")
    for key, pattern in kernels.emulated_on_parts.items():
        if re.search(pattern, name, re.I):
            keys.append(key)
    if tier:
        keys.append(f"apple-{tier}.{engine}")
    keys.append(f"part:{part(name)}.{engine}")
    return tuple(keys)


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
    if not variant.is_folder:
        return next(name for pattern, name in _CLASSES if re.search(pattern, quant))
    if quant[:1].isdigit():
        return f"{variant.format}{quant[0]}"
    if quant in ("BF16", "FP16"):
        return f"{variant.format}16"
    return f"{variant.format}4"


# GHz of a GPU of which nothing is known; costs by the clock are told of it.
REFERENCE_GHZ = 1.8
# FP32 lanes of one unit, two FLOP a tick each, of NVIDIA's chips: 128 but where it is named
# (NVIDIA's white papers).
_FEW_LANES = re.compile(r"rtx 20\d\d|quadro rtx|titan v|v100|\bt4\b|gtx 16|p100|a100|a30\b", re.I)
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
    if device.accelerator != "cpu":
        datasheet = device.fp16_tflops.value if device.fp16_tflops else 0.0
        name = device.match or device.name
        engine = engine_of(device, backend)
        return part_tflops(name, device.compute_units, datasheet, engine=engine)
    for rates in device.matrix_rates:
        if rates.type == CPU_YARDSTICK:
            timed = rates.usual.prompt_tflops
            return timed.value, timed.basis
    core = _CORE_TFLOPS.get(device.cpu_vectors, _CORE_TFLOPS["AVX2"])
    return max(1, device.n_cpu_cores) ** _CORES_POWER * core, "assumed"


@lru_cache(maxsize=1024)
def clock_ghz(name: str) -> float:
    """GHz of a part's GPU; `REFERENCE_GHZ` where nothing is known."""
    vendor, kind, _ = generation(name)
    if vendor == "apple":
        return part_facts().tflops_per_unit.get(kind, 0.0) / 0.256 or REFERENCE_GHZ
    for pattern, ghz in part_facts().board_clock_ghz.items():
        if re.search(pattern, name.lower()):
            return ghz
    return part_facts().clock_ghz.get(kind, REFERENCE_GHZ)


def lane_tflops(name: str, units: float) -> float:
    """TFLOP/s of an NVIDIA part's plain FP32 lanes at its clock."""
    lanes = 64 if _FEW_LANES.search(name) else 128
    return units * lanes * 2 * clock_ghz(name) / 1e3


def part_tflops(
    name: str, units: float, datasheet: float = 0.0, *, engine: str = ""
) -> tuple[float, str]:
    """(dense FP16 TFLOP/s, basis) of a part from its units, else its datasheet figure, else a guess
    of 10."""
    _, kind, _ = generation(name)
    per_unit = part_facts().tflops_per_unit.get(kind)
    if engine:
        per_unit = facts(hardware_keys(name, engine)).tflops_per_unit or per_unit
    if per_unit and units:
        return per_unit * units, "derived"
    if datasheet:
        return datasheet, "datasheet"
    return 10.0, "assumed"


# Cards multiply more a unit the more watts a unit has: at 512 tokens of prefill an RTX 4080 (4.2 W
# per SM) 1.14 times the nominal rate, an L40 (2.1 W) 0.67 (llama.cpp's scoreboard for CUDA). Decode
# waits for memory and stays below the limit. Chosen by the devices and files that were left out of
# benchmarks/planner_fit: exponents from 0.5 to 0.7 do as well.
_EXPONENT = 0.6
_REFERENCE_W_PER_UNIT = 3.5


def share(part: str, units: float) -> float:
    """The share of the nominal rate of `units` of a part that its power lets them hold; 1.0 if its
    power is not known."""
    watts = part_facts().board_watts.get(part, 0)
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
    """The power limit of a laptop's graphics card or a T4, in a sentence; None for any other
    machine."""
    if device.kind != "discrete":
        return None
    name = f"{device.match or ''} {device.name}"
    if _LAPTOP.search(name):
        return (
            f"a laptop's power limit may leave {_LASTING_SHARE:.0%} of these speeds under lasting "
            "load (an RTX 3080 Ti held to 115 W: 58%)"
        )
    if _T4.search(name):
        return (
            f"70 W may leave a T4 {_LASTING_SHARE:.0%} of these speeds under lasting load "
            "(assumed, as of laptops)"
        )
    return None


def under_lasting_load(device: Device, predicted: Range) -> Range:
    """`predicted` with its lower end where a lasting load may bring it."""
    if limit_of(device) is None:
        return predicted
    return replace(predicted, low=min(predicted.low, predicted.value * _LASTING_SHARE))
