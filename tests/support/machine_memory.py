"""A machine whose free memory the test sets, with an engine on it."""

from __future__ import annotations

from typing import Any

from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm_backends.contract import Backend

MB = 10**6
HEADROOM = 100 * MB


class Machine:
    """Scripted time and memory: every reading of the clock advances it by a tenth of a second."""

    def __init__(self, free_mb: float | None = 1000) -> None:
        self.free_mb = free_mb
        self.now = 0.0

    def clock(self) -> float:
        self.now += 0.1
        return self.now

    def available(self) -> int | None:
        return None if self.free_mb is None else int(self.free_mb * MB)

    def engine(self, backend: Backend, **values: Any) -> Engine:
        return Engine(
            backend,
            EngineSettings(headroom_bytes=HEADROOM, **values),
            clock=self.clock,
            available=self.available,
        )
