"""The two laws of speed, term by term: seconds of one decode step, and of one prompt token, by cause.

decode   t = [ (dense + r·routed) / (η·BW) + parameters / (u·units) + (layers·a + expert layers·b + recurrent layers·c)
             · (1.8 GHz / clock)^l ] + KV read / (f·BW)
             + states read and written / (e·BW) + (sequences − 1)^0.9 · (2·P / (m·units) + layers·d)
         weights of fewer bits than a product's are unpacked by arithmetic, which adds to reading them (f16 and bf16: nothing);
         launches are waited for, so they go by the clock, and more than in proportion: later chips launch better too
         on a CPU attention is arithmetic on few cores, and with a latent KV (MLA), which every head reads, on any machine:
         it takes whichever is longer, that or reading the KV
prefill  t per token = 2·P / (g·units) + attention FLOPs / (h·units) + FLOPs of recurrent states / (s·units)
         + weights / (η·BW·micro-batch) + layers·a / micro-batch
         the matrices at what the board's power lets the units hold (power.py); attention as if every token of a micro-batch
         saw all of it: kernels skip little of what the mask hides

A constant fraction of bandwidth misses small models and mixtures by 16-90 %; the per-layer times (kernel launches,
routing) are what it lacks. Coefficients: efficiency.toml. Seconds, bytes and tokens throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from localllm.device.types import Device
from localllm.planner import efficiency, families, power
from localllm.planner.facts import facts
from localllm.planner.streams import Streamed, streamed
from localllm.planner.types import DEFAULT_BATCH
from localllm_catalog import quants
from localllm_catalog.remembered import by_identity
from localllm_catalog.types import Layer, Model, Variant

ASSUMED_BANDWIDTH_GBPS = 20.0
# One core's rate at one token's attention: llama.cpp 0.3.36's F16 dot products and running softmax on Zen 4 (AVX-512), two
# cores, 512 tokens: SmolLM2-135M (heads of 64) +2.1 ms, Gemma-3-270M (of 256) +2.2 ms, 38 MFLOP each. 8 KV heads: half of it.
CPU_ATTENTION_FLOPS_S_PER_CORE = 10e9
# llama.cpp lays most formats out anew for the CPU's vectors when it loads them; these it multiplies as they lie, which
# the table's CPU rate is for. (486M weights in 8 layers, two Zen 4 cores, GB/s at one token: Q4_1 23; Q4_0 30, Q4_K 33,
# Q8_0 37, where a copy measures 28. The gain is set well below that: in a mixed file, Gemma-3-270M's, it was 1.0 on two
# Zen 5 cores and 1.2 on these.)
_CPU_PLAIN_FORMATS = ("Q4_1", "Q5_0", "Q5_1")
_CPU_LAID_OUT_GAIN = 1.1
# Formats whose weights are multiplied as they lie.
PLAIN_FORMATS = ("quant:f16", "quant:bf16", "quant:mlx16")


# What a sequence more costs grows slower than their number (kernels fill up), and their tokens are routed more alike than
# chance: of the powers tried on llama-batched-bench's rows (2 to 32 sequences) these left the least (benchmarks/planner_fit.md).
_FURTHER_POWER = 0.9
_APART_POWER = 0.5


def further(n_sequences: int) -> float:
    """As how many the sequences beside the first count, for the arithmetic of a step."""
    return float((n_sequences - 1) ** _FURTHER_POWER) if n_sequences > 1 else 0.0


def apart(n_sequences: int) -> float:
    """As how many `n_sequences` count that are routed independently, for the experts a step reads."""
    return float(n_sequences**_APART_POWER)


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine as the laws see it: the `keys` of efficiency.toml that apply to it (`families.hardware_keys`),
    GB/s of its memory, nominal FP16 TFLOP/s, the cores of the CPU that computes (0: a GPU does, or unknown: attention
    then only reads its cache), the share of those TFLOP/s that its power lets matrices have, the GPU's clock, and
    its TFLOP/s without units for matrices (0: as many)."""

    keys: tuple[str, ...]
    bandwidth_gbps: float
    tflops: float
    n_cpu_cores: int = 0
    power_share: float = 1.0
    clock_ghz: float = families.REFERENCE_GHZ
    plain_tflops: float = 0.0

    @property
    def engine(self) -> str:
        """The kernel set that runs, the most general of the keys."""
        return self.keys[0]

    def keys_for(self, variant: Variant) -> tuple[str, ...]:
        """Keys of where it runs and of what runs."""
        return (*self.keys, format_key(variant))


@by_identity
def hardware_of(device: Device, backend: str) -> Hardware:
    """`device` as `backend` uses it."""
    tflops, _ = families.nominal_tflops(device, backend)
    name = device.match or device.name
    share = power.share(families.part(name), device.compute_units)
    clock_ghz = families.REFERENCE_GHZ if device.accelerator == "cpu" else families.clock_ghz(name)
    keys, bandwidth_gbps = families.device_keys(device, backend), bandwidth_of(device)[0]
    plain_tflops, _ = families.nominal_tflops(device)
    return Hardware(keys, bandwidth_gbps, tflops, device.n_cpu_cores, share, clock_ghz, plain_tflops)


