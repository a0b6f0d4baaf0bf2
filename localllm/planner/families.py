"""Names the group a machine's speed is learnt from: engine, chip generation, size tier, the part itself."""

from __future__ import annotations

import re
from functools import lru_cache

from localllm.device.types import Device
from localllm_backends import registry

# (pattern in the part's name, vendor, generation), first match wins. Grouped by what shares memory system and kernels.
_GENERATIONS: tuple[tuple[str, str, str], ...] = (
    (r"gb10|dgx spark|gx10|n1x|rtx spark", "nvidia", "gb10"),
    (r"jetson|orin|thor", "nvidia", "jetson"),
    (r"\bada\b|rtx 40\d\d|\bl40s?\b|\bl4\b", "nvidia", "ada"),
    (r"rtx (pro )?50\d\d|blackwell|b200", "nvidia", "blackwell"),
    (r"a100|h100|h200", "nvidia", "hbm"),
    (r"rtx 30\d\d|rtx a\d{4}|\ba40\b|\ba30\b|a10g|\ba10\b", "nvidia", "ampere"),
    (r"rtx 20\d\d|quadro rtx|titan v|v100|\bt4\b|gtx 16", "nvidia", "turing"),
    (r"p40|p100|gtx 10", "nvidia", "pascal"),
    (r"strix halo|ai max|gorgon halo|8060s|8050s", "amd", "strix-halo"),
    (r"r9700|rx 90\d\d|rdna4", "amd", "rdna4"),
    (r"rx 7\d\d\d|w7\d\d\d|rdna3", "amd", "rdna3"),
    (r"rx 6\d\d\d|v620|w6\d\d\d", "amd", "rdna2"),
    (r"\bmi[56]0\b|radeon vii\b", "amd", "gcn"),
    (r"instinct|mi\d{2,3}x?\b", "amd", "cdna"),
    (r"radeon|ryzen|amd", "amd", "apu"),
    (r"\barc\b|intel|core ultra|xe2?\b", "intel", "arc"),
    (r"snapdragon|adreno", "qualcomm", "adreno"),
    (r"nvidia|geforce|rtx", "nvidia", "cuda-other"),
)


# Parts whose cores, and so whose kernels, are those of another generation; memory and clocks are their own.
_KERNELS_OF = {"gb10": "blackwell", "strix-halo": "rdna3"}
# M1 and M2 have no bfloat16, which MLX's published files compute in: it is emulated. The same files with float16 read prompts
# a fifth to a third faster there (github.com/jundot/omlx/issues/604, github.com/raullenchai/Rapid-MLX/issues/3154).
_EMULATES_BF16 = {"mlx": ("m1", "m2")}


@lru_cache(maxsize=1024)
def generation(name: str) -> tuple[str, str, str]:
    """(vendor, generation, tier) of a part's name; tier is Apple's base / pro / max / ultra, else ""."""
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
    """A part's name as its measurements are filed: no vendor, no memory size, no core count, lower case."""
    vendor, gen, tier = generation(name)
    if vendor == "apple":
        return f"{gen} {tier}" if tier != "base" else gen
    if gen in ("gb10", "strix-halo"):
        return gen
    text = re.sub(r"\(.*?\)|\b\d+ ?gb\b|nvidia|geforce|amd|intel|tesla|generation", " ", name.lower())
    return " ".join(text.split())


def engine_of(device: Device, backend: str) -> str:
    """The kernel set that runs: what the backend declares, or that of the accelerator."""
    return registry.declared(backend).kernels or device.accelerator


@lru_cache(maxsize=1024)
def hardware_keys(name: str, engine: str) -> tuple[str, ...]:
    """Keys of efficiency.toml that apply to a part, general first: engine, vendor, generation, tier, the part."""
    if engine == "cpu":
        return ("cpu",)
    vendor, gen, tier = generation(name)
    keys = [engine]
    if engine in ("vulkan", "sycl") and vendor:
        keys.append(f"{vendor}.{engine}")
    if gen in _KERNELS_OF:
        keys.append(f"{vendor}-{_KERNELS_OF[gen]}.{engine}")
    if gen in _EMULATES_BF16.get(engine, ()):
        keys.append(f"{vendor}-emulated-bf16.{engine}")
    if gen:
        keys.append(f"{vendor}-{gen}.{engine}")
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


@lru_cache(maxsize=1024)
def quant_class(quant: str, *, mlx: bool = False) -> str:
    """Formats whose kernels behave alike: f16, bf16, q8, q4_0, k, k23 (2-3 bit), iq, mxfp4; mlx2 … mlx8, mlx16."""
    q = quant.upper()
    if mlx:
        bits = re.match(r"(\d)", q)
        return f"mlx{bits.group(1)}" if bits else ("mlx16" if q in ("BF16", "FP16") else "mlx4")
    if q == "BF16":
        return "bf16"
    if q in ("F16", "F32"):
        return "f16"
    if "IQ" in q:
        return "iq"
    if q.startswith("MXFP4"):
        return "mxfp4"
    if "Q8" in q:
        return "q8"
    if q in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        return "q4_0"
    return "k23" if re.search(r"Q[123]", q) else "k"


