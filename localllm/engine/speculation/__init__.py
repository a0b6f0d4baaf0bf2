"""Speculative decoding: draft the next tokens cheaply and verify several in one step, if that
pays.

This module defines the interface of a drafter. `registered` finds every module of this package
that implements it.
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
from localllm.engine.speculation.controller import draft_time_s
from localllm_backends.contract import Backend, BackendFailure, Chunk

# Draft tokens by request id, and the distributions they were drawn from (None: the tokens are the
# drafter's best guesses and were not drawn).
Drafts = dict[str, tuple[list[int], list[Distribution] | None]]
# Weight of a new measurement in the average cost of a drafted token.
_SMOOTHING = 0.2
# A draft counts as at most so many times the average.
_MAX_SLOWER = 2.0
# A probe uses the minimum of this many measurements.
_PROBES = 3


class Drafter(ABC):
    """A drafter that computes on `backend`: a draft model or trained heads. Used by the engine's
    thread.

        `longest`: the longest draft, in tokens.
        `token_s`: seconds per drafted token, or per draft if it is made `at_once`. While it is 0
            (not measured yet), the drafter is not used.
        `stops_when_unsure`: a draft shorter than wanted counts as one wrong token, because the
            drafter computed that token in vain.
    """

    backend: Backend
    clock: Callable[[], float]
    longest: int
    name: ClassVar[str]
    stops_when_unsure: ClassVar[bool] = False
    token_s: float = 0.0
    at_once: bool = False

    @classmethod
    @abstractmethod
    def for_engine(
        cls, backend: Backend, draft_backend: Backend | None, mode: str, clock: Callable[[], float]
    ) -> Self | None:
        """Return a drafter for an engine with that `backend`, or None if it is missing or
        not wanted.

        `mode` is auto, mtp, ngram or off (`EngineSettings.draft`). `draft_backend` runs the draft
        model, if one was named.
        """

    @abstractmethod
    def ready(self, job: RunningRequest) -> bool:
        """True if the drafter has read enough of `job` to draft for it. If not, it may read on."""

    @abstractmethod
    def draft(self, wanted: Sequence[tuple[RunningRequest, int]]) -> Drafts:
        """Return drafts of at most the wanted lengths. Requests that it can't draft for are
        omitted.
        """

    @abstractmethod
    def draft_once(self, sequence: int, token: int) -> None:
        """Draft one token (or block) after `sequence`, which holds `token`."""

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

    def drafting_s(self, length: int) -> float:
        """Seconds that a draft of `length` tokens takes before it is verified."""
        return draft_time_s(length, self.token_s, at_once=self.at_once)

    def record(self, seconds: float) -> None:
        """Record the time of one drafted token (or of one draft, if it is made `at_once`).

        A draft after a pause also reads the tokens since the last one, so a slow draft counts only
        in part.
        """
        if not self.token_s:
            self.token_s = seconds
        seconds = min(seconds, _MAX_SLOWER * self.token_s)
        self.token_s += _SMOOTHING * (seconds - self.token_s)

    def rest(self, resting: bool) -> None:  # noqa: B027 (optional hook)
        """Record whether this drafter is expected to stay unused. It may then forget old tokens."""

    def forget(self, job: RunningRequest) -> None:  # noqa: B027 (optional hook)
        """Drop the data of a request that left the context."""

    def tick(self, *, busy: bool) -> bool:
        """Do one piece of housekeeping. Returns True while there is more."""
        return False

    def close(self) -> None:  # noqa: B027
        """Free all resources."""


def longest_draft(backend: Backend) -> int:
    """The most drafted tokens that can be rewound; 0 if the model's memory can't rewind."""
    able = backend.capabilities
    return {"any": 64, "bounded": able.rewind_tokens, "none": 0}[able.rewind]


def registered() -> list[type[Drafter]]:
    """Every drafter of this package, sorted by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(Drafter.__subclasses__(), key=attrgetter("name"))
