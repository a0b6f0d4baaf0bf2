"""The law of decoding, term by term: seconds of one step, by cause. (Prompts: prefill_cost.py.)

t = [ (dense + r·routed) / (η·BW) + parameters / (u·units) + (layers·a + expert layers·b + recurrent
layers·c)
      · (1.8 GHz / clock)^l ] + KV read / (f·BW) + layers with an indexer · context · i / BW
      + states read and written / (e·BW) + (sequences − 1)^0.8 · (2·P / (m·units) + layers·d / units)

Weights of fewer bits than a product's are unpacked by arithmetic, which adds to reading them (f16
and bf16: nothing). Where an engine's kernels for a format are poor, reading or unpacking takes
longer by what kernels.py has of it. Launches are waited for, so they go by the clock, and more than
in proportion: later chips launch better too. On a CPU attention is arithmetic on few cores, and
with a latent KV (MLA), which every head reads, on any machine: it takes whichever is longer, that
or reading the KV. So is CUDA's over a quantised KV: its kernel for one token unpacks the cache on
the plain lanes, once for every query head, where that of f16 reads it once on the units for
matrices. Sparse attention's indexer goes over the keys of the whole context in each of its layers,
several times: some kilobytes a token.

A constant fraction of bandwidth misses small models and mixtures by 16-90 %; the per-layer times
(kernel launches, routing) are what it lacks. Coefficients: efficiency.toml. Seconds, bytes and
tokens throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from localllm.device.types import Device, TypeRates
from localllm.planner import efficiency, kernels
from localllm.planner.kernel_facts import facts as kernel_facts
from localllm.planner.streams import Streamed, facts, streamed
from localllm_catalog import quants
from localllm_catalog.types import Model, Variant

# Of system memory beside a card, of which nothing is said.
ASSUMED_BANDWIDTH_GBPS = 20.0
# What a processor reads of its memory's nominal rate: of an EPYC 9554's 461 GB/s a 14B in Q4_K_M
# takes 28.7 tokens/s and in Q8_0 19.2 (https://ahelpme.com/?p=6685), 260 and 299 GB/s. And what one
# of its cores takes of that at most: a 7B in Q4_0 and Q4_K on one thread 15.5 and 17.7 GB/s
# (github.com/ggml-org/llama.cpp, tools/llama-bench; a Ryzen 6800H).
CPU_NOMINAL_SHARE = 0.75
CPU_CORE_GBPS = 20.0
# What a memory delivers of its nominal rate at most.
PEAK_SHARE = 0.98
# One core's rate at one token's attention: llama.cpp 0.3.36's F16 dot products and running softmax
# on Zen 4 (AVX-512), two cores, 512 tokens: SmolLM2-135M (heads of 64) +2.1 ms, Gemma-3-270M (of
# 256) +2.2 ms, 38 MFLOP each. 8 KV heads: half of it.
CPU_ATTENTION_FLOPS_S_PER_CORE = 10e9
# llama.cpp lays most formats out anew for the CPU's vectors when it loads them; these it multiplies
# as they lie, which the table's CPU rate is for. (486M weights in 8 layers, two Zen 4 cores, GB/s
# at one token: Q4_1 23; Q4_0 30, Q4_K 33, Q8_0 37, where a copy measures 28. The gain is set well
# below that: in a mixed file, Gemma-3-270M's, it was 1.0 on two Zen 5 cores and 1.2 on these.)
_CPU_LAID_OUT_GAIN = 1.1
# Formats whose weights are multiplied as they lie.
PLAIN_FORMATS = ("quant:f16", "quant:bf16", "quant:mlx16")


# What a sequence more costs grows slower than their number (kernels fill up), and their tokens are
# routed more alike than chance: of the powers tried on llama-batched-bench's rows (2 to 32
# sequences) these left the least (benchmarks/planner_fit.md).
_FURTHER_POWER = 0.8
# Nominal TFLOP/s of the GPU that a further sequence's seconds a layer are told of.
_ROW_TFLOPS = 40.0
_APART_POWER = 0.5


def further(n_sequences: int) -> float:
    """As how many the sequences beside the first count, for the arithmetic of a step."""
    if n_sequences <= 1:
        return 0.0
    return float((n_sequences - 1) ** _FURTHER_POWER)


def apart(n_sequences: int) -> float:
    """As how many `n_sequences` count that are routed independently, for the experts a step
    reads."""
    return float(n_sequences**_APART_POWER)


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine as the laws see it: the `keys` of efficiency.toml that apply to it
    (`efficiency.hardware_keys`), GB/s of its memory, nominal FP16 TFLOP/s, the cores of the CPU
    that computes (0: a GPU does, or unknown: attention then only reads its cache), the share of
    those TFLOP/s that its power lets matrices have, the GPU's clock, and its TFLOP/s without units
    for matrices (0: as many), and, of a processor, what was timed of its matrix kernels, whether it
    multiplies weights as they are `stored` (or as the engine would have it), and what an NVIDIA
    card's plain lanes do."""

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
        """The kernel set that runs, the most general of the keys."""
        return self.keys[0]

    def keys_for(self, variant: Variant) -> tuple[str, ...]:
        """Keys of where it runs and of what runs."""
        return (*self.keys, format_key(variant))

    def timed_flops_s(self, model: Model, variant: Variant) -> tuple[float, float] | None:
        """(FLOP/s of a prompt, FLOP/s of one token) of this file's matrices, where its type was
        timed on a processor."""
        if not self.rates:
            return None
        return kernels.flops_s(self.rates, model, variant, stored=self.stored)

    def timed_row_s(self, model: Model, variant: Variant, rows: int) -> float | None:
        """Seconds of multiplying one of `rows` tokens that are computed together, where its type
        was timed on a processor."""
        flops_s = kernels.rows_flops_s(self.rates, model, variant, rows, stored=self.stored)
        if flops_s is None:
            return None
        read = streamed(model, variant)
        return 2 * (read.dense_params + read.routed_params) / flops_s


