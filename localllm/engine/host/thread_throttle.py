"""How many threads compute short steps where other programs want the processors too.

The threads of a step meet behind every node of its graph, some hundred times. Where more of them than processors are free for
want to run, each meeting lasts until the system lets the last one on: two servers of SmolLM2 that decoded at once on two
processors, with two threads each, reached 0.24 of their speed each; with one thread each 0.62. Beside a program that kept
one processor busy it was 0.33 and 0.6. Prompts meet as often for a hundred times the work: they take every thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from localllm.engine.host.contention import CpuContention, Mark
from localllm_backends.contract import Backend

_LOOK_S = 0.25
# Between steps that are further apart it was idle: what others took then says little of now.
_PAUSE_S = 0.1
# A processor is left to others once they take more of it than this, and taken back when they take less than that.
_TAKEN, _BACK = 0.6, 0.4


@dataclass
class ThreadThrottle:
    """Tells `backends` how many processors the `others` leave."""

    backends: Sequence[Backend]
    others: CpuContention
    threads: int = field(init=False)
    _since: Mark | None = None
    _last_s: float = -math.inf

    def __post_init__(self) -> None:
        self.threads = self.others.cores

    def stepped(self, seconds: float) -> None:
        """A step of `seconds` has just ended."""
        if not self.backends:
            return
        now = self.others.clock()
        paused = now - seconds - self._last_s > _PAUSE_S
        self._last_s = now
        if self._since is None or paused:
            self._since = self.others.mark()
        elif now - self._since.at_s >= _LOOK_S:
            self._settle(self.others.share(self._since) * self.others.cores)
            self._since = self.others.mark()

    def _settle(self, taken: float) -> None:
        """CpuContention took so many processors."""
        left = self.others.cores - taken
        fewest, most = math.floor(left + _BACK), math.floor(left + _TAKEN)
        threads = max(1, min(max(self.threads, fewest), most, self.others.cores))
        if threads != self.threads:
            self.threads = threads
            for backend in self.backends:
                backend.use_threads(threads)
