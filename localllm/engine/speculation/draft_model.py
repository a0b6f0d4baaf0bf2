"""The draft model: a smaller model with the same vocabulary that drafts for all sequences in
lockstep.

It runs on a Backend with its own KV. Its KV of a conversation stays in its own prefix cache, so it
does not prefill a token twice either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from localllm.engine.cache.matching import PromptMatch
from localllm.engine.cache.pool import SequencePool
from localllm.engine.cache.store import KvStore
from localllm.engine.request import RunningRequest
from localllm.engine.sampling.filters import distribution
from localllm.engine.sampling.rejection import Distribution
from localllm.engine.speculation import Drafter, Drafts, longest_draft
from localllm.engine.tokens import salted
from localllm_backends.contract import Backend, BackendFailure, Chunk, StepResult

# Vocabularies may differ by this many padding tokens at their ends, as in llama.cpp
# (common/speculative.cpp).
_PADDING_TOKENS = 128
_CACHE_BYTES = 256 * 2**20


def vocabulary_difference(target: Sequence[bytes], draft: Sequence[bytes]) -> str | None:
    """Return None if the draft model's token ids mean the same to the target, else the first
    difference.

    The text has token ids as numbers, and token bytes as Python literals.
    """
    if abs(len(target) - len(draft)) > _PADDING_TOKENS:
        return (
            f"the model's vocabulary has {len(target):,} tokens, the draft model's {len(draft):,}"
        )
    for i, (a, b) in enumerate(zip(target, draft, strict=False)):
        if a != b:
            return f"token {i} is {a!r} in the model's vocabulary and {b!r} in the draft model's"
    return None


@dataclass
class _DraftSequence:
    """A request's sequence in the draft model. `read_tokens`: the tokens it has read, right or wrong."""

    sequence: int
    read_tokens: list[int] = field(default_factory=list)


class DraftModel(Drafter):
    """Drafts for several requests at once."""

    name = "model"

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self.backend = backend
        self.clock = clock
        self._pool = SequencePool(backend, KvStore(backend, _CACHE_BYTES))
        self._sequences: dict[str, _DraftSequence] = {}
        self.longest = longest_draft(backend)

    @classmethod
    def for_engine(
        cls, backend: Backend, draft_backend: Backend | None, mode: str, clock: Callable[[], float]
    ) -> Self | None:
        """Return a drafter if a draft model was named, else None."""
        if draft_backend is not None:
            return cls(draft_backend, clock)
        return None

    def ready(self, job: RunningRequest) -> bool:
        """Read on in `job`, at most one batch. Returns True once at most one batch of tokens is
        unread.

        The draft model can't read images, so a job with images is never ready.
        """
        if job.media:
            return False
        try:
            entry = self._sequence_for(job)
            behind = len(job.tokens) - len(entry.read_tokens)
            if behind <= self.backend.info.n_batch:
                return True
            self._step(
                [
                    Chunk(
                        entry.sequence,
                        job.tokens[len(entry.read_tokens) :][: self.backend.info.n_batch],
                        0,
                    )
                ],
                [entry],
            )
        except BackendFailure:
            self.forget(job)
        return False

    def draft(self, wanted: Sequence[tuple[RunningRequest, int]]) -> Drafts:
        """Return drafts of the wanted lengths by job id.

        Each has its tokens and the distributions they were drawn from. If a draft has None for
        these, each token is the draft model's best guess.
        """
        drafts: Drafts = {}
        feeds: dict[str, list[int]] = {}
        jobs = {job.id: (job, length) for job, length in wanted if length > 0}
        for job, _ in jobs.values():
            entry = self._sequence_for(job)
            feeds[job.id] = job.tokens[len(entry.read_tokens) :]
            drafts[job.id] = ([], [] if _draws(job) else None)
        started = self.clock()
        steps = 0
        try:
            while feeds:
                keys = self._fitting(feeds)
                entries = [self._sequences[key] for key in keys]
                chunks = [
                    Chunk(entry.sequence, feeds.pop(key), 1)
                    for entry, key in zip(entries, keys, strict=True)
                ]
                result = self._step(chunks, entries)
                steps += 1
                for i, key in enumerate(keys):
                    job, length = jobs[key]
                    tokens, dists = drafts[key]
                    token = self._choose(job, tokens, dists, result, i)
                    tokens.append(token)
                    if len(tokens) < length and token not in self.backend.info.eog_tokens:
                        feeds[key] = [token]
        except BackendFailure:
            # The draft model has no room or failed. The requests continue without it.
            for job, _ in jobs.values():
                self.forget(job)
            return {}
        if steps:
            self.record((self.clock() - started) / steps)
        return drafts

    def _fitting(self, feeds: dict[str, list[int]]) -> list[str]:
        """As many of the feeds as fit into one batch, at least one."""
        room = self.backend.info.n_batch
        keys: list[str] = []
        for key, feed in feeds.items():
            if len(feed) <= room or not keys:
                keys.append(key)
                room -= len(feed)
        return keys

    def _choose(
        self,
        job: RunningRequest,
        drafted: list[int],
        dists: list[Distribution] | None,
        result: StepResult,
        index: int,
    ) -> int:
        if dists is None:
            return result.argmax(index)[-1]
        row = result.logits(index)[-1]
        sampler = job.sampler
        dist = distribution(sampler.prepared(row, [*job.tokens, *drafted]), sampler.sampling)
        dists.append(dist)
        return dist.draw(sampler.uniform())

    def _sequence_for(self, job: RunningRequest) -> _DraftSequence:
        """The job's sequence, truncated to the tokens it shares with the job."""
        entry = self._sequences.get(job.id)
        if entry is None:
            tokens = job.cache_tokens()
            source = self._pool.lookup(PromptMatch(tokens), ())
            reserve = min(job.max_tokens - job.n_generated, self.backend.info.n_ctx - len(tokens))
            need = self._pool.needs_cells(source, len(tokens) + reserve)
            self._pool.make_room(need, live=len(self._sequences) + 1, source=source)
            taken = self._pool.take(source, tokens)
            taken.at_once()
            entry = self._sequences[job.id] = _DraftSequence(
                taken.sequence, job.tokens[: taken.n_tokens]
            )
        right = len(entry.read_tokens)
        # Only tokens of the last drafts can be wrong.
        while right and (
            right > len(job.tokens) - 1 or entry.read_tokens[right - 1] != job.tokens[right - 1]
        ):
            right -= 1
        if right < len(entry.read_tokens):
            self.backend.truncate(entry.sequence, right)
            del entry.read_tokens[right:]
        return entry

    def _step(self, chunks: list[Chunk], entries: list[_DraftSequence]) -> StepResult:
        result = self.backend.step(chunks)
        for chunk, entry in zip(chunks, entries, strict=True):
            entry.read_tokens.extend(chunk.tokens)
        return result

    def forget(self, job: RunningRequest) -> None:
        """Release the sequence of a job that ended. Its KV stays in the draft model's cache."""
        entry = self._sequences.pop(job.id, None)
        if entry is not None:
            self._pool.release(
                entry.sequence, salted(entry.read_tokens, job.request.generation.salt)
            )

    def tick(self, *, busy: bool) -> bool:
        return self._pool.tick(busy=busy)

    def draft_once(self, sequence: int, token: int) -> None:
        self.backend.step([Chunk(sequence, [token])]).argmax(0)

    def close(self) -> None:
        self.backend.close()


def _draws(job: RunningRequest) -> bool:
    """True if the draft must be drawn in the same way as the target's tokens.

    Under a grammar the best guess is proposed instead.
    """
    return job.request.generation.sampling.temperature > 0 and not job.sampler.constrained
