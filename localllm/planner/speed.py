"""How fast a model answers: decode, prefill, time to first token, loading. A roofline with measured efficiencies.

decode   t = [ (dense + r·routed) / (η·BW) + layers·a + expert layers·b + recurrent layers·c ] + KV read / (f·BW)
         on a CPU attention is arithmetic on few cores, and takes whichever is longer: that or reading the KV
prefill  t per token = 2·P / (g·units) + attention FLOPs / (h·units) + weights / (η·BW·micro-batch) + layers·a / micro-batch

A constant fraction of bandwidth misses small models and mixtures by 16-90 %; the per-layer times (kernel launches,
routing) are what it lacks. Coefficients: efficiency.toml. Seconds, bytes and tokens throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from localllm.device.types import Device
from localllm.planner import efficiency, families, learned
from localllm.planner.facts import facts
from localllm.planner.streams import Streamed, streamed
from localllm.planner.types import Range
from localllm_catalog import quants
from localllm_catalog.types import Layer, Model, Variant

ASSUMED_BANDWIDTH_GBPS = 20.0
ASSUMED_DISK_BYTES_S = 1.5e9
# One core's rate at one token's attention: llama.cpp 0.3.36's F16 dot products and running softmax on Zen 4 (AVX-512), two
# cores, 512 tokens: SmolLM2-135M (heads of 64) +2.1 ms, Gemma-3-270M (of 256) +2.2 ms, 38 MFLOP each. 8 KV heads: half of it.
CPU_ATTENTION_FLOPS_S_PER_CORE = 10e9
# llama.cpp lays most formats out anew for the CPU's vectors when it loads them; these it multiplies as they lie, which
# the table's CPU rate is for. (486M weights in 8 layers, two Zen 4 cores, GB/s at one token: Q4_1 23; Q4_0 30, Q4_K 33,
# Q8_0 37, where a copy measures 28. The gain is set well below that: in a mixed file, Gemma-3-270M's, it was 1.0 on two
# Zen 5 cores and 1.2 on these.)
_CPU_PLAIN_FORMATS = ("Q4_1", "Q5_0", "Q5_1")
_CPU_LAID_OUT_GAIN = 1.1
_Z = 1.28  # 10th to 90th percentile
# How far one figure strays from the next on the same machine, and how far a model from what its neighbours' figures
# say of it (ln). A model's own figure is taken at its word.
_RUN_NOISE = 0.05
_OWN_NOISE = 0.01
_MODEL_SPREAD = 0.10


@dataclass(frozen=True, slots=True)
class Measured:
    """Speeds measured on this machine with one variant. `depth`: mean context while decoding; 0 speeds = not measured.

    `short_tok_s` at `short_depth`: decode once more with the context nearly empty. What it is faster by is attention's.
    """

    model: Model
    variant: Variant
    backend: str
    decode_tok_s: float
    depth: int = 0
    kv_type: str = "f16"
    prefill_tok_s: float = 0.0
    prompt_tokens: int = 0
    date: str = ""
    short_tok_s: float = 0.0
    short_depth: int = 0

    @property
    def decoded(self) -> tuple[tuple[int, float], ...]:
        """(depth, tokens/s) of every decode figure."""
        figures = ((self.short_depth, self.short_tok_s), (self.depth, self.decode_tok_s))
        return tuple((depth, rate) for depth, rate in figures if rate > 0)


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds of one decode step, by cause: what `--explain` prints line by line."""

    weights_s: float
    routed_s: float
    layers_s: float
    experts_s: float
    recurrent_s: float
    kv_s: float
    graph_factor: float
    coefficients: dict[str, float]
    streamed: Streamed
    kv_read_bytes: int
    bandwidth_bytes_s: float

    @property
    def memory_s(self) -> float:
        """Seconds of the step that a faster memory would shorten."""
        return (self.weights_s + self.routed_s) * self.graph_factor + self.kv_s

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        core = self.weights_s + self.routed_s + self.layers_s + self.experts_s + self.recurrent_s
        return core * self.graph_factor + self.kv_s


def format_keys(model: Model, quant: str, *, engine: str, vendor: str, mlx: bool) -> tuple[str, ...]:
    """Keys of what runs, beside where: the format's kernels, the architecture's graph, the model's own."""
    q = families.quant_class(quant, mlx=mlx)
    kind = "moe" if model.experts is not None else "dense"
    arch = model.architecture or kind
    return (f"quant:{q}", f"quant:{q}.{engine}.{vendor}", f"quant:{q}.{engine}.{vendor}.{kind}", f"arch:{arch}",
            f"arch:{arch}.{engine}", f"model:{model.id}", f"model@{engine}:{model.id}")  # fmt: skip


