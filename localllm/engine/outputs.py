"""What a step computed becomes tokens, text and events: sampling, verifying drafts, and the rules that end an answer."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.engine.messages import Failure, FinishReason, Text, TokenLogprob
from localllm.engine.request import RunningRequest
from localllm.engine.request_table import RequestTable
from localllm.engine.sampling.row import Row
from localllm.engine.sampling.sampler import Sampler
from localllm.engine.scheduler import Grant
from localllm.engine.vision import ImageSteps
from localllm_backends.contract import Backend, Chunk, ImagePart, SampleSpec, StepResult


@dataclass
class OutputProcessor:
    """Turns grants into chunks, and what came out of them into the jobs' next tokens."""

    backend: Backend
    jobs: RequestTable
    images: ImageSteps | None = None

    def __post_init__(self) -> None:
        self._eog, self._n_ctx = frozenset(self.backend.info.eog_tokens), self.backend.info.n_ctx
        self._samples = self.backend.capabilities.samples
        self._defers = self.backend.capabilities.asynchronous
        # Tokens whose text is not made yet.
        self._unsaid: list[tuple[RunningRequest, list[int]]] = []
        # What the step under way was asked to sample.
        self._asked: list[tuple[Sampler, SampleSpec]] = []

    def say(self) -> None:
        """Make the text of what was chosen since, where the next step's computing left time for that."""
        for job, tokens in self._unsaid:
            text = job.text.push(tokens[0]) if len(tokens) == 1 else "".join(map(job.text.push, tokens))
            self.jobs.events.append(Text(job.id, text, tuple(tokens)))
        self._unsaid.clear()

    def look_ahead(self) -> None:
        """What of the step after the one under way does not depend on that."""
        for sampler, spec in self._asked:
            sampler.look_ahead(spec)
        self._asked.clear()

    def chunk(self, grant: Grant) -> Chunk:
        """What a grant puts into the step."""
        job = self.jobs.running[grant.key]
        assert job.sequence is not None
        if grant.prefill:
            tokens = job.tokens[job.n_kv : job.n_kv + grant.n_tokens]
            last = job.n_kv + grant.n_tokens == len(job.tokens)
            if (placed := job.image) is not None:
                assert self.images is not None
                assert self.images.chosen is not None
                part = ImagePart(placed.run, self.images.chosen, job.n_kv - placed.start)
                return Chunk(job.sequence, tokens, int(last), image=part)
            return Chunk(job.sequence, tokens, int(last), *self._wanted(job, last=last))
        tokens = job.tokens[job.n_kv :]
        if job.draft:
            job.draft = job.draft[: grant.n_tokens - 1]
            tokens += job.draft
        return Chunk(job.sequence, tokens, grant.n_tokens, *self._wanted(job, last=not job.draft))

    def _wanted(self, job: RunningRequest, *, last: bool) -> tuple[SampleSpec | None, bool]:
        """How the backend may choose the token behind a chunk that is the `last` before it, and whether that is all of its row
        that is looked at."""
        if not (self._samples and last):
            return None, False
        sample = job.sampler.sample_spec(job.tokens)
        if sample is not None and self._defers:
            self._asked.append((job.sampler, sample))
        chosen = sample is not None or job.sampler.takes_argmax(len(job.tokens))
        return sample, chosen and job.request.generation.logprobs is None

    def advance(self, grants: list[Grant], result: StepResult) -> int:
        """Every granted job by one step; returns how many had their first token."""
        first = 0
        for i, grant in enumerate(grants):
            job = self.jobs.running[grant.key]
            job.n_kv += grant.n_tokens
            if grant.prefill and job.n_kv < len(job.tokens):
                self._after_chunk(job)
                continue
            if job.max_tokens == 0:  # the prompt is computed, and that was all
                job.prefill_s = self.jobs.clock() - (job.admitted_s or 0)
                self.jobs.finish(job, "length")
                continue
            first += job.first_token_s is None
            job.decode_steps += job.first_token_s is not None
            self._accept(job, result, i)
        return first

    def _after_chunk(self, job: RunningRequest) -> None:
        assert job.sequence is not None
        if job.restoring is not None:
            job.restoring.computed(job.n_kv)
        if job.n_kv in job.checkpoints:
            self.jobs.pool.checkpoint(job.sequence, job.line(0, job.n_kv))
        self.jobs.progress(job, job.n_kv)

    def _accept(self, job: RunningRequest, result: StepResult, index: int) -> None:
        """Turn the outputs of a job's chunk into tokens; take rejected drafts back out of the KV."""
        draft, drawn_from = job.draft, job.draft_from
        job.draft, job.draft_from = [], None
        best = self._chosen(job, result, index, len(draft))
        told, constraint = job.request.generation.logprobs is not None, job.sampler.constraint
        # What its text may end, or its row explains, is said before the next step.
        deferred = self._defers and constraint is None and not told and not job.text.watches
        if best and deferred and not draft:
            reason = self._emit(job, best[0], None, None)
            if reason != "stop":
                self._unsaid.append((job, best))
            self.jobs.speculator.emitted(job, best, 0, 0)
            if reason is not None:
                self.say()
                self.jobs.finish(job, reason)
            return
        rows = result.logits(index) if told or not best else None
        accepted = 0
        before = len(job.tokens)
        said: list[Text] = []
        finish: FinishReason | None = None
        stuck = False
        for i in range(len(draft) + 1):
            row = None if rows is None else rows[i]
            if best or row is None:
                token = best[i]
            elif drawn_from is not None and i < len(draft):
                token, _ = job.sampler.verify(row, job.tokens, draft[i], drawn_from[i])
            else:
                token = job.sampler.choose(row, job.tokens)
            stuck = constraint is not None and constraint.stuck
            if stuck:
                break
            right = i < len(draft) and token == draft[i]
            accepted += right
            finish = self._emit(job, token, row, None if deferred else said)
            if finish is not None or not right:
                break
        if deferred and (unsaid := job.tokens[before:] if finish != "stop" else job.tokens[before:-1]):
            self._unsaid.append((job, unsaid))
        self.jobs.events += said if len(said) < 2 else [_joined(said)]
        # The KV of a drafted token that ended the answer is right too; what lies behind it is not.
        rejected = len(draft) - accepted
        job.accepted_drafts += accepted
        job.rejected_drafts += rejected
        self.jobs.speculator.emitted(job, job.tokens[before:], len(draft), accepted)
        if rejected:
            job.n_kv -= rejected
            assert job.sequence is not None
            self.backend.truncate(job.sequence, job.n_kv)
        if constraint is not None and stuck:
            self.jobs.finish(job, "stop", Failure(job.id, "constraint_stuck", constraint.why_stuck))
        elif finish is not None:
            self.say()
            self.jobs.finish(job, finish)

    def _chosen(self, job: RunningRequest, result: StepResult, index: int, n_drafted: int) -> list[int]:
        """The tokens of a job's chunk where nobody need look at its rows here, else none."""
        if self._samples and not n_drafted and (token := result.sampled(index)) is not None:
            job.sampler.sampled(token)
            return [token]
        if job.sampler.takes_argmax(len(job.tokens), n_drafted):
            best = result.argmax(index)
            return best if job.sampler.allows(best, len(job.tokens)) else []
        return []

    def _emit(self, job: RunningRequest, token: int, row: Row | None, said: list[Text] | None) -> FinishReason | None:
        """Append one chosen token, and its text to `said` (None: later); the reason if it ends the request."""
        if job.first_token_s is None:
            job.first_token_s = now = self.jobs.clock()
            job.prefill_s = now - (job.admitted_s or now)
        self.jobs.metrics.generated_tokens += 1
        if job.ends_with(token, self._eog):
            job.tokens.append(token)
            return "stop"
        job.tokens.append(token)
        if said is not None:
            told = job.request.generation.logprobs is not None
            logprobs = self._logprobs(job, token, row) if told and row is not None else ()
            said.append(Text(job.id, job.text.push(token), (token,), logprobs))
            if job.text.stopped_by is not None:
                return "stop"
        if job.sampler.constraint is not None and job.sampler.constraint.finished:
            return "stop"
        if job.loop_guard is not None and job.loop_guard.loops(token):
            return "repetition"
        n = len(job.tokens)
        return "length" if n - job.n_prompt >= job.max_tokens or n >= self._n_ctx else None

    def _logprobs(self, job: RunningRequest, token: int, row: Row) -> tuple[TokenLogprob, ...]:
        def text(t: int) -> str:
            return self.backend.token_bytes(t, special=True).decode("utf-8", "surrogateescape")

        told = job.request.generation
        own, best = job.sampler.log_probabilities(row, token, told.logprobs or 0, told.logprobs_of)
        return (TokenLogprob(text(token), token, own, tuple((text(t), t, p) for t, p in best)),)


def _joined(said: list[Text]) -> Text:
    """One event for all a step said to one request: clients are woken once per step, not once per token."""
    return Text(
        said[0].id,
        "".join(t.text for t in said),
        tuple(token for t in said for token in t.tokens),
        tuple(p for t in said for p in t.logprobs),
    )
