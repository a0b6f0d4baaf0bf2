"""How fast steps of real use are, free of charge: what a start is compared with earlier ones by (cli/serve/decode_speed.py).

Only plain steps count: one request, one token, no draft, no grammar. They are taken in spans of a quarter second, and a
span counts while other programs took little of the processors that this one may use: what a neighbour costs says nothing
about a build or a driver.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from localllm.engine.host.contention import MOST_SHARE, CpuContention, Mark

_SPAN_S = 0.25
# Fewer steps than this in a span: a model so slow that the span is longer.
_FEWEST_STEPS = 8
# A step that comes later than this behind another belongs to another answer.
_PAUSE_S = 0.1
# Weights that are mapped from a file are read by the first steps.
_WARMING_SPANS = 1
# So many spans are a start's figures; then nothing is looked at any more.
ENOUGH_SPANS = 8


@dataclass(frozen=True, slots=True)
class Span:
    """Plain steps behind each other: the median's seconds at the mean depth in tokens."""

    depth: int
    step_s: float


@dataclass
class DecodeSpeedTracker:
    """Collects spans until there are enough."""

    others: CpuContention
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
        """True once there are as many spans as are kept."""
        return len(self.spans) >= ENOUGH_SPANS

    def observe(self, depth: int, seconds: float) -> None:
        """A plain step of `seconds`, which has just ended, behind `depth` tokens."""
        now = self.clock()
        if self.enough:
            return
        if now - seconds - self._last_s > _PAUSE_S or not self._steps:
            self._begin(depth, now - seconds)
        self._steps.append(seconds)
        self._last_s = now
        if now - self._begun_s >= _SPAN_S and len(self._steps) >= _FEWEST_STEPS:
            self._end(depth, now)

    def _begin(self, depth: int, now: float) -> None:
        self._steps, self._depth, self._begun_s, self._began = [], depth, now, self.others.mark()

    def _end(self, depth: int, now: float) -> None:
        others = self.others.share(self._began) if self._began is not None else 0.0
        steps, self._steps = self._steps, []
        if self._warming:
            self._warming -= 1
        elif others > MOST_SHARE:
            self.disturbed += 1
        else:
            self.spans.append(Span((self._depth + depth) // 2, statistics.median(steps)))

    def snapshot(self) -> dict[str, object]:
        """The spans as plain values: [depth, seconds of a step]; and how many were left out."""
        return {"spans": [[s.depth, s.step_s] for s in self.spans], "disturbed": self.disturbed}
