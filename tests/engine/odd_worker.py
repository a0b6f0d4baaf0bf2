"""A worker with the scripted backend that misbehaves in its third step, as the given option
selects: it hangs, computes for 4 s, or stops every thread of the process. With "untidy" its
housekeeping fails instead. test_watchdog.py runs it as a program."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.worker.child_pipe import ChildPipe, Message
from localllm.engine.worker.worker import Worker
from localllm_backends.contract import BackendFailure, Chunk
from support.scripted_backend import ScriptedBackend


class Odd(ScriptedBackend):
    def __init__(self, what: str) -> None:
        super().__init__(n_ctx=1024)
        self.what = what

    def step(self, chunks: Sequence[Chunk]) -> Any:
        if len(self.steps) == 3:
            self._be_odd()
        return super().step(chunks)

    def _be_odd(self) -> None:
        match self.what:
            case "hang":
                # like native code, which releases Python's global interpreter lock
                ctypes.CDLL(None).pause()
            case "lock":
                ctypes.PyDLL(None).pause()
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "work":
                end = time.monotonic() + 4.0
                while time.monotonic() < end:
                    sum(range(10_000))


class OddWorker(Worker):
    def _load(self, options: Message) -> Engine:
        backend = Odd(options["what"])
        engine = Engine(backend, EngineSettings(headroom_bytes=0))
        if options["what"] == "untidy":

            def idle() -> bool:
                raise BackendFailure("no device")

            engine.idle = idle  # type: ignore[method-assign]
        return engine


if __name__ == "__main__":
    OddWorker(ChildPipe.of_this_process()).run()
