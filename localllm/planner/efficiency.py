"""How close each kind of machine comes to its limits: the coefficients (efficiency.json), their
keys, nominal rates and power limits.

Each coefficient is exp(base + Σ effects). Each key of a machine and model (engine, chip generation,
part, format …) adds the effect that was fitted for it. So an unmeasured part uses its generation,
and an unmeasured generation uses its engine. benchmarks/planner_fit fits the table to published
measurements.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from localllm.device.types import Device
from localllm.planner.kernel_facts import facts
from localllm.planner.types import Range
from localllm_backends import registry
from localllm_catalog.types import Variant

FILE = Path(__file__).with_name("efficiency.json")
_PARTS_FILE = Path(__file__).with_name("parts.toml")


class Table(NamedTuple):
    """Coefficients of one cost model ("decode", "prefill", "batched" or "drafted"), and
    the effects of keys on them, as natural logs.

    `rows` counts the measurements of each key. `width` gives the half width of an 80 % range by
    stratum (localllm/planner/ranges.py).
    """

    base: Mapping[str, float]
    effects: Mapping[str, Mapping[str, float]]
    rows: Mapping[str, int]
    width: Mapping[str, float]

    def nearest(self, hardware_keys: Iterable[str]) -> tuple[str, int]:
        """Return the most specific hardware key with measurements and their number, or ("none",
        0)."""
        nearest_key = ("none", 0)
        for key in hardware_keys:
            if self.rows.get(key, 0) > 0:
                nearest_key = (key, self.rows[key])
        return nearest_key


@cache
def load() -> dict[str, Table]:
    """Return the shipped tables by name. Package data: read once per process."""
    raw = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: Table(**raw[name]) for name in ("decode", "prefill", "batched", "drafted")}


class PartFacts(NamedTuple):
    """Facts about parts (parts.toml).

    - `generations`: generations by a pattern of the name.
    - `tflops_per_unit`: nominal FP16 TFLOP/s of a compute unit, by generation.
    - `clock_ghz`: GHz by generation.
    - `board_clock_ghz`: GHz of boards, by a pattern of the name.
    - `board_watts`: watts of boards, by `part`.
    """

    generations: Sequence[tuple[str, str, str]]
    tflops_per_unit: Mapping[str, float]
    clock_ghz: Mapping[str, float]
    board_clock_ghz: Mapping[str, float]
    board_watts: Mapping[str, float]


@cache
def part_facts() -> PartFacts:
    """Return the shipped figures. Package data: read once per process."""
    return PartFacts(**tomllib.loads(_PARTS_FILE.read_text(encoding="utf-8")))


@lru_cache(maxsize=4096)
def coefficients(cost_model: str, keys: tuple[str, ...]) -> dict[str, float]:
    """Return all coefficients of a cost model with the effects of `keys`; unknown keys add no
    effect.

    The result is cached and shared, so callers must not change it.
    """
    table = load()[cost_model]
    logs = dict(table.base)
    for key in keys:
        for name, value in table.effects.get(key, {}).items():
            logs[name] = logs.get(name, 0.0) + value
    return {name: math.exp(value) for name, value in logs.items()}


# Parts with the cores, and so the kernels, of another generation. Their memory and clocks are their
# own.
_KERNELS_OF_GENERATION = {"gb10": "blackwell", "strix-halo": "rdna3"}


@lru_cache(maxsize=1024)
def generation(name: str) -> tuple[str, str, str]:
    """Return (vendor, generation, tier) for a part's name. The tier is Apple's base / pro / max /
    ultra, else ""."""
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
    """Return the key for a part's measurements: its name in lower case without vendor, memory size
    and core count."""
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
    """Return the kernel set that runs: the backend's own, or that of the accelerator."""
    if registry.declared(backend).own_kernels:
        return backend
    return device.accelerator


