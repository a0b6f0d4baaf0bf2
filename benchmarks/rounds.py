"""Rounds in turn, and one request through an engine in this process, for benchmarks that compare
several variants."""

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
    """Run every function once per round, starting with a different one in each round."""
    for i in range(rounds):
        for run in rotated(runs, i):
            run()
        print(f"  round {i + 1}/{rounds}", file=sys.stderr)


def report(tables: Sequence[RoundComparison], first: str, out: Path | None = None) -> None:
    """Print medians, spread and the ratio of `first` to the others, and write everything to
    `out`."""
    for table in tables:
        print("", *table.lines(first), sep="\n", flush=True)
    if out is not None:
        out.write_text(
            json.dumps([table.to_json(first) for table in tables], indent=1), encoding="utf-8"
        )


def timed(engine: Engine, request: Request, prompt: list[int]) -> tuple[float, float]:
    """Run `request` alone. Return seconds to the first text, and from there to the last."""
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
    """Wait until the engine's work between requests is done."""
    while engine.idle():
        pass
