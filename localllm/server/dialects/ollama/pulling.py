"""Runs POST /api/pull: reports a download as Ollama's progress lines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from localllm.errors import UnsupportedError
from localllm.server.models.served import ModelStore, StoreProgress

# At most one progress line in so many seconds.
_INTERVAL_S = 0.2
_SHA256_DIGITS = 64
_NAMED_DIGITS = 12
# By the state of a download, where nothing is counted.
_STATUS = {
    "listing": "pulling manifest",
    "verifying": "verifying sha256 digest",
    "done": "writing manifest",
    "waiting": "waiting for the hub",
}

Line = dict[str, Any]


class _DisconnectedError(Exception):
    """The client disconnected."""


class ModelPuller:
    """Downloads one model at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pull")

    async def pull(self, store: ModelStore, ref: str, report: Callable[[Line], None]) -> None:
        """Download `ref`, reporting lines to `report`. If cancelled it stops, and the next call resumes. Raises what the store
        raises."""
        loop, left = asyncio.get_running_loop(), threading.Event()
        lines = _ProgressLines()

        def on_progress(progress: StoreProgress) -> None:
            if left.is_set():
                raise _DisconnectedError
            line = lines.line(progress)
            if line is not None:
                loop.call_soon_threadsafe(report, line)

        try:
            await loop.run_in_executor(self._thread, store.pull, ref, on_progress)
        finally:
            left.set()
        report({"status": "success"})


class _ProgressLines:
    """Turns a download's progress into Ollama's lines, leaving out repetitions."""

    def __init__(self) -> None:
        self._digest, self._status, self._next_s = "", "", 0.0

    def line(self, progress: StoreProgress) -> Line | None:
        """The line for this moment; None if it says nothing new."""
        if not self._digest and len(progress.digest) == _SHA256_DIGITS:
            # Clients show one bar per digest: keep the first for the whole model.
            self._digest = progress.digest
        line = self._words(progress)
        now = time.monotonic()
        if line["status"] == self._status and now < self._next_s and progress.done_bytes < progress.total_bytes:
            return None
        self._status, self._next_s = line["status"], now + _INTERVAL_S
        return line

    def _words(self, progress: StoreProgress) -> Line:
        status = _STATUS.get(progress.state)
        if status is not None:
            return {"status": status}
        if not self._digest:
            return {"status": "pulling"}
        return {
            "status": f"pulling {self._digest[:_NAMED_DIGITS]}", "digest": f"sha256:{self._digest}",
            "total": progress.total_bytes, "completed": progress.done_bytes,
        }  # fmt: skip


def allowed(store: ModelStore | None) -> ModelStore:
    """The store, if clients may use it; else raises UnsupportedError."""
    if store is None:
        raise UnsupportedError(
            "models are not fetched or removed over HTTP here: start the server with --allow-pull (or set allow_pull), or "
            "do it on the command line: `localllm pull`, `localllm models rm`"
        )
    return store