@lru_cache(4096)
def hardware_of(device: Device, backend: str) -> Hardware:
    """`device` as `backend` uses it."""
    tflops, _ = efficiency.nominal_tflops(device, backend)
    name = device.match or device.name
    share = efficiency.share(efficiency.part(name), device.compute_units)
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
    lanes = 0.0
    if kernel_facts(keys).unpacks_kv_on_lanes:
        lanes = efficiency.lane_tflops(name, device.compute_units)
    return Hardware(
        keys,
        bandwidth_gbps,
        tflops,
        device.n_cpu_cores,
        share,
        clock_ghz,
        plain_tflops,
        rates,
        lane_tflops=lanes,
    )


def format_key(variant: Variant) -> str:
    """The key of what runs, beside where: the kernels of its format. Of models and their
    architectures none is kept: what they add to what was measured is not found again in those that
    were not."""
    return f"quant:{efficiency.quant_class(variant)}"


Powers = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class CostTerm:
    """One cause in a law: its `value` is seconds, or a count, before the coefficients are applied,
    each to its power."""

    value: float
    powers: Powers

    def seconds(self, coefficients: Mapping[str, float]) -> float:
        """`value` · Π coefficient ^ power."""
        if not self.value:
            return 0.0
        found = self.value
        for name, exponent in self.powers:
            found *= coefficients[name] ** exponent
        return found


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """The `seconds` of one decode step by cause: what `--explain` prints line by line."""

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
    """What a decode step of `n_sequences`, each at `depth` tokens of context, is made of: the law
    without its coefficients, which benchmarks/planner_fit finds and `decode_terms` reads."""
    bandwidth = hardware.bandwidth_gbps * 1e9
    keys = hardware.keys
    read = streamed(model, variant)
    known = facts(model)
    core: Powers = (("moe", 1),) if model.experts is not None else ()
    weights: Powers = (("eta", -1), ("quant", 1), *core)
    wait: Powers = (("clock", lag(hardware.clock_ghz)), *core)
    dense_s = read.dense_bytes / bandwidth
    routed_bytes = read.step_bytes(model, apart(n_sequences)) - read.dense_bytes
    routed_s = routed_bytes / bandwidth
    index_s = 1e3 * n_sequences * known.n_index_layers * depth / bandwidth
    state_s = n_sequences * state_traffic_bytes(model) / bandwidth
    parts = {
        "weights": CostTerm(dense_s / kernels.read_share(variant, keys), weights),
        "routed": CostTerm(
            routed_s / kernels.experts_read_share(variant, keys), (*weights, ("routed", 1))
        ),
    }
    parts |= _unpacking_parts(model, variant, hardware, n_sequences)
    parts["layers"] = CostTerm(known.n_layers, (("layer_s", 1), *wait))
    parts["experts"] = CostTerm(known.n_expert_layers, (("expert_layer_s", 1), *wait))
    parts["recurrent"] = CostTerm(known.n_recurrent_layers, (("recurrent_layer_s", 1), *wait))
    parts["kv"] = _attention_part(model, hardware, depth, kv_type, n_sequences)
    parts["index"] = CostTerm(index_s, (("index_kb", 1),))
    parts["state"] = CostTerm(state_s, (("state", -1),))
    return parts