def bandwidth_of(device: Device) -> tuple[float, str]:
    """(GB/s, basis) of the accelerator's memory; assumed where nothing is known."""
    if device.bandwidth_gbps is None:
        return ASSUMED_BANDWIDTH_GBPS, "assumed"
    return device.bandwidth_gbps.value, device.bandwidth_gbps.basis


def format_key(variant: Variant) -> str:
    """The key of what runs, beside where: the kernels of its format. Of models and their architectures none is kept: what
    they add to what was measured is not found again in those that were not."""
    return f"quant:{families.quant_class(variant.quant, mlx=variant.format == 'mlx')}"


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds of one decode step, by cause: what `--explain` prints line by line."""

    weights_s: float
    routed_s: float
    unpacked_s: float
    routed_unpacked_s: float
    layers_s: float
    experts_s: float
    recurrent_s: float
    further_s: float
    state_s: float
    kv_s: float
    mixture_factor: float
    coefficients: dict[str, float]
    streamed: Streamed
    kv_read_bytes: int

    @property
    def memory_s(self) -> float:
        """Seconds of the step that a faster memory would shorten."""
        return (self.weights_s + self.routed_s) * self.mixture_factor + self.kv_s + self.state_s

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        core = self.weights_s + self.routed_s + self.unpacked_s + self.routed_unpacked_s
        core += self.layers_s + self.experts_s + self.recurrent_s
        return core * self.mixture_factor + self.further_s + self.state_s + self.kv_s


def decode_terms(
    model: Model,
    variant: Variant,
    hardware: Hardware,
    *,
    depth: int = 0,
    kv_type: str = "f16",
    n_sequences: int = 1,
) -> Terms:
    """The parts of one decode step of `n_sequences`, each at `depth` tokens of context."""
    c = efficiency.coefficients("decode", hardware.keys_for(variant))
    bandwidth = hardware.bandwidth_gbps * 1e9
    parts = streamed(model, variant)
    routed = parts.step_bytes(model, apart(n_sequences)) - parts.dense_bytes
    known = facts(model)
    kv = kv_read_bytes(model, depth, kv_type) * n_sequences
    # No kernel reads memory faster than the memory delivers: the fitted effects may not add up to more than the peak.
    eta = weight_share(c, hardware, variant)
    kv_s = kv / (bandwidth * (0.98 if known.has_mla else min(0.98, c["kv"])))
    is_cpu = hardware.engine == "cpu" and hardware.n_cpu_cores > 0
    if known.has_mla or is_cpu:
        flops = sum(count * attention_flops(layer, model.n_heads, depth) for layer, count in known.groups)
    if known.has_mla:
        kv_s = max(kv_s, n_sequences * flops / (hardware.tflops * 1e12 * c["kv_mla"]))
    if is_cpu:
        kv_s = max(kv_s, n_sequences * flops / (hardware.n_cpu_cores * CPU_ATTENTION_FLOPS_S_PER_CORE))
    unpacked_s, wait = unpack_s(c, hardware, variant), launch_factor(c, hardware)
    return Terms(
        weights_s=parts.dense_bytes / (eta * bandwidth),
        routed_s=routed * max(1.0, c["routed"]) / (eta * bandwidth),
        unpacked_s=parts.dense_params * unpacked_s,
        routed_unpacked_s=parts.step_routed_params(model, apart(n_sequences)) * unpacked_s,
        layers_s=known.n_layers * c["layer_s"] * wait,
        experts_s=known.n_expert_layers * c["expert_layer_s"] * wait,
        recurrent_s=known.n_recurrent_layers * c["recurrent_layer_s"] * wait,
        further_s=_further_s(model, variant, hardware, n_sequences),
        state_s=n_sequences * state_traffic_bytes(model) / (bandwidth * c["state"]),
        kv_s=kv_s,
        mixture_factor=c["moe"] if model.experts is not None else 1.0,
        coefficients=c,
        streamed=parts,
        kv_read_bytes=kv,
    )


def _further_s(model: Model, variant: Variant, hardware: Hardware, n_sequences: int) -> float:
    """Seconds that the sequences beside the first add to a step on a GPU: their arithmetic, and a little per layer.
    (A processor overlaps it with reading the weights: speed.py counts whichever is longer.)"""
    if n_sequences <= 1 or hardware.engine == "cpu":
        return 0.0
    c = efficiency.coefficients("batched", hardware.keys_for(variant))
    parts, known = streamed(model, variant), facts(model)
    arithmetic = 2 * (parts.dense_params + parts.routed_params) / (hardware.tflops * 1e12 * c["many"])
    mixture = c["moe"] if model.experts is not None else 1.0
    layers = known.n_layers * c["row_s"] + known.n_recurrent_layers * c["recurrent_row_s"]
    return further(n_sequences) * (arithmetic * mixture + layers)


def weight_share(coefficients: Mapping[str, float], hardware: Hardware, variant: Variant) -> float:
    """Share of the memory's bandwidth at which a step's weights are read and multiplied."""
    gain = _CPU_LAID_OUT_GAIN if hardware.engine == "cpu" and variant.quant.upper() not in _CPU_PLAIN_FORMATS else 1.0
    return min(0.98, gain * coefficients["eta"] / coefficients["quant"])


def unpack_s(coefficients: Mapping[str, float], hardware: Hardware, variant: Variant) -> float:
    """Seconds a parameter's unpacking adds to reading it. (A processor's rate of reading has it in it.)"""
    if hardware.engine == "cpu" or format_key(variant) in PLAIN_FORMATS:
        return 0.0
    return 2 / ((hardware.plain_tflops or hardware.tflops) * 1e12 * coefficients["unpack"])


def launch_factor(coefficients: Mapping[str, float], hardware: Hardware) -> float:
    """How much longer what is launched takes on this clock than at `families.REFERENCE_GHZ`."""
    return float(coefficients["clock"] ** lag(hardware.clock_ghz))


def lag(clock_ghz: float) -> float:
    """The exponent of the coefficient `clock`: 0 at `families.REFERENCE_GHZ`, more where the clock is slower."""
    return -math.log(clock_ghz / families.REFERENCE_GHZ)


def kv_read_bytes(model: Model, depth: int, kv_type: str = "f16") -> int:
    """KV bytes one token's attention reads after `depth` tokens."""
    return int(facts(model).kv_elements(depth) * float(quants.kv_element_bytes(kv_type))) if depth > 0 else 0


