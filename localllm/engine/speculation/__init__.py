"""Speculative drafting: guess the next tokens cheaply, verify several in one sweep, and only while
that pays.

Here is what a drafter is. Every module of this package that defines one is found by itself
(`registered`).
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import ClassVar, Self

from localllm.engine.request import RunningRequest
from localllm.engine.sampling.rejection import Distribution
from localllm_backends.contract import Backend, BackendFailure, Chunk

# Draft tokens by request id, and the distributions they were drawn from (None: none, they are the
# drafter's best guesses).
Drafts = dict[str, tuple[list[int], list[Distribution] | None]]
# A drafted token's measured seconds follow what is measured later at this rate.
_SMOOTHING = 0.2
# A probe takes the least of so many measurements.
_PROBES = 3


class Drafter(ABC):
    """Drafts by computing on `backend`: a draft model, trained heads. Belongs to the engine's
    thread.

    `most`: the longest draft. `token_s`: seconds a drafted token costs, or a whole draft where it
    is made `at_once` (0: not measured yet, nothing is drafted). `stops_when_unsure`: a draft shorter than wanted counts as
    one wrong token, since what was computed there brought nothing."""

    backend: Backend
    clock: Callable[[], float]
    most: int
    name: ClassVar[str]
    stops_when_unsure: ClassVar[bool] = False
    token_s: float = 0.0
    at_once: bool = False

    @classmethod
    @abstractmethod
    def for_engine(
        cls, backend: Backend, draft_backend: Backend | None, mode: str, clock: Callable[[], float]
    ) -> Self | None:
        """One for an engine of that `backend`, whose `mode` is auto, mtp, ngram or off
        (`EngineSettings.draft`); None where there is nothing to draft with, or it is not wanted.
        `draft_backend`: of the draft model, if one was named."""

    @abstractmethod
    def ready(self, job: RunningRequest) -> bool:
        """True once it knows enough of `job` to draft for it; until then it may read on in it."""

    @abstractmethod
    def draft(self, wanted: Sequence[tuple[RunningRequest, int]]) -> Drafts:
        """Drafts of at most the wanted lengths. A request it can't draft for is left out."""

    @abstractmethod
    def draft_once(self, sequence: int, token: int) -> None:
        """Draft one token (or block) behind `sequence`, which holds `token`."""

    def probe(self) -> None:
        """Measure `token_s` on a sequence of its own. Raises BackendFailure."""
        try:
            sequence = self.backend.new_sequence()
        except BackendFailure:
            return
        token = self.backend.info.bos_token or 0
        try:
            self.backend.step([Chunk(sequence, [token])]).argmax(0)
            for _ in range(_PROBES):
                started = self.clock()
                self.draft_once(sequence, token)
                seconds = self.clock() - started
                self.token_s = min(self.token_s or seconds, seconds)
        finally:
            self.backend.drop(sequence)

    def record(self, seconds: float) -> None:
        """A drafted token (a draft, where it is made at once) took so long."""
        self.token_s += _SMOOTHING * (seconds - self.token_s) if self.token_s else seconds

    def forget(self, job: RunningRequest) -> None:  # noqa: B027 (nothing to forget is an answer)
        """The request left the context."""

    def tick(self, *, busy: bool) -> bool:
        """One piece of housekeeping; True while there is more."""
        return False

    def close(self) -> None:  # noqa: B027
        """Free what it holds."""


def longest_draft(backend: Backend) -> int:
    """How many drafted tokens can be taken back; 0 where none can."""
    able = backend.capabilities
    return {"any": 64, "bounded": able.rewind_tokens, "none": 0}[able.rewind]


def registered() -> list[type[Drafter]]:
    """Every drafter of this package, by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(Drafter.__subclasses__(), key=attrgetter("name"))