def decode_terms(
    model: Model,
    variant: Variant,
    hardware: Sequence[str],
    bandwidth_gbps: float,
    *,
    vendor: str = "",
    depth: int = 0,
    kv_type: str = "f16",
    n_sequences: int = 1,
    n_cpu_cores: int = 0,
) -> Terms:
    """The parts of one decode step at `depth` tokens of context. `hardware`: keys from `families.hardware_keys`.

    `n_cpu_cores`: of the CPU that computes (0: a GPU does, or unknown: then attention only reads its cache).
    """
    mlx = variant.format == "mlx"
    keys = (*hardware, *format_keys(model, variant.quant, engine=hardware[0], vendor=vendor, mlx=mlx))
    c = efficiency.coefficients("decode", keys)
    bandwidth = bandwidth_gbps * 1e9
    parts = streamed(model, variant)
    routed = parts.step_bytes(model, n_sequences) - parts.dense_bytes
    known = facts(model)
    kv = kv_read_bytes(model, depth, kv_type) * n_sequences
    # No kernel reads memory faster than the memory delivers: the fitted effects may not add up to more than the peak.
    eta = weight_share(c, hardware, variant)
    kv_s = kv / (bandwidth * min(0.98, c["kv_mla" if known.has_mla else "kv"]))
    if hardware[0] == "cpu" and n_cpu_cores > 0:
        flops = sum(count * attention_flops(layer, model.n_heads, depth) for layer, count in known.groups)
        kv_s = max(kv_s, n_sequences * flops / (n_cpu_cores * CPU_ATTENTION_FLOPS_S_PER_CORE))
    return Terms(
        weights_s=parts.dense_bytes / (eta * bandwidth),
        routed_s=routed * max(1.0, c["routed"]) / (eta * bandwidth),
        layers_s=known.n_layers * c["layer_s"],
        experts_s=known.n_expert_layers * c["expert_layer_s"],
        recurrent_s=known.n_recurrent_layers * c["recurrent_layer_s"],
        kv_s=kv_s,
        graph_factor=c["graph"] * (c["moe"] if model.experts is not None else 1.0),
        coefficients=c,
        streamed=parts,
        kv_read_bytes=kv,
        bandwidth_bytes_s=bandwidth,
    )


def weight_share(coefficients: Mapping[str, float], hardware: Sequence[str], variant: Variant) -> float:
    """Share of the memory's bandwidth at which a step's weights are read and multiplied."""
    gain = _CPU_LAID_OUT_GAIN if hardware[0] == "cpu" and variant.quant.upper() not in _CPU_PLAIN_FORMATS else 1.0
    return min(0.98, gain * coefficients["eta"] / coefficients["quant"])


def kv_read_bytes(model: Model, depth: int, kv_type: str = "f16") -> int:
    """KV bytes one token's attention reads after `depth` tokens."""
    return int(facts(model).kv_elements(depth) * quants.kv_element_bytes(kv_type)) if depth > 0 else 0


def decode_bound(device: Device, model: Model, variant: Variant, *, depth: int = 0, kv_type: str = "f16") -> float:
    """tokens/s no engine can exceed: bandwidth ÷ (active weight bytes + KV bytes read at `depth`)."""
    read = streamed(model, variant).total_bytes + kv_read_bytes(model, depth, kv_type)
    return bandwidth_of(device)[0] * 1e9 / read


def bandwidth_of(device: Device) -> tuple[float, str]:
    """(GB/s, basis) of the accelerator's memory; assumed where nothing is known."""
    if device.bandwidth_gbps is None:
        return ASSUMED_BANDWIDTH_GBPS, "assumed"
    return device.bandwidth_gbps.value, device.bandwidth_gbps.basis


def _vendor(device: Device) -> str:
    return families.generation(device.match or device.name)[0]


def _basis(table: efficiency.Table, hardware: Sequence[str], model: Model) -> tuple[str, float]:
    key, n = table.nearest(hardware)
    kind = "MoE" if model.experts is not None else "dense"
    if n == 0:
        return f"formula: no {hardware[0]} measurement of this kind of machine, {kind}", table.spread_of("none")
    return f"table: {key.removeprefix('part:')} × {kind}, n={n}", table.spread_of(key)


