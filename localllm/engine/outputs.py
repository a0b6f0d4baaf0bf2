"""Turns the output of a step into tokens, text and events: samples, verifies drafts, and applies
the rules that end an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from localllm.engine.media import MediaSteps
from localllm.engine.messages import Failure, FinishReason, Text, TokenLogprob
from localllm.engine.request import RunningRequest
from localllm.engine.request_table import RequestTable
from localllm.engine.sampling.constraint import AnswerConstraint
from localllm.engine.sampling.grammar import Compilation
from localllm.engine.sampling.rejection import Distribution
from localllm.engine.sampling.row import Row
from localllm.engine.sampling.sampler import Sampler
from localllm.engine.scheduler import Grant
from localllm_backends.contract import (
    Backend,
    BackendFailure,
    Chunk,
    MediaPart,
    SampleSpec,
    StepResult,
)


@dataclass
class OutputProcessor:
    """Turns grants into chunks, and their results into the requests' next tokens."""

    backend: Backend
    jobs: RequestTable
    compile_: Callable[[tuple[str, str]], Compilation]
    media: MediaSteps | None = None

    def __post_init__(self) -> None:
        self._eog = frozenset(self.backend.info.eog_tokens)
        self._n_ctx = self.backend.info.n_ctx
        self._samples = self.backend.capabilities.samples
        self._asynchronous = self.backend.capabilities.asynchronous
        # Tokens whose text is not decoded yet.
        self._pending: list[tuple[RunningRequest, list[int]]] = []
        # The sampling that the current step does for its requests.
        self._sample_specs: list[tuple[Sampler, SampleSpec]] = []

    def send_text(self) -> None:
        """Decode the text of the tokens chosen so far, and add it to the events."""
        for job, tokens in self._pending:
            if len(tokens) == 1:
                text = job.text.push(tokens[0])
            else:
                text = "".join(map(job.text.push, tokens))
            self.jobs.events.append(Text(job.id, text, tuple(tokens)))
        self._pending.clear()

    def fail_running(self, error: BackendFailure) -> None:
        """Fail all running requests, because the step is lost."""
        self.send_text()
        for job in list(self.jobs.running.values()):
            self.jobs.fail(job, Failure(job.id, "backend_error", str(error)))

    def look_ahead(self) -> None:
        """Prepare sampling for the step after the current one, as far as it does not depend on the
        current result."""
        for sampler, spec in self._sample_specs:
            sampler.look_ahead(spec)
        self._sample_specs.clear()

    def chunk(self, grant: Grant) -> Chunk:
        """The backend's chunk for a grant."""
        job = self.jobs.running[grant.key]
        assert job.sequence is not None
        if grant.prefill:
            tokens = job.tokens[job.n_kv : job.n_kv + grant.n_tokens]
            last = job.n_kv + grant.n_tokens == len(job.tokens)
            span = job.medium
            if span is not None:
                assert self.media is not None
                assert self.media.chosen is not None
                part = MediaPart(span.run, self.media.chosen, job.n_kv - span.start)
                return Chunk(job.sequence, tokens, int(last), media=part)
            return Chunk(job.sequence, tokens, int(last), *self._sample_spec(job, last=last))
        tokens = job.tokens[job.n_kv :]
        if job.draft:
            job.draft = job.draft[: grant.n_tokens - 1]
            tokens += job.draft
        return Chunk(
            job.sequence, tokens, grant.n_tokens, *self._sample_spec(job, last=not job.draft)
        )

    def _sample_spec(self, job: RunningRequest, *, last: bool) -> tuple[SampleSpec | None, bool]:
        """How the backend may choose the token after a chunk, and whether its row of logits is used
        for that alone. `last`: the chunk is the last one before that token."""
        if not (self._samples and last):
            return None, False
        sample = job.sampler.sample_spec(job.tokens)
        if sample is not None and self._asynchronous:
            self._sample_specs.append((job.sampler, sample))
        chosen = sample is not None or job.sampler.takes_argmax(len(job.tokens))
        return sample, chosen and job.request.generation.logprobs is None

    def advance(self, grants: list[Grant], result: StepResult) -> None:
        """Advance every granted request by one step."""
        now = self.jobs.clock()
        for i, grant in enumerate(grants):
            job = self.jobs.running[grant.key]
            job.n_kv += grant.n_tokens
            if grant.prefill and job.n_kv < len(job.tokens):
                self._after_chunk(job)
                continue
            if job.max_tokens == 0:  # only the prompt was to be computed
                job.prefill_s = self.jobs.clock() - (job.admitted_s or 0)
                self.jobs.finish(job, "length")
                continue
            job.decode_steps += job.first_token_s is not None
            job.token_s = now
            self._accept(job, result, i)

    def _after_chunk(self, job: RunningRequest) -> None:
        assert job.sequence is not None
        if job.restoring is not None:
            job.restoring.computed(job.n_kv)
        if job.n_kv in job.checkpoints:
            self.jobs.pool.checkpoint(job.sequence, job.cache_tokens(0, job.n_kv))
        self.jobs.progress(job, job.n_kv)

    def _accept(self, job: RunningRequest, result: StepResult, index: int) -> None:
        """Turn the outputs of a request's chunk into tokens, and remove rejected drafts from the
        KV."""
        draft = job.draft
        drawn_from = job.draft_from
        job.draft = []
        job.draft_from = None
        before = len(job.tokens)
        best = self._chosen(job, result, index, len(draft))
        deferred = self._defers_text(job)
        texts: list[Text] | None = None if deferred else []
        accepted = 0
        finish = None
        if best and deferred and not draft:  # the usual step of a device
            finish = self._emit(job, best[0], None, None)
        else:
            rows = None
            if not best or job.request.generation.logprobs is not None:
                rows = result.logits(index)
            accepted, finish = self._verify(job, draft, drawn_from, best, rows, texts)
        if texts:
            self.jobs.events.append(_joined(texts))
        elif deferred:
            self._defer(job, job.tokens[before:], finish)
        self._count_drafts(job, len(draft), accepted)
        self.jobs.speculator.emitted(job, len(draft), accepted)
        if job.sampler.constraint is not None:
            failure = self._advance_constraint(job, job.sampler.constraint)
            if failure is not None:
                self.jobs.finish(job, "stop", failure)
                return
        if finish is not None:
            self.send_text()
            self.jobs.finish(job, finish)

    def _defer(self, job: RunningRequest, tokens: list[int], finish: FinishReason | None) -> None:
        """Decode the text of these tokens later. The token that ended the answer has no text."""
        if finish == "stop":
            tokens.pop()
        if tokens:
            self._pending.append((job, tokens))

    def _advance_constraint(
        self, job: RunningRequest, constraint: AnswerConstraint
    ) -> Failure | None:
        """Start the compilation that the constraint needs next. Returns a failure if no token can
        follow."""
        if constraint.stuck:
            return Failure(job.id, "constraint_stuck", constraint.why_stuck)
        if constraint.required_grammar is not None:
            job.compilation = self._compilation(job, constraint.required_grammar)
        return None

    def _compilation(self, job: RunningRequest, grammar: tuple[str, str]) -> Compilation:
        """The compilation of a grammar that the request needs to continue. Uses the one started at
        submission, if it has the same grammar and did not take too long."""
        expected = job.expected
        if expected is None or expected.grammar != grammar:
            return self.compile_(grammar)
        if expected.done and expected.matcher is None:
            return self.compile_(grammar)
        return expected

    def _defers_text(self, job: RunningRequest) -> bool:
        """True if the request's text may be decoded during the next step. Text that can end the
        answer, or that needs logits, must be decoded before."""
        if not self._asynchronous or job.sampler.constraint is not None:
            return False
        return job.request.generation.logprobs is None and not job.text.watches

    def _verify(
        self,
        job: RunningRequest,
        draft: list[int],
        drawn_from: list[Distribution] | None,
        best: list[int],
        rows: Row | None,
        texts: list[Text] | None,
    ) -> tuple[int, FinishReason | None]:
        """Emit tokens as far as the `draft` is right, and the next one after them.

        - `best`: tokens chosen by the backend (empty: draw from `rows`).
        - `rows`: logits (None: not needed).
        - `drawn_from`: distributions of the draft's tokens (None: guesses without a distribution).

        Returns the number of accepted draft tokens, and the reason if the request ends.
        """
        constraint = job.sampler.constraint
        accepted = 0
        for i in range(len(draft) + 1):
            row = None if rows is None else rows[i]
            if best or row is None:
                token = job.sampler.accept(best[i])
            elif drawn_from is not None and i < len(draft):
                token, _ = job.sampler.verify(row, job.tokens, draft[i], drawn_from[i])
            else:
                token = job.sampler.choose(row, job.tokens)
            right = i < len(draft) and token == draft[i]
            if constraint is None:
                finish = self._emit(job, token, row, texts)
            elif constraint.stuck:
                return accepted, None
            else:
                right = right and not constraint.grammar_changed
                finish = self._emit_constrained(job, constraint, token, row, texts)
            accepted += right
            if finish is not None or not right:
                return accepted, finish
        return accepted, None

    def _emit_constrained(
        self,
        job: RunningRequest,
        constraint: AnswerConstraint,
        token: int,
        row: Row | None,
        texts: list[Text] | None,
    ) -> FinishReason | None:
        """Append the chosen token and the tokens that the constraint forces after it. Returns the
        reason if this ends the request."""
        finish = self._emit(job, token, row, texts)
        if finish is not None:
            return finish
        if constraint.forced and texts:
            # A separate event, because the reader may count tokens before the forced ones
            # differently.
            self.jobs.events.append(_joined(texts))
            texts.clear()
        while constraint.forced and finish is None:
            token = constraint.forced.pop(0)
            finish = self._append(job, token, None, texts)
        return finish

    def _count_drafts(self, job: RunningRequest, n_drafted: int, accepted: int) -> None:
        """Count accepted and rejected draft tokens, and truncate the KV after the accepted ones. An
        accepted token that ended the answer has valid KV."""
        rejected = n_drafted - accepted
        if n_drafted:
            self.jobs.metrics.drafts += 1
        job.accepted_drafts += accepted
        job.rejected_drafts += rejected
        if rejected:
            job.n_kv -= rejected
            assert job.sequence is not None
            self.backend.truncate(job.sequence, job.n_kv)

    def _chosen(
        self, job: RunningRequest, result: StepResult, index: int, n_drafted: int
    ) -> list[int]:
        """The tokens of a request's chunk if they need no logits here, else an empty list."""
        token = None
        if self._samples and not n_drafted:
            token = result.sampled(index)
        if token is not None:
            job.sampler.sampled()
            return [token]
        if job.sampler.takes_argmax(len(job.tokens), n_drafted):
            best = result.argmax(index)
            if job.sampler.allows(best, len(job.tokens)):
                return best
        return []

    def _emit(
        self, job: RunningRequest, token: int, row: Row | None, texts: list[Text] | None
    ) -> FinishReason | None:
        """Append one chosen token, and its text to `texts` (None: decode the text later). Returns
        the reason if it ends the request."""
        if job.first_token_s is None:
            job.first_token_s = now = self.jobs.clock()
            job.prefill_s = now - (job.admitted_s or now)
        if job.ends_with(token, self._eog):
            self.jobs.metrics.generated_tokens += 1
            job.tokens.append(token)
            return "stop"
        return self._append(job, token, row, texts)

    def _append(
        self, job: RunningRequest, token: int, row: Row | None, texts: list[Text] | None
    ) -> FinishReason | None:
        """Append a token that is no end token. Otherwise like `_emit`."""
        self.jobs.metrics.generated_tokens += 1
        job.tokens.append(token)
        constraint = job.sampler.constraint
        if texts is not None:
            text = job.text.push(token, constraint)
            texts.append(Text(job.id, text, (token,), self._logprobs(job, token, row)))
        stopped = texts is not None and job.text.stopped_by is not None
        if stopped or (constraint is not None and constraint.finished):
            return "stop"
        if job.loop_guard is not None and job.loop_guard.loops(token):
            return "repetition"
        n = len(job.tokens)
        if n - job.n_prompt >= job.max_tokens or n >= self._n_ctx:
            return "length"
        return None

    def _logprobs(
        self, job: RunningRequest, token: int, row: Row | None
    ) -> tuple[TokenLogprob, ...]:
        """The requested log-probabilities of a token."""
        generation = job.request.generation
        if generation.logprobs is None or row is None:
            return ()

        def text(t: int) -> str:
            return self.backend.token_bytes(t, special=True).decode("utf-8", "surrogateescape")

        own, best = job.sampler.log_probabilities(
            row, token, generation.logprobs, generation.logprobs_of
        )
        return (TokenLogprob(text(token), token, own, tuple((text(t), t, p) for t, p in best)),)


def _joined(texts: list[Text]) -> Text:
    """Join all texts of a step for one request into one event, so that clients wake once per step
    and not once per token."""
    return Text(
        texts[0].id,
        "".join(t.text for t in texts),
        tuple(chain.from_iterable(t.tokens for t in texts)),
        tuple(chain.from_iterable(t.logprobs for t in texts)),
    )
