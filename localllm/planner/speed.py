"""How fast a model answers: decode, prefill, time to first token, loading; each with its range and its basis.

What the two laws say (laws.py), moved by what was measured on this machine (learned.py). Tokens/s and seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from localllm.device.types import Device
from localllm.planner import efficiency, families, laws, learned
from localllm.planner.streams import streamed
from localllm.planner.types import USUAL, Range, RunSettings, backend_for
from localllm_catalog.types import Model, Variant

ASSUMED_DISK_BYTES_S = 1.5e9
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


def decode_bound(device: Device, model: Model, variant: Variant, *, depth: int = 0, kv_type: str = "f16") -> float:
    """tokens/s no engine can exceed: bandwidth ÷ (active weight bytes + KV bytes read at `depth`)."""
    read = streamed(model, variant).total_bytes + laws.kv_read_bytes(model, depth, kv_type)
    return laws.bandwidth_of(device)[0] * 1e9 / read


def _basis(table: efficiency.Table, hardware: laws.Hardware, model: Model) -> tuple[str, float]:
    key, n = table.nearest(hardware.keys)
    kind = "MoE" if model.experts is not None else "dense"
    if n == 0:
        return f"formula: no {hardware.engine} measurement of this kind of machine, {kind}", table.spread_of("none")
    return f"table: {key.removeprefix('part:')} × {kind}, n={n}", table.spread_of(key)


def _range(value: float, spread: float, basis: str) -> Range:
    return Range(value, value * math.exp(-_Z * spread), value * math.exp(_Z * spread), basis)


def decode(
    device: Device,
    model: Model,
    variant: Variant,
    settings: RunSettings = USUAL,
    *,
    depth: int = 0,
    n_sequences: int = 1,
    measured: Sequence[Measured] = (),
) -> Range:
    """Predicted decode speed of one of `n_sequences` at `depth` tokens of context, tokens/s.

    Layers that `settings` leave in host memory run from there, and the times add up. `measured`: this machine's own
    figures, which replace the table (the same variant: its figure, moved to this depth; another: its ratio).
    """
    step = _step(device, model, variant, settings, depth=depth, n_sequences=n_sequences)
    backend = backend_for(variant)
    here = [m for m in measured if m.backend == backend and m.decoded]
    if not here:
        return _range(1 / step.total_s, step.spread, step.basis)
    seconds, spread, names = _as_measured(device, model, variant, step, here)
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
    device: Device, model: Model, variant: Variant, settings: RunSettings, *, depth: int = 0, n_sequences: int = 1
) -> _Step:
    hardware = laws.hardware_of(device, backend_for(variant))

    def parts_on(machine: laws.Hardware) -> learned.Parts:
        terms = laws.decode_terms(
            model, variant, machine, depth=depth, kv_type=settings.kv_type, n_sequences=n_sequences
        )
        return terms.memory_s - terms.kv_s, terms.total_s - terms.memory_s, terms.kv_s

    weights_s, fixed_s, attention_s = parts_on(hardware)
    basis, spread = _basis(efficiency.load()["decode"], hardware, model)
    if laws.bandwidth_of(device)[1] == "assumed":
        basis, spread = f"assumed {hardware.bandwidth_gbps:.0f} GB/s", 0.5
    if n_sequences > 1:
        prompt = laws.prefill_terms(model, variant, hardware)
        fixed_s = max(fixed_s, n_sequences * prompt.matmul_s - weights_s - attention_s)
    share = settings.device_share(model)
    if share < 1.0:
        host = _host(device)
        here, there = (weights_s, fixed_s, attention_s), parts_on(host)
        weights_s, fixed_s, attention_s = (a * share + b * (1 - share) for a, b in zip(here, there, strict=True))
        basis, spread = f"{basis}; host {host.bandwidth_gbps:.0f} GB/s", max(spread, 0.25)
    return _Step(weights_s, fixed_s, attention_s, spread, basis)


def _host(device: Device) -> laws.Hardware:
    """The processor beside a discrete card, which computes the layers that stay in its memory."""
    known = device.host_bandwidth_gbps
    return laws.Hardware(
        ("cpu",), "", known.value if known else laws.ASSUMED_BANDWIDTH_GBPS, _HOST_TFLOPS, device.n_cpu_cores
    )


def _as_run(m: Measured) -> RunSettings:
    return USUAL.with_kv_type(m.kv_type)


def _same(m: Measured, model: Model, variant: Variant) -> bool:
    return m.model.id == model.id and m.variant.quant == variant.quant


def _as_measured(
    device: Device, model: Model, variant: Variant, step: _Step, here: Sequence[Measured]
) -> tuple[float, float, str]:
    """(seconds, spread, whose figures) of `step` as this machine's own runs say.

    Every run tells what weights, layers and attention cost here (`learned`). What a variant's own figures still leave
    unexplained is its own: it moves nobody else.
    """
    seen = []
    for m in here:
        same = _same(m, model, variant)
        for depth, rate in m.decoded:
            parts = _step(device, m.model, m.variant, _as_run(m), depth=depth).parts
            seen.append((same, learned.Observation(parts, 1 / rate, _OWN_NOISE if same else _RUN_NOISE)))
    prior = learned.CPU if families.engine_of(device, backend_for(variant)) == "cpu" else learned.ACCELERATOR
    learnt = learned.learn([o for _, o in seen], prior)
    seconds, unsure = learnt.seconds(step.parts), learnt.uncertainty(step.parts)
    own = [math.log(o.seconds / learnt.seconds(o.parts)) for same, o in seen if same]
    if own:
        return seconds * math.exp(sum(own) / len(own)), math.hypot(0.05, unsure), "this model"
    return seconds, math.hypot(_MODEL_SPREAD, unsure), ", ".join(sorted({m.model.id for m in here})[:3])


# --- prefill --------------------------------------------------------------------------------------------------------


def prefill(
    device: Device,
    model: Model,
    variant: Variant,
    settings: RunSettings = USUAL,
    *,
    prompt_tokens: int = 2048,
    depth: int = 0,
    measured: Sequence[Measured] = (),
) -> Range:
    """Predicted prompt speed, tokens/s, over `prompt_tokens` that follow `depth` cached tokens."""
    hardware = laws.hardware_of(device, backend_for(variant))

    def seconds_of(m: Model, v: Variant, machine: laws.Hardware, *, tokens: int, at: int) -> float:
        return laws.prefill_terms(
            m, v, machine, prompt_tokens=tokens, depth=at, n_batch=settings.n_batch
        ).total_s  # fmt: skip

    seconds = seconds_of(model, variant, hardware, tokens=prompt_tokens, at=depth)
    basis, spread = _basis(efficiency.load()["prefill"], hardware, model)
    if families.nominal_tflops(device)[1] == "assumed":
        basis, spread = f"{basis}; compute assumed", max(spread, 0.5)
    share = settings.device_share(model)
    if share < 1.0:
        slow = laws.Hardware(("cpu",), "", laws.ASSUMED_BANDWIDTH_GBPS, _HOST_TFLOPS)
        there = seconds_of(model, variant, slow, tokens=prompt_tokens, at=depth)
        # Weights left in host memory are copied over PCIe once per micro-batch when that is faster than the CPU.
        copied = streamed(model, variant).step_bytes(model, settings.n_batch) / _PCIE_BYTES_S / settings.n_batch
        seconds = seconds + (1 - share) * min(there, copied)
        spread = max(spread, 0.4)
    backend = backend_for(variant)
    here = [m for m in measured if m.backend == backend and m.prefill_tok_s > 0 and m.prompt_tokens > 0]
    exact = [m for m in here if _same(m, model, variant)]
    used = exact or here
    if used:
        logs = [
            math.log(1 / m.prefill_tok_s / seconds_of(m.model, m.variant, hardware, tokens=m.prompt_tokens, at=0))
            for m in used
        ]
        seconds *= math.exp(sum(logs) / len(logs))
        spread = 0.08 if exact else 0.2
        basis = "measured here: " + ("this model" if exact else ", ".join(sorted({m.model.id for m in used})[:3]))
    return _range(1 / seconds, spread, basis)


_PCIE_BYTES_S = 20e9  # PCIe 4.0 ×16 in practice
_HOST_TFLOPS = 1.0  # of the processor beside a card, order of magnitude


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


def load_time(variant: Variant) -> Range:
    """Seconds to read the files from disk once (a second start finds them in the page cache)."""
    value = variant.file_bytes / ASSUMED_DISK_BYTES_S
    return Range(value, value * 0.8, value * 3.0, f"assumed disk {ASSUMED_DISK_BYTES_S / 1e9:.1f} GB/s")


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


def draft_gain(device: Device, target: tuple[Model, Variant], draft: tuple[Model, Variant]) -> float:
    """Predicted speed-up of letting `draft` propose four tokens a step (below 1 = slower).

    Verifying reads the target's dense weights once, but more of its experts, and computes one token more than drafted.
    """
    one = _step(device, *target, USUAL).total_s
    small = _step(device, *draft, USUAL).total_s
    verify = _step(device, *target, USUAL, n_sequences=_DRAFT_LENGTH + 1).total_s
    return speculation_gain(ASSUMED_ACCEPTANCE, _DRAFT_LENGTH, small / one, verify / one)