def _unpacking_parts(
    model: Model, variant: Variant, hardware: Hardware, n_sequences: int
) -> dict[str, CostTerm]:
    """The arithmetic that unpacks weights which are not multiplied as they lie. (A processor's rate
    of reading has that in it.)"""
    units = (hardware.plain_tflops or hardware.tflops) * 1e12
    core: Powers = (("moe", 1),) if model.experts is not None else ()
    unpack: Powers = (("unpack", -1), *core)
    flops = 2
    if hardware.engine == "cpu" or format_key(variant) in PLAIN_FORMATS:
        flops = 0
    hard_flops = kernels.unpack_flops(variant, hardware.keys)
    read = streamed(model, variant)
    n_routed = 0.0
    if flops or hard_flops:
        n_routed = read.step_routed_params(model, apart(n_sequences))
    return {
        "unpacked": CostTerm(flops * read.dense_params / units, unpack),
        "routed_unpacked": CostTerm(flops * n_routed / units, unpack),
        "hard_unpacked": CostTerm(hard_flops * (read.dense_params + n_routed) / units, core),
    }


def _attention_part(
    model: Model, hardware: Hardware, depth: int, kv_type: str, n_sequences: int
) -> CostTerm:
    # If every head reads the same row, arithmetic takes the time, not reading.
    if facts(model).heads_share_row:
        flops = n_sequences * all_attention_flops(model, depth)
        return CostTerm(flops / (hardware.tflops * 1e12), (("kv_mla", -1),))
    if unpacks_kv(hardware, kv_type):
        flops = n_sequences * all_attention_flops(model, depth)
        return CostTerm(flops / (hardware.lane_tflops * 1e12), (("kv_unpack", -1),))
    n_bytes = n_sequences * kv_read_bytes(model, depth, kv_type)
    return CostTerm(n_bytes / (hardware.bandwidth_gbps * 1e9), (("kv", -1),))


def decode_terms(
    model: Model,
    variant: Variant,
    hardware: Hardware,
    *,
    depth: int = 0,
    kv_type: str = "f16",
    n_sequences: int = 1,
) -> DecodeCost:
    """The parts of one decode step of `n_sequences`, each at `depth` tokens of context."""
    c = efficiency.coefficients("decode", hardware.keys_for(variant))
    # No kernel reads memory faster than the memory delivers: the fitted effects may not add up to
    # more than the peak.
    limited = c | {
        "eta": weight_share(c, hardware, model, variant),
        "quant": 1.0,
        "routed": max(1.0, c["routed"]),
    }
    parts = decode_parts(
        model, variant, hardware, depth=depth, kv_type=kv_type, n_sequences=n_sequences
    )
    s = {name: part.seconds(limited) for name, part in parts.items()}
    kv_bytes = n_sequences * kv_read_bytes(model, depth, kv_type)
    bandwidth = hardware.bandwidth_gbps * 1e9
    # Nobody has measured attention that unpacks its cache to be faster than over f16.
    if unpacks_kv(hardware, kv_type) and not facts(model).heads_share_row:
        f16_bytes = n_sequences * kv_read_bytes(model, depth, "f16")
        s["kv"] = max(s["kv"], f16_bytes / (bandwidth * min(PEAK_SHARE, c["kv"])))
    if hardware.engine == "cpu" and hardware.n_cpu_cores > 0:
        flops = n_sequences * all_attention_flops(model, depth)
        s["kv"] = max(s["kv"], flops / (hardware.n_cpu_cores * CPU_ATTENTION_FLOPS_S_PER_CORE))
    s["kv"] = max(s["kv"], kv_bytes / (bandwidth * PEAK_SHARE)) + s.pop("index")
    s["unpacked"] += s.pop("hard_unpacked")
    batched = efficiency.coefficients("batched", hardware.keys_for(variant))
    beside = further_parts(model, variant, hardware, n_sequences)
    s["further"] = sum(part.seconds(batched) for part in beside)
    return DecodeCost(
        seconds=s,
        coefficients=c,
        streamed=streamed(model, variant),
        kv_read_bytes=kv_bytes,
    )


