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
    """One way to run one Variant on one Device, with everything `serve` needs to run exactly that."""

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