def _range(value: float, spread: float, basis: str) -> Range:
    return Range(value, value * math.exp(-_Z * spread), value * math.exp(_Z * spread), basis)


def decode(
    device: Device,
    model: Model,
    variant: Variant,
    *,
    backend: str = "llamacpp",
    depth: int = 0,
    kv_type: str = "f16",
    n_sequences: int = 1,
    device_share: float = 1.0,
    measured: Sequence[Measured] = (),
) -> Range:
    """Predicted decode speed of one sequence at `depth`, tokens/s.

    `device_share` < 1: the rest of the layers run from host memory and the times add up. `measured`: this machine's
    own figures, which replace the table (the same variant: its figure, moved to this depth; another: its ratio).
    """
    step = _step(device, model, variant, backend, depth, kv_type, n_sequences, device_share)
    here = [m for m in measured if m.backend == backend and m.decoded]
    if not here:
        return _range(1 / step.total_s, step.spread, step.basis)
    seconds, spread, names = _as_measured(device, model, variant, backend, step, here)
    return _range(1 / seconds, spread, f"measured here: {names}")


@dataclass(frozen=True, slots=True)
class _Step:
    """A decode step in seconds by cause, and how well that is known."""

    weights_s: float
    fixed_s: float
    attention_s: float
    spread: float
    basis: str

    @property
    def parts(self) -> learned.Parts:
        return self.weights_s, self.fixed_s, self.attention_s

    @property
    def total_s(self) -> float:
        return sum(self.parts)


def _step(
    device: Device,
    model: Model,
    variant: Variant,
    backend: str,
    depth: int,
    kv_type: str,
    n_sequences: int,
    device_share: float,
) -> _Step:
    hardware = families.device_keys(device, backend)
    bandwidth, bandwidth_basis = bandwidth_of(device)

    def parts_on(keys: Sequence[str], gbps: float, vendor: str) -> learned.Parts:
        terms = decode_terms(
            model, variant, keys, gbps, vendor=vendor, depth=depth, kv_type=kv_type, n_sequences=n_sequences,
            n_cpu_cores=device.n_cpu_cores,
        )  # fmt: skip
        return terms.memory_s - terms.kv_s, terms.total_s - terms.memory_s, terms.kv_s

    weights_s, fixed_s, attention_s = parts_on(hardware, bandwidth, _vendor(device))
    basis, spread = _basis(efficiency.load()["decode"], hardware, model)
    if bandwidth_basis == "assumed":
        basis, spread = f"assumed {bandwidth:.0f} GB/s", 0.5
    if n_sequences > 1:
        tflops, _ = families.nominal_tflops(device)
        prompt = prefill_terms(model, variant, hardware, bandwidth, tflops, vendor=_vendor(device))
        fixed_s = max(fixed_s, n_sequences * prompt.matmul_s - weights_s - attention_s)
    if device_share < 1.0:
        host_gbps = device.host_bandwidth_gbps.value if device.host_bandwidth_gbps else ASSUMED_BANDWIDTH_GBPS
        here = (weights_s, fixed_s, attention_s)
        host = parts_on(("cpu",), host_gbps, "")
        weights_s, fixed_s, attention_s = (
            a * device_share + b * (1 - device_share) for a, b in zip(here, host, strict=True)
        )
        basis, spread = f"{basis}; host {host_gbps:.0f} GB/s", max(spread, 0.25)
    return _Step(weights_s, fixed_s, attention_s, spread, basis)


def _same(m: Measured, model: Model, variant: Variant) -> bool:
    return m.model.id == model.id and m.variant.quant == variant.quant


def _as_measured(
    device: Device, model: Model, variant: Variant, backend: str, step: _Step, here: Sequence[Measured]
) -> tuple[float, float, str]:
    """(seconds, spread, whose figures) of `step` as this machine's own runs say.

    Every run tells what weights, layers and attention cost here (`learned`). What a variant's own figures still leave
    unexplained is its own: it moves nobody else.
    """
    seen = []
    for m in here:
        same = _same(m, model, variant)
        for depth, rate in m.decoded:
            parts = _step(device, m.model, m.variant, backend, depth, m.kv_type, 1, 1.0).parts
            seen.append((same, learned.Observation(parts, 1 / rate, _OWN_NOISE if same else _RUN_NOISE)))
    prior = learned.CPU if families.engine_of(device, backend) == "cpu" else learned.ACCELERATOR
    learnt = learned.learn([o for _, o in seen], prior)
    seconds, unsure = learnt.seconds(step.parts), learnt.uncertainty(step.parts)
    own = [math.log(o.seconds / learnt.seconds(o.parts)) for same, o in seen if same]
    if own:
        return seconds * math.exp(sum(own) / len(own)), math.hypot(0.05, unsure), "this model"
    return seconds, math.hypot(_MODEL_SPREAD, unsure), ", ".join(sorted({m.model.id for m in here})[:3])