@lru_cache(maxsize=1024)
def hardware_keys(name: str, engine: str) -> tuple[str, ...]:
    """Return the keys of efficiency.json that apply to a part, general first: engine, vendor,
    generation, tier, part."""
    if engine == "cpu":
        return ("cpu",)
    vendor, gen, tier = generation(name)
    kernels = facts((engine,))
    keys = [engine]
    if kernels.by_vendor and vendor:
        keys.append(f"{vendor}.{engine}")
    if gen in _KERNELS_OF_GENERATION:
        keys.append(f"{vendor}-{_KERNELS_OF_GENERATION[gen]}.{engine}")
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
    """Return the `hardware_keys` of a Device, by its devices.toml row if it has one."""
    name = device.match or device.name
    if device.family.startswith("Apple") and not name.lower().startswith(("m", "a", "apple")):
        name = device.name
    return hardware_keys(name, engine_of(device, backend))


# (pattern in a quant's name, its class); the first match wins.
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
    """Return the class of formats with similar kernels: f16, bf16, q8, q4_0, k, k23 (2-3 bit), iq,
    mxfp4; for MLX mlx2 … mlx8, mlx16."""
    quant = variant.quant.upper()
    if not variant.is_folder:
        return _gguf_class(quant)
    if quant[:1].isdigit():
        return f"{variant.format}{quant[0]}"
    if quant in ("BF16", "FP16"):
        return f"{variant.format}16"
    return f"{variant.format}4"


@cache
def _gguf_class(quant: str) -> str:
    return next(name for pattern, name in _CLASSES if re.search(pattern, quant))


# GHz of an unknown GPU, and the reference for costs that depend on the clock.
REFERENCE_GHZ = 1.8
# FP32 lanes of one unit, at two FLOP per cycle. NVIDIA's chips have 128, those named here 64
# (NVIDIA's white papers).
_HALF_LANES = re.compile(r"rtx 20\d\d|quadro rtx|titan v|v100|\bt4\b|gtx 16|p100|a100|a30\b", re.I)
# TFLOP/s of one core that multiplies Q4_K matrices, by its widest vectors. Several cores together
# run slower, by a power of their number. Two Zen cores with AVX-512 reach 289 GFLOP/s (llama.cpp
# 0.3.36, 512 tokens). 64 cores of an EPYC 7702 (AVX2) run prefill at 301 tokens/s with a 3B in
# Q4_K_M, or 1.9 TFLOP/s. That is from llama-bench in model cards of
# https://huggingface.co/bartowski. By this formula it is 0.054 a core. Desktop cores are half as
# fast again as those of that server. The AVX2 value is between the two.
# ARM: 8 cores of an M4 Max run prefill of an 8B in Q4_K_M at 106 tokens/s (llama.cpp's pull request
# 18888), or 0.27 a core at 4.5 GHz. Snapdragon's cores have as many units at 3.4 to 4 GHz. Four
# Cortex-A76 (no i8mm) run a 0.7B in Q6_K at 106 tokens/s (pull request 19360).
_CORE_TFLOPS = {"AVX-512": 0.12, "AVX2": 0.07, "NEON i8mm": 0.2, "NEON": 0.04}
_CORES_POWER = 0.85
# A CPU's nominal rate is its measured rate for this type of weights, if that was timed.
CPU_YARDSTICK = "Q4_K"


def nominal_tflops(device: Device, backend: str = "") -> tuple[float, str]:
    """Return (dense FP16 TFLOP/s, basis) of a device. Prefill efficiencies are fractions of it."""
    if device.accelerator != "cpu":
        datasheet = device.fp16_tflops.value if device.fp16_tflops else 0.0
        name = device.match or device.name
        engine = engine_of(device, backend)
        return part_tflops(name, device.compute_units, datasheet, engine=engine)
    for rates in device.matrix_rates:
        if rates.type == CPU_YARDSTICK:
            timed_rate = rates.usual.prompt_tflops
            return timed_rate.value, timed_rate.basis
    core_tflops = _CORE_TFLOPS.get(device.cpu_vectors, _CORE_TFLOPS["AVX2"])
    return max(1, device.n_cpu_cores) ** _CORES_POWER * core_tflops, "assumed"


