"""A worker process that is started before it is known what it loads: reading the engine's code takes
as long as planning does."""

from __future__ import annotations

from localllm.engine.worker.client import AHEAD, COMMAND
from localllm.engine.worker.pipe import JsonProcess
from localllm.engine.worker.supervisor import worker_environment
from localllm.paths import worker_log


async def start_ahead() -> None:
    """Start one; the next load of a model that writes text takes it."""
    log = worker_log()
    AHEAD[log] = await JsonProcess.spawn(COMMAND, worker_environment(), log)


async def end_ahead() -> None:
    """End what was started ahead and nobody took."""
    while AHEAD:
        _, process = AHEAD.popitem()
        process.kill()
        await process.wait()