# --- prefill --------------------------------------------------------------------------------------------------------


def attention_flops(layer: Layer, n_heads: int, depth: float) -> float:
    """FLOPs one token's attention over `depth` earlier tokens costs in this layer (QK and PV, 2 per multiply-add)."""
    if layer.kind == "mla":
        return 2 * n_heads * (2 * layer.mla_rank + layer.mla_rope_dim) * depth
    if layer.kind not in ("full", "sliding"):
        return 0.0
    seen = min(depth, layer.window) if layer.kind == "sliding" and layer.window else depth
    return 2 * (layer.n_heads or n_heads) * (layer.head_dim_k + layer.head_dim_v) * seen


@dataclass(frozen=True, slots=True)
class PrefillTerms:
    """Seconds one prompt token costs, by cause."""

    matmul_s: float
    attention_s: float
    weights_s: float
    layers_s: float
    flops: float
    attention_flops: float
    compute_flops_s: float

    @property
    def total_s(self) -> float:
        """Seconds per token."""
        return self.matmul_s + self.attention_s + self.weights_s + self.layers_s


def prefill_terms(
    model: Model,
    variant: Variant,
    hardware: Sequence[str],
    bandwidth_gbps: float,
    compute_tflops: float,
    *,
    vendor: str = "",
    prompt_tokens: int = 2048,
    depth: int = 0,
    n_ubatch: int = 512,
) -> PrefillTerms:
    """The parts of reading `prompt_tokens` after `depth` cached ones, per token. `compute_tflops`: nominal FP16."""
    mlx = variant.format == "mlx"
    keys = (*hardware, *format_keys(model, variant.quant, engine=hardware[0], vendor=vendor, mlx=mlx))
    c = efficiency.coefficients("prefill", keys)
    parts = streamed(model, variant)
    batch = max(1, min(prompt_tokens, 2048 if mlx else n_ubatch))
    # Logits are computed for the last token only, so the output matrix does not count.
    weights = max(1, parts.dense_params + parts.routed_params - model.vocab_size * model.hidden_size)
    mean_depth = depth + prompt_tokens / 2
    known = facts(model)
    attention = sum(count * attention_flops(layer, model.n_heads, mean_depth) for layer, count in known.groups)
    compute = compute_tflops * 1e12
    moe = c["moe"] if model.experts is not None else 1.0
    return PrefillTerms(
        matmul_s=2 * weights * c["quant"] * c["graph"] * moe / (compute * c["matmul"]),
        attention_s=attention / (compute * c["attention"]),
        weights_s=parts.step_bytes(model, batch) / (bandwidth_gbps * 1e9 * min(0.98, c["eta"])) / batch,
        layers_s=(
            known.n_layers * c["layer_s"]
            + known.n_expert_layers * c["expert_layer_s"]
            + known.n_recurrent_layers * c["recurrent_layer_s"]
        )
        / batch,
        flops=2.0 * weights,
        attention_flops=attention,
        compute_flops_s=compute,
    )