# Nominal dense FP16 TFLOP/s of one compute unit, for parts whose datasheet figure is not in devices.toml. Units: Apple
# GPU cores, NVIDIA SMs, AMD CUs, Intel Xe cores. From devices.toml rows of the same generation that have one
# (e.g. RTX 4090: 165 / 128). GB10's 125 / 48 is with FP16 sums: it has the other Blackwell parts' rate. GeForce RTX 30
# and 20: FP32-accumulate rates of NVIDIA's whitepapers. Strix Halo: 36.9 TFLOP/s are the most that its 40 units were measured
# to multiply at, of 59.4 on paper (mamf-finder with hipBLASLt, https://llm-tracker.info/_TOORG/Strix-Halo).
_TFLOPS_PER_UNIT = {
    "m1": 0.332, "m2": 0.358, "m3": 0.36, "m4": 0.46, "m5": 0.57, "m6": 0.6, "a18": 0.38, "a19": 0.4,
    "ada": 1.29, "blackwell": 1.235, "ampere": 0.866, "turing": 0.79, "pascal": 0.39, "hbm": 5.0, "gb10": 1.235,
    "jetson": 1.3, "strix-halo": 0.92, "rdna4": 1.52, "rdna3": 1.28, "rdna2": 0.66, "cdna": 1.5, "gcn": 0.44, "apu": 1.4,
    "arc": 1.3, "adreno": 0.5,
}  # fmt: skip
# GHz that GPUs run at, by generation (boost clocks of their datasheets; boards of one differ by less than the law can tell),
# and of boards for machine rooms, which run slower than their kin: what is short and waited for, a launch or a small kernel,
# takes as long as its clock says. Apple names no clocks: a core's TFLOP/s above, of 256 FLOP a tick, stand for them.
REFERENCE_GHZ = 1.8
_CLOCK_GHZ = {
    "ada": 2.5, "blackwell": 2.5, "gb10": 2.4, "ampere": 1.75, "turing": 1.65, "pascal": 1.58, "hbm": 1.98, "jetson": 1.3,
    "strix-halo": 2.9, "rdna4": 2.9, "rdna3": 2.45, "rdna2": 2.3, "cdna": 1.5, "gcn": 1.75, "arc": 2.4,
}  # fmt: skip
_BOARD_CLOCK_GHZ = (
    (r"\bp100\b", 1.3),
    (r"\bv100\b", 1.38),
    (r"\ba30\b", 1.44),
    (r"\ba100\b", 1.41),
    (r"titan v", 1.45),
    (r"\bl4\b", 2.04),
)
# One CPU core's matrix rate under llama.cpp's kernels (AVX2/NEON), order of magnitude; the benchmark corrects it.
_TFLOPS_PER_CORE = 0.05
# The type of weights whose product, where it was timed, is a processor's nominal rate.
CPU_YARDSTICK = "Q4_K"


# MLX multiplies on the units for matrices that M5's GPU cores have: over four times M4's rate, as Apple has it
# (https://machinelearning.apple.com/research/exploring-llms-mlx-m5: first tokens 3.3 to 4.1 times as soon).
_TFLOPS_PER_UNIT_OF_KERNELS = {"mlx": {"m5": 4 * 0.46, "m6": 4 * 0.46}}


def nominal_tflops(device: Device, backend: str = "") -> tuple[float, str]:
    """(dense FP16 TFLOP/s, basis) a device nominally has: the yardstick `prefill` efficiencies are fractions of."""
    if device.accelerator == "cpu":
        timed = next((rates.usual for rates in device.matrix_rates if rates.type == CPU_YARDSTICK), None)
        if timed is not None:
            return timed.prompt_tflops.value, timed.prompt_tflops.basis
        return max(1, device.n_cpu_cores) * _TFLOPS_PER_CORE, "assumed"
    return part_tflops(device.match or device.name, device.compute_units,
                       device.fp16_tflops.value if device.fp16_tflops else 0.0, engine=engine_of(device, backend))  # fmt: skip


@lru_cache(maxsize=1024)
def clock_ghz(name: str) -> float:
    """GHz of a part's GPU; `REFERENCE_GHZ` where nothing is known."""
    vendor, kind, _ = generation(name)
    if vendor == "apple":
        return _TFLOPS_PER_UNIT.get(kind, 0.0) / 0.256 or REFERENCE_GHZ
    boards = (ghz for pattern, ghz in _BOARD_CLOCK_GHZ if re.search(pattern, name.lower()))
    return next(boards, _CLOCK_GHZ.get(kind, REFERENCE_GHZ))


def part_tflops(name: str, units: float, datasheet: float = 0.0, *, engine: str = "") -> tuple[float, str]:
    """(dense FP16 TFLOP/s, basis) of a part from its units, else its datasheet figure, else a guess of 10."""
    kind = generation(name)[1]
    per_unit = _TFLOPS_PER_UNIT_OF_KERNELS.get(engine, {}).get(kind) or _TFLOPS_PER_UNIT.get(kind)
    if per_unit and units:
        return per_unit * units, "derived"
    if datasheet:
        return datasheet, "datasheet"
    return 10.0, "assumed"
