"""What a token costs in bytes and FLOPs, held against what an answer took: arithmetic on the server's own figures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm_tui.control.client import AnswerTimings, AnswerUsage


@dataclass(frozen=True, slots=True)
class Spread:
    """A predicted figure with its range."""

    value: float = 0.0
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True)
class Physics:
    """A served model on its machine, as localllm/planner/serialise.py tells it. `kv_points`: (depth, bytes read)."""

    device: str
    bandwidth_gbps: float
    tflops: float
    dense_bytes: int
    routed_bytes: int
    kv_points: tuple[tuple[int, int], ...]
    flops_per_token: float
    n_batch: int
    decode: Spread
    prefill: Spread
    kv_type: str = ""
    quant: str = ""
    memory: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Physics | None:
        """From a server's words; None where it does not say, or says something else."""
        try:
            weights = said["weights"]
            return cls(
                str(said["device"]),
                float(said["bandwidth_gbps"]),
                float(said["tflops"]),
                int(weights["dense_bytes"]),
                int(weights["routed_bytes"]),
                tuple((int(d), int(b)) for d, b in said["kv_read_bytes"]),
                float(said["flops_per_token"]),
                int(said["n_batch"]),
                _spread(said["decode_tok_s"]),
                _spread(said["prefill_tok_s"]),
                str(said.get("kv_type", "")),
                str(said.get("quant", "")),
                said.get("memory") or {},
            )
        except (KeyError, TypeError, ValueError):
            return None

    def kv_bytes(self, depth: float) -> float:
        """KV bytes that a token reads behind `depth` tokens."""
        points = self.kv_points
        if not points or depth <= 0:
            return 0.0
        for (d0, b0), (d1, b1) in itertools.pairwise(points):
            if depth <= d1:
                return b0 + (b1 - b0) * (depth - d0) / max(1, d1 - d0)
        return float(points[-1][1])

    def token_bytes(self, depth: float) -> float:
        """All bytes that a token reads behind `depth` tokens."""
        return self.dense_bytes + self.routed_bytes + self.kv_bytes(depth)

    def limit_tok_s(self, depth: float) -> float:
        """Tokens per second if the memory's bandwidth were used whole, without drafting."""
        return self.bandwidth_gbps * 1e9 / max(1.0, self.token_bytes(depth))


def _spread(said: Mapping[str, Any]) -> Spread:
    return Spread(float(said["value"]), float(said["low"]), float(said["high"]))


@dataclass(frozen=True, slots=True)
class Seen:
    """An answer as the server measured it, or as it comes (`live`: tokens per second as they arrive, None: measured).

    `coming`: it is on its way. One that was stopped is not, and the server never tells how long its parts took."""

    usage: AnswerUsage = field(default_factory=AnswerUsage)
    timings: AnswerTimings = field(default_factory=AnswerTimings)
    cache_miss: str = ""
    live: float | None = None
    coming: bool = False

    @property
    def depth(self) -> float:
        """Mean context behind the answer's tokens."""
        return self.usage.prompt + self.usage.completion / 2

    @property
    def steps_s(self) -> float | None:
        """Sweeps over the weights per second while it decoded; None where there was none."""
        if self.live is not None:
            return self.live
        return self.timings.steps / self.timings.decode_s if self.timings.decode_s > 0 and self.timings.steps else None

    @property
    def tok_s(self) -> float | None:
        """Tokens per second from the first to the last."""
        if self.live is not None:
            return self.live
        made = self.usage.completion - 1
        return made / self.timings.decode_s if self.timings.decode_s > 0 and made > 0 else None

    @property
    def prefill_tok_s(self) -> float | None:
        """Prompt tokens per second, of those that were computed."""
        return self.timings.prefilled / self.timings.prefill_s if self.timings.prefill_s > 0 else None

    def achieved_gbps(self, physics: Physics) -> float | None:
        """Bytes that its steps read, per second, in GB: of this answer alone, whoever else was in them."""
        rate = self.steps_s
        return None if rate is None else rate * physics.token_bytes(self.depth) / 1e9


def gb(n_bytes: float) -> str:
    """Bytes in GB, or in MB below one, in three figures or so."""
    if n_bytes >= 1e9:
        return f"{n_bytes / 1e9:.2f} GB"
    return f"{n_bytes / 1e6:.0f} MB" if n_bytes >= 1e7 else f"{n_bytes / 1e6:.2f} MB"


def bars(values: Sequence[float], cells: int) -> list[str]:
    """Bars of at most `cells` in the proportion of `values`; what is there at all shows."""
    most = max(values, default=0.0)
    return ["█" * max(1 if v > 0 else 0, round(cells * v / most)) if most > 0 else "" for v in values]
