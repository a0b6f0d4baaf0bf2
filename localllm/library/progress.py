"""How a download is doing: bytes, speed over the last seconds, time left. Pure but for the clock it is given."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

State = Literal["listing", "checking", "downloading", "waiting", "verifying", "done"]
_WINDOW_S = 10.0
_SAMPLE_S = 0.1


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """A moment of a download. `done_bytes` counts what was there before too; `speed_bytes_s` only what travels.

    `eta_s` is None until a speed is known. `digest`: the published hash of the file on its way.
    """

    state: State
    file: str
    done_bytes: int
    total_bytes: int
    speed_bytes_s: float = 0.0
    eta_s: float | None = None
    digest: str = ""


class DownloadMeter:
    """Turns byte counts into DownloadProgress: the speed is that of the last ten seconds."""

    def __init__(
        self,
        total_bytes: int,
        on_progress: Callable[[DownloadProgress], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self._on_progress = on_progress
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()

    def report(self, state: State, file: str, have_bytes: int, digest: str = "") -> None:
        """`have_bytes` of the file that is on its way, besides all finished ones, are there."""
        done = self.done_bytes + have_bytes
        now = self._clock()
        if state != "downloading":
            self._samples.clear()
        if len(self._samples) < 2 or now - self._samples[-2][0] >= _SAMPLE_S:
            self._samples.append((now, done))
        else:
            self._samples[-1] = (now, done)
        while len(self._samples) > 2 and now - self._samples[0][0] > _WINDOW_S:
            self._samples.popleft()
        then, before = self._samples[0]
        elapsed = now - then
        # A restart (wrong content) takes bytes back: no speed is better than a negative one.
        speed = max(0.0, (done - before) / elapsed) if elapsed > 0 else 0.0
        eta = (self.total_bytes - done) / speed if speed > 0 else None
        self._on_progress(DownloadProgress(state, file, done, self.total_bytes, speed, eta, digest))

    def finished(self, size_bytes: int) -> None:
        """A file is complete."""
        self.done_bytes += size_bytes
