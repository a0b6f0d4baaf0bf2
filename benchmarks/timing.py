"""One request through an engine in this process, timed: to its first token, and from there to its end."""

from __future__ import annotations

import time

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