def prefill(
    device: Device,
    model: Model,
    variant: Variant,
    *,
    backend: str = "llamacpp",
    prompt_tokens: int = 2048,
    depth: int = 0,
    n_ubatch: int = 512,
    device_share: float = 1.0,
    measured: Sequence[Measured] = (),
) -> Range:
    """Predicted prompt speed, tokens/s, over `prompt_tokens` that follow `depth` cached tokens."""
    hardware = families.device_keys(device, backend)
    bandwidth, _ = bandwidth_of(device)
    tflops, compute_basis = families.nominal_tflops(device)

    def seconds_of(m: Model, v: Variant, *, tokens: int, at: int) -> float:
        terms = prefill_terms(
            m, v, hardware, bandwidth, tflops, vendor=_vendor(device), prompt_tokens=tokens, depth=at, n_ubatch=n_ubatch
        )
        return terms.total_s

    seconds = seconds_of(model, variant, tokens=prompt_tokens, at=depth)
    basis, spread = _basis(efficiency.load()["prefill"], hardware, model)
    if compute_basis == "assumed":
        basis, spread = f"{basis}; compute assumed", max(spread, 0.5)
    if device_share < 1.0:
        host = prefill_terms(
            model,
            variant,
            ("cpu",),
            ASSUMED_BANDWIDTH_GBPS,
            1.0,
            prompt_tokens=prompt_tokens,
            depth=depth,
            n_ubatch=n_ubatch,
        )
        # Weights left in host memory are copied over PCIe once per micro-batch when that is faster than the CPU.
        copied = streamed(model, variant).step_bytes(model, n_ubatch) / _PCIE_BYTES_S / n_ubatch
        seconds = seconds + (1 - device_share) * min(host.total_s, copied)
        spread = max(spread, 0.4)
    here = [m for m in measured if m.backend == backend and m.prefill_tok_s > 0 and m.prompt_tokens > 0]
    exact = [m for m in here if _same(m, model, variant)]
    used = exact or here
    if used:
        logs = [
            math.log(1 / m.prefill_tok_s / seconds_of(m.model, m.variant, tokens=m.prompt_tokens, at=0)) for m in used
        ]
        seconds *= math.exp(sum(logs) / len(logs))
        spread = 0.08 if exact else 0.2
        basis = "measured here: " + ("this model" if exact else ", ".join(sorted({m.model.id for m in used})[:3]))
    return _range(1 / seconds, spread, basis)


_PCIE_BYTES_S = 20e9  # PCIe 4.0 ×16 in practice


def ttft(prefill_tok_s: Range, decode_tok_s: Range, prompt_tokens: int, *, cached_tokens: int = 0) -> Range:
    """Seconds until the first token of an answer to `prompt_tokens`, of which `cached_tokens` are already in the cache."""
    new = max(1, prompt_tokens - cached_tokens)

    def at(prefill_rate: float, decode_rate: float) -> float:
        return new / prefill_rate + 1 / decode_rate

    return Range(
        at(prefill_tok_s.value, decode_tok_s.value),
        at(prefill_tok_s.high, decode_tok_s.high),
        at(prefill_tok_s.low, decode_tok_s.low),
        prefill_tok_s.basis,
    )


def load_time(variant: Variant, disk_bytes_s: float = 0.0) -> Range:
    """Seconds to read the files from disk once (a second start finds them in the page cache)."""
    rate = disk_bytes_s or ASSUMED_DISK_BYTES_S
    value = variant.file_bytes / rate
    basis = "measured disk" if disk_bytes_s else f"assumed disk {ASSUMED_DISK_BYTES_S / 1e9:.1f} GB/s"
    return Range(value, value * 0.8, value * (1.2 if disk_bytes_s else 3.0), basis)


def speculation_gain(acceptance: float, length: int, draft_step_ratio: float, verify_ratio: float = 1.0) -> float:
    """Speed-up of drafting `length` tokens: (1 − a^(g+1)) / (1 − a) tokens for g draft steps and one verification.

    `draft_step_ratio`: draft step ÷ target step; `verify_ratio`: step over g+1 tokens ÷ step over one.
    (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192, eq. 1 and theorem 3.8.)
    """
    a = min(max(acceptance, 0.0), 0.999)
    return (1 - a ** (length + 1)) / (1 - a) / (length * draft_step_ratio + verify_ratio)


# Share of a same-family small model's tokens the large one accepts on chat and code; real ones run from 0.5 (free
# text) to 0.9 (edits of given text). The engine measures its own and stops drafting where it does not pay.
ASSUMED_ACCEPTANCE = 0.7
_DRAFT_LENGTH = 4


def draft_gain(
    device: Device,
    target: tuple[Model, Variant],
    draft: tuple[Model, Variant],
    *,
    backend: str = "llamacpp",
    acceptance: float = ASSUMED_ACCEPTANCE,
    length: int = _DRAFT_LENGTH,
) -> float:
    """Predicted speed-up of letting `draft` propose `length` tokens a step (below 1 = slower).

    Verifying reads the target's dense weights once, but more of its experts, and computes length + 1 tokens.
    """
    one = _step(device, *target, backend, 0, "f16", 1, 1.0).total_s
    small = _step(device, *draft, backend, 0, "f16", 1, 1.0).total_s
    verify = _step(device, *target, backend, 0, "f16", length + 1, 1.0).total_s
    return speculation_gain(acceptance, length, small / one, verify / one)