def further_parts(
    model: Model, variant: Variant, hardware: Hardware, n_sequences: int
) -> tuple[CostTerm, ...]:
    """What the sequences beside the first add to a step on a GPU: their arithmetic, and a little
    per layer, which the units share. (A processor overlaps it with reading the weights: speed.py
    counts whichever is longer.)"""
    if n_sequences <= 1 or hardware.engine == "cpu":
        return ()
    read = streamed(model, variant)
    known = facts(model)
    more = further(n_sequences)
    mixture: Powers = (("moe", 1),) if model.experts is not None else ()
    arithmetic = 2 * (read.dense_params + read.routed_params) / (hardware.tflops * 1e12)
    shared = more * _ROW_TFLOPS / hardware.tflops
    return (
        CostTerm(more * arithmetic, (("many", -1), *mixture)),
        CostTerm(shared * known.n_layers, (("row_s", 1),)),
        CostTerm(shared * known.n_recurrent_layers, (("recurrent_row_s", 1),)),
    )


def unpacks_kv(hardware: Hardware, kv_type: str) -> bool:
    """True where one token's attention over a cache of that type is arithmetic of its own, not
    reading."""
    return hardware.lane_tflops > 0 and kv_type not in ("f16", "bf16", "f32")


def weight_share(
    coefficients: Mapping[str, float], hardware: Hardware, model: Model, variant: Variant
) -> float:
    """Share of the memory's bandwidth at which a step's weights are read and multiplied."""
    measured = hardware.timed_flops_s(model, variant)
    if measured is not None:
        read = streamed(model, variant)
        bytes_a_weight = read.total_bytes / (read.dense_params + read.routed_params)
        return min(PEAK_SHARE, measured[1] / 2 * bytes_a_weight / (hardware.bandwidth_gbps * 1e9))
    laid_out = not hardware.stored and variant.quant.upper() not in kernels.CPU_PLAIN_FORMATS
    gain = 1.0
    if hardware.engine == "cpu" and laid_out:
        gain = _CPU_LAID_OUT_GAIN
    return min(PEAK_SHARE, gain * coefficients["eta"] / coefficients["quant"])


def lag(clock_ghz: float) -> float:
    """The exponent of the coefficient `clock`: 0 at `efficiency.REFERENCE_GHZ`, more where the
    clock is slower."""
    return -math.log(clock_ghz / efficiency.REFERENCE_GHZ)


def kv_read_bytes(model: Model, depth: int, kv_type: str = "f16") -> int:
    """KV bytes one token's attention reads after `depth` tokens."""
    if depth <= 0:
        return 0
    return int(facts(model).kv_elements(depth) * float(quants.kv_element_bytes(kv_type)))


def state_traffic_bytes(model: Model) -> int:
    """Bytes one token reads and writes of its sequence's recurrent states."""
    return 2 * facts(model).recurrent_state_bytes


def all_attention_flops(model: Model, depth: float, *, beside: float = 0.0) -> float:
    """FLOPs of one token's attention over `depth` earlier tokens, in all layers. `beside`: tokens
    outside a window that are computed all the same."""
    return sum(
        count * layer.mixer.flops(model.n_heads, depth, beside)
        for layer, count in facts(model).groups
    )
