"""Drafts with trained heads (the model's own, EAGLE-3, DFlash).

The heads belong to the backend and use the sequences they draft for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from localllm.engine.request import RunningRequest
from localllm.engine.speculation import Drafter, Drafts
from localllm_backends.contract import Backend, BackendFailure


class MtpDrafter(Drafter):
    """Drafts for several requests at once, in the sequences that the engine already has."""

    name = "mtp"
    stops_when_unsure = True

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self.backend = backend
        self.clock = clock
        self._eog = frozenset(self.backend.info.eog_tokens)
        self.longest = self.backend.capabilities.drafts
        self.name = self.backend.capabilities.draft_kind or "mtp"  # type: ignore[misc]
        self.at_once = self.name == "dflash"
        self._rests = False

    @classmethod
    def for_engine(
        cls, backend: Backend, draft_backend: Backend | None, mode: str, clock: Callable[[], float]
    ) -> Self | None:
        """Return a drafter if heads are loaded and the mode allows them.

        Heads from a companion file are used in the modes "auto" and "mtp". The model's own heads
        are used only in mode "mtp".
        """
        able = backend.capabilities
        companion = mode == "auto" and able.draft_kind not in ("", "mtp")
        if able.drafts and (companion or mode == "mtp"):
            return cls(backend, clock)
        return None

    def rest(self, resting: bool) -> None:
        if resting != self._rests:
            self._rests = resting
            self.backend.rest_heads(resting)

    def ready(self, job: RunningRequest) -> bool:
        """True if the model has read all but the newest token. The heads follow the model by
        themselves.
        """
        return job.sequence is not None and job.n_kv == len(job.tokens) - 1

    def draft(self, wanted: Sequence[tuple[RunningRequest, int]]) -> Drafts:
        """Return drafts by job id, of the wanted lengths or shorter if the heads become unsure.

        They are the heads' best guesses, without distributions.
        """
        jobs = [(job, length) for job, length in wanted if length > 0]
        asked = [
            (job.sequence, job.tokens[-1], length)
            for job, length in jobs
            if job.sequence is not None
        ]
        assert len(asked) == len(jobs), "a decoding request has no sequence"
        started = self.clock()
        try:
            drafts = self.backend.draft(asked)
        except BackendFailure:
            return {}
        # A head that stops because it is unsure has computed one token more than it returns.
        steps = max(
            (min(len(d) + 1, length) for d, (_, length) in zip(drafts, jobs, strict=True)),
            default=0,
        )
        if steps:
            self.record((self.clock() - started) / (1 if self.at_once else steps))
        found: Drafts = {}
        for (job, _), draft in zip(jobs, drafts, strict=True):
            # No token follows one that ends the answer.
            end = next((i for i, token in enumerate(draft) if token in self._eog), len(draft))
            found[job.id] = draft[: end + 1], None
        return found

    def draft_once(self, sequence: int, token: int) -> None:
        self.backend.draft([(sequence, token, 1)])