@lru_cache(maxsize=1024)
def clock_ghz(name: str) -> float:
    """Return the GHz of a part's GPU, or `REFERENCE_GHZ` if unknown."""
    vendor, kind, _ = generation(name)
    if vendor == "apple":
        return part_facts().tflops_per_unit.get(kind, 0.0) / 0.256 or REFERENCE_GHZ
    for pattern, ghz in part_facts().board_clock_ghz.items():
        if re.search(pattern, name.lower()):
            return ghz
    return part_facts().clock_ghz.get(kind, REFERENCE_GHZ)


def lane_tflops(name: str, units: float) -> float:
    """Return the TFLOP/s of an NVIDIA part's plain FP32 lanes at its clock."""
    lanes = 64 if _HALF_LANES.search(name) else 128
    return units * lanes * 2 * clock_ghz(name) / 1e3


def part_tflops(
    name: str, units: float, datasheet: float = 0.0, *, engine: str = ""
) -> tuple[float, str]:
    """Return (dense FP16 TFLOP/s, basis) of a part from its units, else its datasheet, else 10 as a
    guess."""
    _, kind, _ = generation(name)
    per_unit = part_facts().tflops_per_unit.get(kind)
    if engine:
        per_unit = facts(hardware_keys(name, engine)).tflops_per_unit or per_unit
    if per_unit and units:
        return per_unit * units, "derived"
    if datasheet:
        return datasheet, "datasheet"
    return 10.0, "assumed"


# Cards with more watts per unit multiply faster per unit. At 512 tokens of prefill, an RTX 4080
# (4.2 W per SM) reaches 1.14 times the nominal rate, an L40 (2.1 W) 0.67 (llama.cpp's scoreboard
# for CUDA). Decode waits for memory and stays below the limit. The exponent was chosen on the
# devices and files held out of benchmarks/planner_fit. Exponents from 0.5 to 0.7 do as well.
_POWER_EXPONENT = 0.6
_REFERENCE_W_PER_UNIT = 3.5


def share(part: str, units: float) -> float:
    """Return the share of the nominal rate of a part's `units` that its power limit sustains.
    Returns 1.0 if its power is unknown."""
    watts = part_facts().board_watts.get(part, 0)
    if not watts or not units:
        return 1.0
    return math.pow(watts / units / _REFERENCE_W_PER_UNIT, _POWER_EXPONENT)


_LAPTOP = re.compile(r"\b(laptop|mobile|max-q)\b", re.I)
_T4 = re.compile(r"\btesla t4\b", re.I)
# The share of a predicted speed that may remain under sustained load. An RTX 3080 Ti Laptop limited
# to 115 W decoded Qwen3.8-27B at 14.8 tokens/s; 25.6 are predicted (github.com/sudoingX/qwen38-mtp,
# pull request 56). An RTX 3090 limited to 250 of its 350 W decoded at 31.9 tokens/s; 39 are
# predicted (pull request 42).
_LASTING_SHARE = 0.6


def power_limit_note(device: Device) -> str | None:
    """Return a sentence about the power limit of a laptop's graphics card or a T4; None for other
    machines."""
    if device.kind != "discrete":
        return None
    name = f"{device.match or ''} {device.name}"
    if _LAPTOP.search(name):
        return (
            "under sustained load, a laptop's power limit may reduce these speeds to "
            f"{_LASTING_SHARE:.0%} (an RTX 3080 Ti held to 115 W: 58%)"
        )
    if _T4.search(name):
        return (
            f"under sustained load, a T4's 70 W may reduce these speeds to {_LASTING_SHARE:.0%} "
            "(assumed from laptops)"
        )
    return None


def under_lasting_load(device: Device, predicted: Range) -> Range:
    """Return `predicted` with its lower end reduced to the speed under sustained load."""
    if power_limit_note(device) is None:
        return predicted
    return predicted._replace(low=min(predicted.low, predicted.value * _LASTING_SHARE))
