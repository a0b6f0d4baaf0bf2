"""Plan and Workload: the planner's nouns. Frozen, serialisable; the only thing the planner hands on."""

from __future__ import annotations

from dataclasses import dataclass
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
    mmproj_bytes: int = 0
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
            + self.mmproj_bytes
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to run one Variant on one Device, with everything `serve` needs to run exactly that.

    `n_ctx` cells are shared by all `slots` sequences (llama.cpp's n_seq_max). `kv_type_v` "" = the same as `kv_type`.
    `n_gpu_layers` -1 = all. `score` is the rank's sum (quality points); `kv_bytes_per_1k` what 1,024 more tokens cost
    and `max_ctx` the longest context that still fits (tokens); `draft_gain` the predicted speed-up of `draft`.
    """

    model: Model
    variant: Variant
    backend: str
    n_ctx: int
    kv_type: str
    slots: int
    draft: str
    n_gpu_layers: int
    fits: Fits
    memory: MemoryNeed
    decode_tok_s: Range
    decode_tok_s_full: Range
    prefill_tok_s: Range
    ttft_s: Range
    why: str
    reasons: tuple[str, ...] = ()
    kv_type_v: str = ""
    n_ubatch: int = 512
    n_outputs: int = 64
    flash_attention: bool = True
    prefix_cache_bytes: int = 0
    mmproj: bool = False
    quality: float | None = None
    quality_basis: str = ""
    score: float = 0.0
    load_s: Range | None = None
    ttft_cached_s: Range | None = None
    kv_bytes_per_1k: int = 0
    max_ctx: int = 0
    draft_gain: float = 1.0


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
