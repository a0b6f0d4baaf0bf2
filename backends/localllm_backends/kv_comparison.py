"""What a comparison of KV types finds, and how it goes on: values of the contract (`ComparingBackend`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KvFidelity:
    """How far logits with a KV cache of types `k` and `v` are from those with f16, over `n_tokens` of one text: KL
    divergence KL(f16 || type) in nats, its mean and the worst, and `flips`, the share of positions with another best token.
    """

    k: str
    v: str
    n_tokens: int
    mean_kl: float
    worst_kl: float
    flips: float


class KvComparison(Protocol):
    """A comparison of KV types under way: `run` until it returns the result, then `close`."""

    def run(self) -> tuple[KvFidelity, ...] | None:
        """Compute one piece; None while there is more of it, then one result for each pair. BackendFailure ends it."""
        ...

    def close(self) -> None:
        """Free what it took."""
        ...
