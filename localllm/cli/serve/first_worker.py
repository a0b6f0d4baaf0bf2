"""The event loop of `localllm serve`, with a worker that starts before the command is imported.

Importing the command takes as long as importing the engine. So the two processes do both at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from localllm.cli import engine_builds
from localllm.engine.worker.pipe import end_ahead, start_ahead

_runner: list[asyncio.Runner] = []


@contextmanager
def worker_started() -> Iterator[asyncio.Runner]:
    """Start a worker, and yield the event loop that it belongs to.

    A second call inside the first yields the same event loop. At the end, the worker is ended
    unless a model uses it.
    """
    if _runner:
        yield _runner[0]
        return
    engine_builds.activate("serve")
    with asyncio.Runner() as runner:
        runner.run(start_ahead())
        _runner.append(runner)
        try:
            yield runner
        finally:
            _runner.clear()
            runner.run(end_ahead())
