"""Rounds in turn, and one request through an engine in this process: for every bench that compares
a few ways of one thing."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from localllm.bench.ratio import RoundComparison, rotated
from localllm.engine.core import Engine
from localllm.engine.messages import Request


def interleave(rounds: int, *runs: Callable[[], None]) -> None:
    """Every run once a round, the first of a round taking turns."""
    for i in range(rounds):
        for run in rotated(runs, i):
            run()
        print(f"  round {i + 1}/{rounds}", file=sys.stderr)


def report(tables: Sequence[RoundComparison], first: str, out: Path | None = None) -> None:
    """Print medians, spread and the ratio of `first` to the others, and write all of it to
    `out`."""
    for table in tables:
        print("", *table.lines(first), sep="\n", flush=True)
    if out is not None:
        out.write_text(
            json.dumps([table.to_json(first) for table in tables], indent=1), encoding="utf-8"
        )


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
