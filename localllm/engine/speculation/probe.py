"""What verifying n tokens costs, measured while nobody asks for anything: once at the start, and again where that went wrong.

A plain step is made of many small parts that each wait for the slowest thread: beside other programs' work it suffers more
than one over many rows, and drafts look cheaper than they are. So a measurement made beside such work is only taken for want
of a better, and made again when the machine is quiet; as is one that steps with drafts have shown to be wrong.
"""

from __future__ import annotations

from collections.abc import Callable

from localllm.engine.host.contention import MOST_SHARE, CpuContention, Mark
from localllm.engine.speculation.controller import StepCost
from localllm_backends.contract import Backend, BackendFailure, Chunk, NoCellsError

# 64 is where llama.cpp's attention on a CPU begins to read the KV cache once for all rows: at depth 2,500 a token of 64 took
# 9.4 ms, one of 47 took 14.3, and what was extrapolated from 32 kept them from being tried.
_ROWS = (1, 2, 4, 8, 16, 32, 64)
_ROUNDS = 3
_BUDGET_S = 1.0
# Again only behind so long a rest, which others have spent at rest too; and ever more rarely: deep in a long conversation rows
# are dearer than in a probe's empty one, each time.
_REST_S = 1.0
_PAUSE_S = 5.0


class CostProbe:
    """Fills in `cost`. `failed`: why nothing can be verified (empty: it can)."""

    def __init__(self, backend: Backend, cost: StepCost, others: CpuContention, clock: Callable[[], float]) -> None:
        self._backend, self._cost, self._others, self._clock = backend, cost, others, clock
        self.failed = ""
        self._all: dict[int, float] = {}
        self._quiet: dict[int, float] = {}
        self._round: dict[int, float] = {}
        self._round_began: Mark | None = None
        self._left: list[int] = []
        self._spent_s = 0.0
        self._again_at, self._pause_s = 0.0, _PAUSE_S
        self._resting: Mark | None = None
        self._begin()

    def _begin(self) -> None:
        most = min(self._backend.info.n_batch, self._backend.info.n_outputs)
        self._left = [n for n in _ROWS if n <= most] * _ROUNDS
        self._all, self._quiet, self._round, self._spent_s = {}, {}, {}, 0.0

    def tick(self, rested_s: float) -> bool:
        """Time one verification of the next size on a sequence of its own; True while there are more. Nobody has asked for
        anything for `rested_s`."""
        if self.failed or not (self._left or self._due(rested_s)):
            return False
        if self._backend.cells_free() < max(self._left):
            return False
        if not self._round:
            self._round_began = self._others.mark()
        rows = self._left[0]
        try:
            seconds = self._verification_s(rows)
        except NoCellsError:
            return False
        except BackendFailure as e:
            # What can't be verified must not be drafted: a step that fails costs every request in it.
            self.failed = f"a trial step with {rows} rows failed: {e}"
            return False
        del self._left[0]
        self._spent_s += seconds
        if self._spent_s > _BUDGET_S:
            self._left.clear()
        self._round[rows] = seconds
        if not self._left or self._left[0] <= rows:
            self._end_round()
        if not self._left:
            self._conclude()
        return bool(self._left)

    def _due(self, rested_s: float) -> bool:
        """Begin again, where it is worth it and the machine has been quiet since the last look."""
        if rested_s < _REST_S or not (self._cost.strayed or not self._quiet) or self._clock() < self._again_at:
            self._resting = None
            return False
        since, self._resting = self._resting, self._others.mark()
        if since is None or self._others.share(since) > MOST_SHARE:
            return False
        self._resting = None
        self._begin()
        return True

    def _end_round(self) -> None:
        assert self._round_began is not None
        kept = [self._all]
        if self._others.share(self._round_began) <= MOST_SHARE:
            kept.append(self._quiet)
        for rows, seconds in self._round.items():
            for into in kept:
                into[rows] = min(into.get(rows, seconds), seconds)
        self._round = {}

    def _conclude(self) -> None:
        if self._quiet or not self._cost.known:
            self._cost.set(self._quiet or self._all)
        self._again_at = self._clock() + self._pause_s
        self._pause_s *= 2

    def _verification_s(self, rows: int) -> float:
        # Different tokens: equal ones go to the same experts of a mixture, which then reads less than it does for a draft.
        first, n_vocab = self._backend.info.bos_token or 0, self._backend.info.n_vocab
        tokens = [(first + i * max(n_vocab // rows, 1)) % n_vocab for i in range(rows)]
        sequence = self._backend.new_sequence()
        started = self._clock()
        try:
            self._backend.step([Chunk(sequence, tokens, rows)]).argmax(0)
            return self._clock() - started
        finally:
            self._backend.drop(sequence)
