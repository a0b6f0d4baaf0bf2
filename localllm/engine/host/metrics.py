"""Counters of one engine: what /metrics, bench and the TUI read. Plain numbers, no locks: one thread writes."""

from __future__ import annotations

from dataclasses import dataclass, field

_SMOOTHING = 0.1
# Why tokens that are known are computed again: their KV was evicted; it is on disk, and slower to read than to compute;
# it was lost or damaged there; the context had no room for it; it is too short to be worth copying; this model's memory
# can't be cut there; the request was parked for another's sake.
RECOMPUTED = ("evicted", "unread", "lost", "no_cells", "short", "no_snapshot", "parked")


@dataclass
class Metrics:
    """Totals since `started_s`; speeds are exponential averages over steps of that kind."""

    started_s: float
    requests: int = 0
    cancelled: int = 0
    parked: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    decode_sequences: int = 0
    decode_steps: int = 0
    busy_s: float = 0.0
    decode_tok_s: float = 0.0
    prefill_tok_s: float = 0.0
    longest_step_s: float = 0.0
    sliced_prefill_tokens: int = 0
    longest_slice_s: float = 0.0
    recomputed_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RECOMPUTED, 0))

    def recomputed(self, reason: str, n_tokens: int) -> None:
        """Count tokens that had their KV once and are computed again, by one of the reasons in `RECOMPUTED`."""
        self.recomputed_tokens[reason] += max(0, n_tokens)

    def step(self, *, decoded: int, emitted: int, prefilled: int, seconds: float, first: int) -> None:
        """Count one step of `decoded` sequences, which emitted `emitted` tokens, and of `prefilled` tokens, that took
        `seconds`."""
        self.steps += 1
        self.busy_s += seconds
        self.prefilled_tokens += prefilled
        self.longest_step_s = max(self.longest_step_s, seconds)
        if decoded:
            self.decode_steps += 1
            self.decode_sequences += decoded
        if seconds <= 0:
            return
        if decoded and not prefilled:
            self.decode_tok_s = _blend(self.decode_tok_s, emitted / seconds)
        elif prefilled and not decoded:
            self.prefill_tok_s = _blend(self.prefill_tok_s, prefilled / seconds)

    def sliced_prefill(self, prefilled: int, seconds: float) -> None:
        """Count a slice of `seconds` of a prompt that is read beside the steps, in which `prefilled` tokens were done."""
        self.prefilled_tokens += prefilled
        self.sliced_prefill_tokens += prefilled
        self.busy_s += seconds
        self.longest_slice_s = max(self.longest_slice_s, seconds)

    def snapshot(self, now_s: float) -> dict[str, float | int | str]:
        """Everything as plain values, with the mean batch occupancy."""
        occupancy = self.decode_sequences / self.decode_steps if self.decode_steps else 0.0
        return {
            "uptime_s": now_s - self.started_s,
            "requests": self.requests,
            "cancelled": self.cancelled,
            "parked": self.parked,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "prefilled_tokens": self.prefilled_tokens,
            "generated_tokens": self.generated_tokens,
            "steps": self.steps,
            "batch_occupancy": occupancy,
            "busy_s": self.busy_s,
            "decode_tok_s": self.decode_tok_s,
            "prefill_tok_s": self.prefill_tok_s,
            "longest_step_s": self.longest_step_s,
            "sliced_prefill_tokens": self.sliced_prefill_tokens,
            "longest_slice_s": self.longest_slice_s,
            **{f"recomputed_{reason}_tokens": n for reason, n in self.recomputed_tokens.items()},
        }


def _blend(old: float, new: float) -> float:
    return new if not old else old + _SMOOTHING * (new - old)
