"""The cost model of decoding: seconds of one step, by cause. (For prompts, see prefill_cost.py.)

t = [ (dense + r·routed) / (η·BW) + parameters / (u·units) + (layers·a + expert layers·b + recurrent
layers·c)
      · (1.8 GHz / clock)^l ] + KV read / (f·BW) + layers with an indexer · context · i / BW
      + states read and written / (e·BW) + (sequences − 1)^0.8 · (2·P / (m·units) + layers·d / √units)

Quantised weights are unpacked by arithmetic, which adds to the time of reading them (f16 and bf16
are read as they are). If an engine's kernels for a format are poor, reading or unpacking takes longer, by the
figures in kernels.py. The host waits for kernel launches, so their time depends on the clock. It
falls more than in proportion, because later chips also launch faster.

On a CPU, attention is arithmetic on few cores. With a latent KV (MLA), which every head reads,
attention is arithmetic on any machine. It takes the longer of that arithmetic and reading the KV.
The same holds for CUDA with a quantised KV. Its kernel for one token unpacks the cache on the plain
FP32 lanes, once per query head. The f16 kernel reads the cache once, on the matrix units. The
indexer of sparse attention reads the keys of the whole context several times in each of its layers:
some kilobytes a token.

A constant fraction of bandwidth is off by 16-90 % for small models and mixtures. The per-layer
times (kernel launches, routing) account for that. Coefficients: efficiency.json. Units: seconds,
bytes and tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from localllm.device.types import Device, TypeRates
from localllm.planner import efficiency, kernels
from localllm.planner.bytes_per_token import Streamed, facts, streamed
from localllm.planner.kernel_facts import facts as kernel_facts
from localllm_catalog import quants
from localllm_catalog.types import Model, Variant

# Bandwidth of system memory next to a card, if unknown.
ASSUMED_BANDWIDTH_GBPS = 20.0
# Share of the memory's nominal rate that a CPU reads. An EPYC 9554 has 461 GB/s; a 14B in Q4_K_M
# runs at 28.7 tokens/s and in Q8_0 at 19.2 (https://ahelpme.com/?p=6685), which is 260 and 299
# GB/s. Below it: the most that one core reads. A 7B in Q4_0 and Q4_K on one thread reads 15.5 and
# 17.7 GB/s (github.com/ggml-org/llama.cpp, tools/llama-bench; a Ryzen 6800H).
CPU_NOMINAL_SHARE = 0.75
CPU_CORE_GBPS = 20.0
# Largest share of its nominal rate that a memory delivers.
PEAK_SHARE = 0.98
# One core's rate in the attention of one token. From llama.cpp 0.3.36's F16 dot products and
# running softmax on Zen 4 (AVX-512), two cores, 512 tokens: SmolLM2-135M (heads of 64) +2.1 ms,
# Gemma-3-270M (heads of 256) +2.2 ms, 38 MFLOP each. With 8 KV heads the rate is half of this.
CPU_ATTENTION_FLOPS_S_PER_CORE = 10e9
# llama.cpp repacks most formats for the CPU's vectors when it loads them. It multiplies the formats
# in CPU_PLAIN_FORMATS as they are stored, and the table's CPU rate is for those. Measured with 486M
# weights in 8 layers on two Zen 4 cores, in GB/s at one token: Q4_1 23, Q4_0 30, Q4_K 33, Q8_0 37.
# A copy measures 28. The gain is set well below that. In a mixed file (Gemma-3-270M) it was 1.0 on
# two Zen 5 cores and 1.2 on these.
_CPU_REPACKED_GAIN = 1.1
# Weights of a step at which the coefficient `size` has no effect.
_REFERENCE_BYTES = 5e9
# Formats whose weights are multiplied without unpacking.
PLAIN_FORMATS = ("quant:f16", "quant:bf16", "quant:mlx16")


# The cost of more sequences grows more slowly than their number, since kernels fill up. Their
# tokens also share experts more often than by chance. Among the powers tried on
# llama-batched-bench's rows (2 to 32 sequences), these left the smallest error
# (benchmarks/planner_fit.md).
_BATCHED_POWER = 0.8
# Nominal TFLOP/s of the reference GPU for the seconds per layer of each further sequence.
_ROW_TFLOPS = 40.0
_ROW_POWER = 0.5
_ROUTED_POWER = 0.5


def further_sequences(n_sequences: int) -> float:
    """Return the effective number of sequences after the first, for the arithmetic of a step."""
    if n_sequences <= 1:
        return 0.0
    return float((n_sequences - 1) ** _BATCHED_POWER)


def routed_sequences(n_sequences: int) -> float:
    """Return the effective number of independently routed sequences, for the experts that a step
    reads."""
    return float(n_sequences**_ROUTED_POWER)


@dataclass(frozen=True, slots=True, eq=False)
class Hardware:
    """A machine as the cost model sees it. Compared by identity, because results for a machine are
    cached.

    - `keys`: the keys of efficiency.json that apply to it (`efficiency.hardware_keys`).
    - `bandwidth_gbps`: GB/s of its memory.
    - `tflops`: nominal FP16 TFLOP/s.
    - `n_cpu_cores`: cores of the CPU that computes. 0 if a GPU does or if unknown; attention then
      only reads its cache.
    - `power_share`: share of `tflops` that the power limit allows for matrices.
    - `clock_ghz`: the GPU's clock.
    - `plain_tflops`: TFLOP/s without matrix units (0: the same as `tflops`).
    - `rates`: measured rates of a CPU's matrix kernels.
    - `stored`: a CPU multiplies weights as stored, instead of in the engine's own layout.
    - `lane_tflops`: TFLOP/s of an NVIDIA card's plain FP32 lanes.
    """

    keys: tuple[str, ...]
    bandwidth_gbps: float
    tflops: float
    n_cpu_cores: int = 0
    power_share: float = 1.0
    clock_ghz: float = efficiency.REFERENCE_GHZ
    plain_tflops: float = 0.0
    rates: tuple[TypeRates, ...] = ()
    stored: bool = False
    lane_tflops: float = 0.0

    @property
    def engine(self) -> str:
        """The kernel set that runs: the most general key."""
        return self.keys[0]

    def keys_for(self, variant: Variant) -> tuple[str, ...]:
        """Return the keys of the hardware and of the format."""
        return (*self.keys, format_key(variant))

    def timed_flops_s(self, model: Model, variant: Variant) -> tuple[float, float] | None:
        """Return (FLOP/s of a prompt, FLOP/s of one token) for this file's matrices. Returns None
        if its type was not timed on a CPU."""
        if not self.rates:
            return None
        return kernels.flops_s(self.rates, model, variant, stored=self.stored)

    def timed_row_s(self, model: Model, variant: Variant, rows: int) -> float | None:
        """Return the seconds to multiply one of `rows` tokens that are computed together. Returns
        None if its type was not timed on a CPU."""
        flops_s = kernels.rows_flops_s(self.rates, model, variant, rows, stored=self.stored)
        if flops_s is None:
            return None
        read = streamed(model, variant)
        return 2 * (read.dense_params + read.routed_params) / flops_s


@lru_cache(4096)
def hardware_of(device: Device, backend: str) -> Hardware:
    """Return `device` as `backend` uses it."""
    tflops, _ = efficiency.nominal_tflops(device, backend)
    name = device.match or device.name
    power_share = efficiency.share(efficiency.part(name), device.compute_units)
    clock_ghz = efficiency.REFERENCE_GHZ
    if device.accelerator != "cpu":
        clock_ghz = efficiency.clock_ghz(name)
    keys = efficiency.device_keys(device, backend)
    bandwidth_gbps = device.bandwidth_gbps.value
    if device.accelerator == "cpu" and device.bandwidth_gbps.basis not in ("measured", "reported"):
        cores_gbps = CPU_CORE_GBPS * (device.n_cpu_cores or math.inf)
        bandwidth_gbps = min(CPU_NOMINAL_SHARE * bandwidth_gbps, cores_gbps)
    plain_tflops, _ = efficiency.nominal_tflops(device)
    rates = device.matrix_rates if keys[0] == "cpu" else ()
    lane_rate = 0.0
    if kernel_facts(keys).unpacks_kv_on_lanes:
        lane_rate = efficiency.lane_tflops(name, device.compute_units)
    return Hardware(
        keys,
        bandwidth_gbps,
        tflops,
        device.n_cpu_cores,
        power_share,
        clock_ghz,
        plain_tflops,
        rates,
        lane_tflops=lane_rate,
    )


@lru_cache(1024)
def as_stored(hardware: Hardware) -> Hardware:
    """Return a CPU that multiplies weights as they are stored."""
    return replace(hardware, stored=True)


def format_key(variant: Variant) -> str:
    """Return the key of the format's kernels, used together with the hardware keys.

    There are no keys for models or architectures. Their effects on measured models do not carry
    over to models that were not measured.
    """
    return f"quant:{efficiency.quant_class(variant)}"


Powers = tuple[tuple[str, float], ...]


class CostTerm(NamedTuple):
    """One cause in the cost model. `value` is seconds or a count, before each coefficient is
    applied to its power."""

    value: float
    powers: Powers

    def seconds(self, coefficients: Mapping[str, float]) -> float:
        """Return `value` · Π coefficient ^ power."""
        if not self.value:
            return 0.0
        product = self.value
        for name, exponent in self.powers:
            product *= coefficients[name] ** exponent
        return product


class DecodeCost(NamedTuple):
    """The `seconds` of one decode step by cause, as `--explain` prints them."""

    seconds: Mapping[str, float]
    coefficients: dict[str, float]
    streamed: Streamed
    kv_read_bytes: int

    @property
    def memory_s(self) -> float:
        """Seconds of the step that a faster memory would shorten."""
        return sum(self.seconds[cause] for cause in ("weights", "routed", "kv", "state"))

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())


def decode_parts(
    model: Model,
    variant: Variant,
    hardware: Hardware,
    *,
    depth: int = 0,
    kv_type: str = "f16",
    n_sequences: int = 1,
) -> dict[str, CostTerm]:
    """Return the terms of a decode step of `n_sequences`, each at `depth` tokens of context,
    without coefficients.

    benchmarks/planner_fit fits the coefficients, and `decode_terms` applies them.
    """
    bandwidth = hardware.bandwidth_gbps * 1e9
    keys = hardware.keys
    read = streamed(model, variant)
    counts = facts(model)
    moe_factor: Powers = (("moe", 1),) if model.experts is not None else ()
    weight_powers: Powers = (
        ("eta", -1),
        ("quant", 1),
        ("size", size_power(model, variant)),
        *moe_factor,
    )
    launch_powers: Powers = (("clock", clock_power(hardware.clock_ghz)), *moe_factor)
    dense_s = read.dense_bytes / bandwidth
    routed_bytes = read.step_bytes(model, routed_sequences(n_sequences)) - read.dense_bytes
    routed_s = routed_bytes / bandwidth
    index_s = 1e3 * n_sequences * counts.n_index_layers * depth / bandwidth
    state_s = n_sequences * state_traffic_bytes(model) / bandwidth
    parts = {
        "weights": CostTerm(dense_s / kernels.read_share(variant, keys), weight_powers),
        "routed": CostTerm(
            routed_s / kernels.experts_read_share(variant, keys), (*weight_powers, ("routed", 1))
        ),
    }
    parts |= _unpacking_parts(model, variant, hardware, n_sequences)
    parts["layers"] = CostTerm(counts.n_layers, (("layer_s", 1), *launch_powers))
    parts["experts"] = CostTerm(counts.n_expert_layers, (("expert_layer_s", 1), *launch_powers))
    parts["recurrent"] = CostTerm(
        counts.n_recurrent_layers, (("recurrent_layer_s", 1), *launch_powers)
    )
    parts["kv"] = _attention_part(model, hardware, depth, kv_type, n_sequences)
    parts["index"] = CostTerm(index_s, (("index_kb", 1),))
    parts["state"] = CostTerm(state_s, (("state", -1),))
    return parts


def _unpacking_parts(
    model: Model, variant: Variant, hardware: Hardware, n_sequences: int
) -> dict[str, CostTerm]:
    """Return the arithmetic that unpacks quantised weights. (A CPU's read rate already includes
    it.)"""
    units = (hardware.plain_tflops or hardware.tflops) * 1e12
    moe_factor: Powers = (("moe", 1),) if model.experts is not None else ()
    unpack_powers: Powers = (("unpack", -1), *moe_factor)
    flops = 2
    if hardware.engine == "cpu" or format_key(variant) in PLAIN_FORMATS:
        flops = 0
    extra_flops = kernels.unpack_flops(variant, hardware.keys)
    read = streamed(model, variant)
    n_routed = 0.0
    if flops or extra_flops:
        n_routed = read.step_routed_params(model, routed_sequences(n_sequences))
    return {
        "unpacked": CostTerm(flops * read.dense_params / units, unpack_powers),
        "routed_unpacked": CostTerm(flops * n_routed / units, unpack_powers),
        "hard_unpacked": CostTerm(extra_flops * (read.dense_params + n_routed) / units, moe_factor),
    }


def _attention_part(
    model: Model, hardware: Hardware, depth: int, kv_type: str, n_sequences: int
) -> CostTerm:
    # If every head reads the same row, attention is limited by arithmetic instead of reading.
    if facts(model).heads_share_row:
        flops = n_sequences * all_attention_flops(model, depth)
        return CostTerm(flops / (hardware.tflops * 1e12), (("kv_mla", -1),))
    if unpacks_kv(hardware, kv_type):
        flops = n_sequences * all_attention_flops(model, depth)
        return CostTerm(flops / (hardware.lane_tflops * 1e12), (("kv_unpack", -1),))
    n_bytes = n_sequences * kv_read_bytes(model, depth, kv_type)
    return CostTerm(n_bytes / (hardware.bandwidth_gbps * 1e9), (("kv", -1),))


@lru_cache(4096)
def decode_terms(
    model: Model,
    variant: Variant,
    hardware: Hardware,
    *,
    depth: int = 0,
    kv_type: str = "f16",
    n_sequences: int = 1,
) -> DecodeCost:
    """Return the parts of one decode step of `n_sequences`, each at `depth` tokens of context.

    The result is cached and shared, so callers must not change it.
    """
    coefficients = efficiency.coefficients("decode", hardware.keys_for(variant))
    # No kernel reads faster than the memory delivers, so the sum of the fitted effects is limited
    # to the peak.
    limited_coefficients = coefficients | {
        "eta": weight_share(coefficients, hardware, model, variant),
        "quant": 1.0,
        "size": 1.0,
        "routed": max(1.0, coefficients["routed"]),
    }
    parts = decode_parts(
        model, variant, hardware, depth=depth, kv_type=kv_type, n_sequences=n_sequences
    )
    seconds = {name: part.seconds(limited_coefficients) for name, part in parts.items()}
    kv_bytes = n_sequences * kv_read_bytes(model, depth, kv_type)
    bandwidth = hardware.bandwidth_gbps * 1e9
    # Attention that unpacks its cache counts as no faster than f16. No measurement shows otherwise.
    if unpacks_kv(hardware, kv_type) and not facts(model).heads_share_row:
        f16_bytes = n_sequences * kv_read_bytes(model, depth, "f16")
        seconds["kv"] = max(
            seconds["kv"], f16_bytes / (bandwidth * min(PEAK_SHARE, coefficients["kv"]))
        )
    if hardware.engine == "cpu" and hardware.n_cpu_cores > 0:
        flops = n_sequences * all_attention_flops(model, depth)
        seconds["kv"] = max(
            seconds["kv"], flops / (hardware.n_cpu_cores * CPU_ATTENTION_FLOPS_S_PER_CORE)
        )
    seconds["kv"] = max(seconds["kv"], kv_bytes / (bandwidth * PEAK_SHARE)) + seconds.pop("index")
    seconds["unpacked"] += seconds.pop("hard_unpacked")
    batched = efficiency.coefficients("batched", hardware.keys_for(variant))
    further_costs = further_parts(model, variant, hardware, n_sequences)
    seconds["further"] = sum(part.seconds(batched) for part in further_costs)
    return DecodeCost(
        seconds=seconds,
        coefficients=coefficients,
        streamed=streamed(model, variant),
        kv_read_bytes=kv_bytes,
    )


def further_parts(
    model: Model, variant: Variant, hardware: Hardware, n_sequences: int
) -> tuple[CostTerm, ...]:
    """Return the cost that sequences after the first add to a step on a GPU.

    Each adds its arithmetic, and a little per layer, which the units share. Empty on a CPU, which
    overlaps it with reading the weights: speed.py takes the longer of the two.
    """
    if n_sequences <= 1 or hardware.engine == "cpu":
        return ()
    read = streamed(model, variant)
    counts = facts(model)
    n_further = further_sequences(n_sequences)
    moe_factor: Powers = (("moe", 1),) if model.experts is not None else ()
    arithmetic_s = 2 * (read.dense_params + read.routed_params) / (hardware.tflops * 1e12)
    shared_rows = n_further * (_ROW_TFLOPS / hardware.tflops) ** _ROW_POWER
    return (
        CostTerm(n_further * arithmetic_s, (("many", -1), *moe_factor)),
        CostTerm(shared_rows * counts.n_layers, (("row_s", 1),)),
        CostTerm(shared_rows * counts.n_recurrent_layers, (("recurrent_row_s", 1),)),
    )


def unpacks_kv(hardware: Hardware, kv_type: str) -> bool:
    """Return whether one token's attention over a cache of this type is limited by arithmetic
    instead of reading."""
    return hardware.lane_tflops > 0 and kv_type not in ("f16", "bf16", "f32")


def weight_share(
    coefficients: Mapping[str, float], hardware: Hardware, model: Model, variant: Variant
) -> float:
    """Return the share of the memory's bandwidth at which a step's weights are read and
    multiplied."""
    measured = hardware.timed_flops_s(model, variant)
    if measured is not None:
        read = streamed(model, variant)
        bytes_a_weight = read.total_bytes / (read.dense_params + read.routed_params)
        return min(PEAK_SHARE, measured[1] / 2 * bytes_a_weight / (hardware.bandwidth_gbps * 1e9))
    is_repacked = not hardware.stored and variant.quant.upper() not in kernels.CPU_PLAIN_FORMATS
    gain = 1.0
    if hardware.engine == "cpu" and is_repacked:
        gain = _CPU_REPACKED_GAIN
    slowdown = coefficients["quant"] * math.pow(coefficients["size"], size_power(model, variant))
    return min(PEAK_SHARE, gain * coefficients["eta"] / slowdown)


def size_power(model: Model, variant: Variant) -> float:
    """Return the exponent of the coefficient `size`: 0 for a step that reads 5 GB, more for more.

    Some memories deliver a smaller share of their rate for more weights. A DGX Spark reads a 7B
    model at 80 % of its rate, a 32B model at 74 %.
    """
    return math.log(streamed(model, variant).total_bytes / _REFERENCE_BYTES)


def clock_power(clock_ghz: float) -> float:
    """Return the exponent of the coefficient `clock`: 0 at `efficiency.REFERENCE_GHZ`, more for a
    slower clock."""
    return -math.log(clock_ghz / efficiency.REFERENCE_GHZ)


def kv_read_bytes(model: Model, depth: int, kv_type: str = "f16") -> int:
    """Return the KV bytes that one token's attention reads after `depth` tokens."""
    if depth <= 0:
        return 0
    return int(facts(model).kv_elements(depth) * float(quants.kv_element_bytes(kv_type)))


def state_traffic_bytes(model: Model) -> int:
    """Return the bytes of its sequence's recurrent states that one token reads and writes."""
    return 2 * facts(model).recurrent_state_bytes


@lru_cache(4096)
def all_attention_flops(model: Model, depth: float, *, tokens_outside: float = 0.0) -> float:
    """Return the FLOPs of one token's attention over `depth` earlier tokens, in all layers.

    `tokens_outside` counts tokens outside a window that are computed anyway.
    """
    return sum(
        count * layer.mixer.flops(model.n_heads, depth, tokens_outside)
        for layer, count in facts(model).groups
    )
