"""Times: of one request through an engine in this process (to its first token, and from there to its end), and of many."""

from __future__ import annotations

import time
from collections.abc import Sequence

from localllm.engine.core import Engine
from localllm.engine.messages import Request


def timed(engine: Engine, request: Request, prompt: list[int]) -> tuple[float, float]:
    """(seconds to the first text, seconds from it to the last) of `request`, alone."""
    started = time.perf_counter()
    engine.submit(request, prompt)
    first: float | None = None
    while engine.has_work:
        if not engine.can_step:
            engine.idle()
        elif any(e.kind == "text" for e in engine.step()) and first is None:
            first = time.perf_counter()
    assert first is not None
    return first - started, time.perf_counter() - first


def settle(engine: Engine) -> None:
    """Let the engine's housekeeping between requests end."""
    while engine.idle():
        pass


def percentile(times: Sequence[float], share: float) -> float:
    """The time that `share` of them stay below; 0 of none."""
    return sorted(times)[min(len(times) - 1, int(len(times) * share))] if times else 0.0