def state_traffic_bytes(model: Model) -> int:
    """Bytes one token reads and writes of its sequence's recurrent states."""
    return 2 * facts(model).recurrent_state_bytes


# --- prefill --------------------------------------------------------------------------------------------------------


def attention_flops(layer: Layer, n_heads: int, depth: float) -> float:
    """FLOPs one token's attention over `depth` earlier tokens costs in this layer (QK and PV, 2 per multiply-add)."""
    if layer.kind == "mla":
        return 2 * n_heads * (2 * layer.mla_rank + layer.mla_rope_dim) * depth
    if layer.kind not in ("full", "sliding"):
        return 0.0
    seen = min(depth, layer.window) if layer.kind == "sliding" and layer.window else depth
    return 2 * (layer.n_heads or n_heads) * (layer.head_dim_k + layer.head_dim_v) * seen


def scan_flops(model: Model) -> float:
    """FLOPs one token's pass through the states of the recurrent layers costs: decay, update and read of each element."""
    return 6.0 * facts(model).recurrent_state_bytes / 4


@dataclass(frozen=True, slots=True)
class PrefillTerms:
    """Seconds one prompt token costs, by cause."""

    matmul_s: float
    attention_s: float
    scan_s: float
    weights_s: float
    layers_s: float
    flops: float
    attention_flops: float

    @property
    def total_s(self) -> float:
        """Seconds per token."""
        return self.matmul_s + self.attention_s + self.scan_s + self.weights_s + self.layers_s


def prefill_terms(
    model: Model,
    variant: Variant,
    hardware: Hardware,
    *,
    prompt_tokens: int = 2048,
    depth: int = 0,
    n_batch: int = DEFAULT_BATCH,
) -> PrefillTerms:
    """The parts of reading `prompt_tokens` after `depth` cached ones in steps of `n_batch`, per token."""
    c = efficiency.coefficients("prefill", hardware.keys_for(variant))
    parts = streamed(model, variant)
    batch = max(1, min(prompt_tokens, n_batch))
    # Logits are computed for the last token only, so the output matrix does not count.
    weights = max(1, parts.dense_params + parts.routed_params - model.vocab_size * model.hidden_size)
    mean_depth = depth + (prompt_tokens + batch) / 2
    attention = sum(count * attention_flops(layer, model.n_heads, mean_depth) for layer, count in facts(model).groups)
    compute = hardware.tflops * 1e12
    moe = c["moe"] if model.experts is not None else 1.0
    read_s, launches_s = step_s(model, variant, hardware, batch)
    return PrefillTerms(
        matmul_s=2 * weights * c["quant"] * moe / (compute * hardware.power_share * c["matmul"]),
        attention_s=attention / (compute * c["attention"]),
        scan_s=scan_flops(model) / (compute * c["scan"]),
        weights_s=read_s / batch,
        layers_s=launches_s / batch,
        flops=2.0 * weights,
        attention_flops=attention,
    )


def step_s(model: Model, variant: Variant, hardware: Hardware, n_batch: int) -> tuple[float, float]:
    """(seconds of reading the weights, seconds of launches) that a micro-batch of so many prompt tokens has in common."""
    c = efficiency.coefficients("prefill", hardware.keys_for(variant))
    known = facts(model)
    read = streamed(model, variant).step_bytes(model, n_batch)
    launches_s = known.n_layers * c["layer_s"] + known.n_expert_layers * c["expert_layer_s"]
    launches_s += known.n_recurrent_layers * c["recurrent_layer_s"]
    return read / (hardware.bandwidth_gbps * 1e9 * min(0.98, c["eta"])), launches_s
