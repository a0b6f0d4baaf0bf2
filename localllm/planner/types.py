"""Workload, RunSettings and Plan: the planner's nouns. Frozen, serialisable; the only thing the planner hands on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from localllm_catalog.types import Model, Purpose, Variant

Fits = Literal["yes", "tight", "split", "no"]


@dataclass(frozen=True, slots=True)
class Workload:
    """What the person wants to do. `context` 0 = the purpose's default; tokens throughout; speeds in tokens/s."""

    purpose: Purpose = "chat"
    context: int = 0
    prompt_tokens: int = 2048
    parallel: int = 1
    min_decode_tok_s: float = 0.0


# Sequences held at once, and tokens of one step, unless a plan says otherwise.
DEFAULT_SLOTS = 8
DEFAULT_BATCH = 512


def backend_for(variant: Variant) -> str:
    """The engine a variant's files are made for."""
    return "mlx" if variant.format == "mlx" else "llamacpp"


@dataclass(frozen=True, slots=True)
class Drafter:
    """What proposes tokens: `name` is "auto", "off", "ngram", "mtp" (the model's own heads), or that of a second model.

    `second`: that model and its files, which are loaded beside the first.
    """

    name: str = "auto"
    second: tuple[Model, Variant] | None = None

    @property
    def is_mtp(self) -> bool:
        """True where the model's own heads (MTP) draft."""
        return self.name == "mtp"


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a Variant is run: what its memory and its speed follow from, and what a LoadSpec is made from.

    `n_ctx`: KV cells shared by all sequences. `slots`: sequences held at once (llama.cpp's n_seq_max). `n_batch`:
    tokens of one step, the micro-batch. `n_outputs`: rows of logits a step may ask for. `n_gpu_layers` -1 = all.
    `n_rewind`: snapshots a recurrent model keeps, so that as many tokens can be taken back. 0 of `n_ctx`, `n_batch` or
    `n_outputs` is the backend's own default, which only a file that can't be planned is given.
    """

    n_ctx: int = 0
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    slots: int = DEFAULT_SLOTS
    n_batch: int = DEFAULT_BATCH
    n_outputs: int = 64
    n_gpu_layers: int = -1
    n_rewind: int = 0
    flash_attention: bool = True
    drafter: Drafter = Drafter()

    @property
    def kv_type(self) -> str:
        """The KV cache's type: plans use one for keys and values."""
        return self.kv_type_k

    def with_kv_type(self, kv_type: str) -> RunSettings:
        """These settings with `kv_type` for keys and values."""
        return replace(self, kv_type_k=kv_type, kv_type_v=kv_type)

    def device_share(self, model: Model) -> float:
        """Share of `model`'s layers that the accelerator runs (llama.cpp counts the output as one more layer)."""
        return 1.0 if self.n_gpu_layers < 0 else min(1.0, self.n_gpu_layers / (max(1, len(model.layers)) + 1))


# Everything as it is unless somebody says otherwise.
USUAL = RunSettings()


@dataclass(frozen=True, slots=True)
class Range:
    """A predicted number with its plausible range and basis (e.g. "table: apple-max × llama.cpp × dense, n=41")."""

    value: float
    low: float
    high: float
    basis: str


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes a Plan needs, by purpose, and the limit it was held against (bytes)."""

    weights_bytes: int
    kv_bytes: int
    recurrent_bytes: int
    compute_bytes: int
    overhead_bytes: int
    draft_bytes: int
    limit_bytes: int
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes needed in the accelerator's pool (host_bytes are apart)."""
        return (
            self.weights_bytes
            + self.kv_bytes
            + self.recurrent_bytes
            + self.compute_bytes
            + self.overhead_bytes
            + self.draft_bytes
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to run one Variant on one Device, with everything `serve` needs to run exactly that: `settings`.

    `score` is the rank's sum (quality points); `kv_bytes_per_1k` what 1,024 more tokens of context cost and `max_ctx`
    the longest context that still fits (tokens); `draft_gain` the predicted speed-up of the drafter's second model.
    """

    model: Model
    variant: Variant
    settings: RunSettings
    fits: Fits
    memory: MemoryNeed
    decode_tok_s: Range
    decode_tok_s_full: Range
    prefill_tok_s: Range
    ttft_s: Range
    load_s: Range
    ttft_cached_s: Range | None = None
    why: str = ""
    reasons: tuple[str, ...] = ()
    quality: float = 0.0
    quality_basis: str = ""
    score: float = 0.0
    kv_bytes_per_1k: int = 0
    max_ctx: int = 0
    draft_gain: float = 1.0

    @property
    def backend(self) -> str:
        """The engine that runs it."""
        return backend_for(self.variant)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A Model (its least demanding acceptable Variant) that is not offered, and the one reason why."""

    model: Model
    variant: Variant
    reason: str
    kind: Literal["memory", "speed", "context", "purpose", "ranking"] = "memory"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What `recommend` answers: at most eight Plans, best first, and what was not offered with the reasons."""

    plans: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    workload: Workload
