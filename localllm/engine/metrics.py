"""Counters of one engine, and its decode speed, which is compared across starts. Read by /metrics,
bench and the TUI.

Plain numbers without locks, because a single thread writes them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from localllm.engine.contention import MAX_SHARE, CpuContention, Mark
from localllm.engine.step_costs import DecayedRatio

_DECAY = 0.9
# Reasons why tokens that had KV are computed again, in this order. Their KV was evicted. Reading it
# from disk is slower than computing. It was lost or damaged on disk. The context had no room. It is
# too short to be worth copying. This model's state can't be cut there. The request was parked for
# another one.
RECOMPUTED = ("evicted", "unread", "lost", "no_cells", "short", "no_snapshot", "parked")


def _decode_speed() -> DecayedRatio:
    return DecayedRatio(_DECAY)


def _no_recomputed() -> dict[str, int]:
    return dict.fromkeys(RECOMPUTED, 0)


@dataclass
class Metrics:
    """Totals since `started_s`, and the speed of recent steps. `recomputed_tokens` counts tokens
    that had KV before and were computed again, by the reasons in `RECOMPUTED`."""

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
    drafts: int = 0
    busy_s: float = 0.0
    decode_speed: DecayedRatio = field(default_factory=_decode_speed)
    longest_step_s: float = 0.0
    sliced_prefill_tokens: int = 0
    longest_slice_s: float = 0.0
    recomputed_tokens: dict[str, int] = field(default_factory=_no_recomputed)

    def step(self, *, decoded: int, emitted: int, prefilled: int, seconds: float) -> None:
        """Count one step of `seconds`: `decoded` sequences emitted `emitted` tokens, and
        `prefilled` prompt tokens were read."""
        self.steps += 1
        self.busy_s += seconds
        self.prefilled_tokens += prefilled
        self.longest_step_s = max(self.longest_step_s, seconds)
        if decoded:
            self.decode_steps += 1
            self.decode_sequences += decoded
        if decoded and not prefilled:
            self.decode_speed.add(emitted, seconds)

    def sliced_prefill(self, prefilled: int, seconds: float) -> None:
        """Count a time slice of `seconds` between steps, in which `prefilled` prompt tokens were
        read."""
        self.prefilled_tokens += prefilled
        self.sliced_prefill_tokens += prefilled
        self.busy_s += seconds
        self.longest_slice_s = max(self.longest_slice_s, seconds)

    def snapshot(self, now_s: float) -> dict[str, float | int | str]:
        """All counters as plain values, with the mean batch occupancy."""
        occupancy = 0.0
        if self.decode_steps:
            occupancy = self.decode_sequences / self.decode_steps
        requests = {
            "uptime_s": now_s - self.started_s,
            "requests": self.requests,
            "cancelled": self.cancelled,
            "parked": self.parked,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "prefilled_tokens": self.prefilled_tokens,
            "generated_tokens": self.generated_tokens,
        }
        steps = {
            "steps": self.steps,
            "drafts": self.drafts,
            "batch_occupancy": occupancy,
            "busy_s": self.busy_s,
            "decode_tok_s": self.decode_speed.part / (self.decode_speed.total or 1.0),
            "longest_step_s": self.longest_step_s,
            "sliced_prefill_tokens": self.sliced_prefill_tokens,
            "longest_slice_s": self.longest_slice_s,
        }
        recomputed = {
            f"recomputed_{reason}_tokens": n for reason, n in self.recomputed_tokens.items()
        }
        return {**requests, **steps, **recomputed}


_SPAN_S = 0.25
# A span has at least this many steps: on a slow model it takes longer than `_SPAN_S`.
_MIN_STEPS = 8
# A step after a longer pause belongs to another answer.
_PAUSE_S = 0.1
# The first steps read memory-mapped weights from the file, so the first span is not counted.
_WARMING_SPANS = 1
# A start is measured with this many spans; after that the tracker stops.
SPANS_PER_START = 8


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive decode steps without drafts: the median time in seconds, and the mean depth in
    tokens."""

    depth: int
    step_s: float


@dataclass
class DecodeSpeedTracker:
    """Measures the speed of decode steps with one request, one token, no draft and no grammar, to
    compare this start with earlier ones.

    A span takes a quarter of a second. It counts only if other programs use little of the
    processors.
    """

    cpu: CpuContention
    clock: Callable[[], float] = time.perf_counter
    spans: list[Span] = field(default_factory=list)
    disturbed: int = 0
    _steps: list[float] = field(default_factory=list)
    _depth: int = 0
    _begun_s: float = 0.0
    _began: Mark | None = None
    _last_s: float = -math.inf
    _warming: int = _WARMING_SPANS

    @property
    def enough(self) -> bool:
        """True if the tracker has all the spans it keeps."""
        return len(self.spans) >= SPANS_PER_START

    def observe(self, depth: int, seconds: float) -> None:
        """Record a decode step that has just ended: it took `seconds` at a depth of `depth` tokens."""
        now = self.clock()
        if self.enough:
            return
        if now - seconds - self._last_s > _PAUSE_S or not self._steps:
            self._begin(depth, now - seconds)
        self._steps.append(seconds)
        self._last_s = now
        if now - self._begun_s >= _SPAN_S and len(self._steps) >= _MIN_STEPS:
            self._end(depth, now)

    def _begin(self, depth: int, now: float) -> None:
        self._steps = []
        self._depth = depth
        self._begun_s = now
        self._began = self.cpu.mark()

    def _end(self, depth: int, now: float) -> None:
        others = 0.0
        if self._began is not None:
            others = self.cpu.share(self._began)
        steps = self._steps
        self._steps = []
        if self._warming:
            self._warming -= 1
        elif others > MAX_SHARE:
            self.disturbed += 1
        else:
            self.spans.append(Span((self._depth + depth) // 2, statistics.median(steps)))

    def snapshot(self) -> dict[str, object]:
        """The spans as plain values ([depth, seconds of a step]), and the number of discarded
        spans."""
        return {"spans": [[s.depth, s.step_s] for s in self.spans], "disturbed": self.disturbed}
