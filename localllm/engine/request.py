"""The state of one request in the engine: its tokens, its place in the KV cache and its times."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from localllm.engine.adapters import AdapterSet, kv_salt, set_of
from localllm.engine.messages import SAMPLING_RANGES, LoopLimits, Request, Timings, Usage
from localllm.engine.sampling.constraint import AnswerConstraint
from localllm.engine.sampling.grammar import Compilation, tokens_within
from localllm.engine.sampling.rejection import Distribution
from localllm.engine.sampling.sampler import Sampler, ThinkingBudget, TokenRules
from localllm.engine.sampling.text_stream import TextStream
from localllm.engine.scheduler import ShareKey, arrival
from localllm.engine.tokens import salted

if TYPE_CHECKING:
    from localllm.engine.cache.eviction import Block
    from localllm.engine.cache.matching import PromptMatch
    from localllm.engine.cache.restore import Restoration
    from localllm.engine.tokens import MediaSpan, Tokens
    from localllm_backends.contract import Backend

# Sampling parameters in the overview. The seed and biases are private to the client.
_REPORTED = [name for name, allowed in SAMPLING_RANGES.items() if allowed.reported]


class Closable(Protocol):
    """Work in other threads that ends when the request ends."""

    def close(self) -> None: ...


@dataclass(eq=False)
class RunningRequest:
    """State of one request. `tokens` = prompt + generated; the first `n_kv` of them have KV in
    `sequence` (None while not admitted).

    - `draft`: tokens that the next step verifies.
    - `draft_from`: the distributions that the draft was drawn from (None: guesses without a
      distribution).
    - `predicted`: the output that the client expects, as tokens.
    - `matching`: state of comparing the prompt with the cache, kept while the request waits.
    - `compilation`: a grammar being compiled. Until it is done, the request can't be admitted, and
      a running one whose tool call needs it is in no step.
    - `expected`: compilation of the first tool call's grammar, started at submission.
    - `reading`: a state being read from disk, without which the request can't be admitted.
    - `restoring`: import of the cached prefix after admission. Until it ends, the request is only
      in steps that compute a `gap` in the prefix.
    - `known`: length of the longest known prefix of its prompt.
    - `admissions`: how often it started running; a parked request starts again.
    - `parked_tokens`: tokens that were computed when it was parked.
    - `media`: the images and sounds of its prompt, in order.
    - `sent_to`: the end of the KV that was sent to another server, if the request `sends` it.
    - `fetch`: a transfer of KV from another server, which goes on.
    - `fetch_asked`: the admission for which a transfer was considered.
    - `fetched_tokens`: tokens of the prompt that were read by the server `fetched_from`.
    - `number`: unique in this process.
    - `adapters`: the set of adapters that computes it (engine/adapters.py).
    - `kv_salt`: only requests with the same one share KV.
    - `token_s`: the time of its newest token.
    - `promoted`: it had low priority, and has normal priority from now on.
    """

    request: Request
    tokens: list[int]
    n_prompt: int
    max_tokens: int
    sampler: Sampler
    text: TextStream
    submitted_s: float
    sequence: int | None = None
    n_kv: int = 0
    draft: list[int] = field(default_factory=list)
    draft_from: list[Distribution] | None = None
    predicted: list[int] = field(default_factory=list)
    loop_guard: LoopGuard | None = None
    compilation: Compilation | None = None
    expected: Compilation | None = None
    matching: PromptMatch | None = None
    reading: Block | None = None
    restoring: Restoration | None = None
    known: int = 0
    checkpoints: list[int] = field(default_factory=list)
    cached: int = 0
    miss: str = ""
    admitted_s: float | None = None
    first_token_s: float | None = None
    queued_s: float = 0.0
    prefill_s: float = 0.0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    decode_steps: int = 0
    admissions: int = 0
    parked_tokens: int = 0
    media: tuple[MediaSpan, ...] = ()
    sent_to: int = 0
    fetch: Closable | None = None
    fetch_asked: int = -1
    fetched_tokens: int = 0
    fetched_from: str = ""
    number: int = field(default_factory=itertools.count(1).__next__)
    adapters: AdapterSet = ()
    kv_salt: str = ""
    token_s: float = 0.0
    promoted: bool = False

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def arrived_s(self) -> float:
        """The request's arrival time for the queue order, adjusted by priority."""
        return arrival(self.submitted_s, self.request.generation.priority)

    @property
    def background(self) -> bool:
        """True for a request of low priority: no user waits for it."""
        return self.request.generation.priority < 0 and not self.promoted

    @property
    def share_key(self) -> ShareKey:
        """The request's tenant, and the request with several choices that this one belongs to."""
        return self.request.generation.tenant, self.request.generation.choices_of

    @property
    def shares(self) -> bool:
        """True if the request's KV may be shared: taken from the prefix cache or another request,
        and given to them."""
        return self.request.generation.cache_prompt

    @property
    def sends(self) -> bool:
        """True if the request sends the KV of its prompt to another server and generates
        no answer."""
        return self.request.sends_from is not None

    @property
    def sends_to(self) -> int:
        """The end of the KV to send: the last token is left to the other server."""
        return self.n_prompt - 1

    @property
    def blocked(self) -> bool:
        """True while no step can bring the request on: it waits for a grammar, or for the reader of
        the KV that it sends."""
        return self.compilation is not None or (self.sends and self.n_kv >= self.sends_to)

    def cache_tokens(self, start: int = 0, stop: int | None = None) -> Tokens:
        """The tokens [start, stop) as the cache stores them."""
        return salted(self.tokens[start:stop], self.kv_salt, start)

    @property
    def n_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.n_prompt

    def ends_with(self, token: int, eog: frozenset[int]) -> bool:
        """True if `token` ends the answer: an end token of the model (`eog`), or one that the
        client named."""
        generation = self.request.generation
        ends = (token in eog and not generation.ignore_eos) or token in generation.stop_token_ids
        return ends and self.n_generated >= generation.min_tokens

    @property
    def pending(self) -> int:
        """Tokens without KV: 1 while decoding, more while prefilling."""
        return len(self.tokens) - self.n_kv

    @property
    def to_compute(self) -> int:
        """Tokens without KV that will not be imported from a cache."""
        coming = 0
        if self.restoring is not None:
            coming = self.restoring.in_place + self.restoring.plan.saved
        return len(self.tokens) - max(self.n_kv, coming)

    @property
    def prefilling(self) -> bool:
        """True until every known token but the newest has KV."""
        return self.pending > 1 or self.n_generated == 0

    @property
    def decodes_without_draft(self) -> bool:
        """True if the next step contains only the newest token."""
        n = len(self.tokens)
        return n - self.n_kv == 1 and n > self.n_prompt and not self.draft

    @property
    def drafts(self) -> bool:
        """True if the request's steps may contain drafts. Drafts change the number of rows of a
        step, and so the last bits of log-probabilities. So requests that need exact repeats get no
        drafts."""
        is_exact = self.request.generation.logprobs is not None and not self.shares
        return self.request.draft != "off" and not is_exact

    @property
    def running(self) -> bool:
        """True after the available prefix was restored: the request prefills or decodes."""
        return self.sequence is not None and self.restoring is None

    @property
    def gap(self) -> int | None:
        """The end of a gap in the cached prefix. The gap must be computed before more can be
        imported."""
        if self.restoring is not None:
            return self.restoring.computes_to
        return None

    @property
    def steppable(self) -> bool:
        """True if the request may be in the next step: it runs or has a gap to compute, and waits
        for nothing else."""
        return not self.blocked and (self.running or self.gap is not None)

    @property
    def until_checkpoint(self) -> int:
        """Tokens that may be prefilled before the next checkpoint must be taken, media start,
        or the next cached part is imported."""
        borders = [i.start for i in self.media]
        if self.sends:
            borders.append(self.sends_to)
        ahead = [
            c - self.n_kv for c in (*self.checkpoints, *borders, self.gap or 0) if c > self.n_kv
        ]
        return min([self.pending, *ahead])

    @property
    def medium(self) -> MediaSpan | None:
        """The media whose tokens come next in the prompt; None if text comes next."""
        return next((i for i in self.media if i.start <= self.n_kv < i.stop), None)

    def overview(self, state: str) -> dict[str, Any]:
        """Parameters and progress as plain values, without any text of the prompt."""
        sampling = self.request.generation.sampling
        return {
            "number": self.number,
            "tenant": self.share_key[0],
            "state": state,
            "prompt_tokens": self.n_prompt,
            "processed_tokens": min(self.n_kv, self.n_prompt),
            "cached_tokens": self.cached,
            "generated_tokens": self.n_generated,
            "max_tokens": self.max_tokens,
            "sampling": {name: getattr(sampling, name) for name in _REPORTED},
        }

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.n_prompt,
            completion_tokens=self.n_generated,
            cached_tokens=self.cached,
            accepted_draft_tokens=self.accepted_drafts,
            rejected_draft_tokens=self.rejected_drafts,
            cache_miss=self.miss,
            fetched_tokens=self.fetched_tokens,
            fetched_from=self.fetched_from,
        )

    def timings(self, now_s: float) -> Timings:
        first = self.first_token_s
        return Timings(
            queued_s=self.queued_s,
            prefill_s=self.prefill_s,
            decode_s=now_s - first if first is not None else 0.0,
            ttft_s=first - self.submitted_s if first is not None else 0.0,
            decode_steps=self.decode_steps,
        )


# Few texts have more characters per token.
_MAX_TOKEN_CHARS = 8


def running_request(
    request: Request,
    prompt: list[int],
    media: tuple[MediaSpan, ...],
    backend: Backend,
    submitted_s: float,
) -> RunningRequest:
    """The engine's state for a new `request`. Agents request 32,000 tokens whatever the context is;
    they get the room that is left."""
    generation = request.generation
    room = backend.info.n_ctx - len(prompt)

    def token_text(token: int) -> bytes:
        if token >= 0:
            return backend.token_bytes(token, special=True)
        return b""

    thinking = None
    if request.thinking is not None:
        thinking = ThinkingBudget(request.thinking, len(prompt), backend.tokenize, token_text)
    eog = {t for t in backend.info.eog_tokens if t < backend.info.n_vocab}
    min_length = 0
    if generation.min_tokens:
        min_length = len(prompt) + generation.min_tokens
    rules = TokenRules(
        min_length=min_length,
        end_tokens=tuple(eog | {t for t in generation.stop_token_ids if t < backend.info.n_vocab}),
        never=tuple(eog) if generation.ignore_eos else (),
        thinking=thinking,
        text=token_text,
    )
    constraint = None
    if request.constraint is not None:
        inserted = partial(_inserted_tokens, backend)
        constraint = AnswerConstraint(
            request.constraint, token_text, inserted, backend.info.eog_tokens
        )
    visible_bytes = partial(backend.token_bytes, special=request.render_control)
    job = RunningRequest(
        request=request,
        tokens=list(prompt),
        n_prompt=len(prompt),
        max_tokens=room,
        sampler=Sampler(generation.sampling, constraint, rules),
        text=TextStream(visible_bytes, generation.stop, token_text, request.hidden),
        submitted_s=submitted_s,
        media=media,
        adapters=set_of(backend.info, generation.adapters),
        kv_salt=kv_salt(backend.info, generation.adapters, generation.salt),
    )
    job.sent_to = request.sends_from or 0
    if generation.max_tokens is not None:
        job.max_tokens = min(room, generation.max_tokens)
    if generation.prediction:
        # An answer can't be longer than the context. Megabytes would take seconds here.
        prediction = generation.prediction[: _MAX_TOKEN_CHARS * backend.info.n_ctx]
        job.predicted = backend.tokenize(prediction, special=False)
    if generation.loops is not None:
        job.loop_guard = LoopGuard(generation.loops)
    return job


def _inserted_tokens(backend: Backend, text: str) -> list[int]:
    """The tokens of a text that is inserted into an answer."""
    return tokens_within(backend, text.encode(), special=True) or backend.tokenize(text)


class LoopGuard:
    """Detects a periodic answer: its last tokens repeat one pattern of min_pattern_size to
    max_pattern_size tokens min_count times in a row (vLLM's `repetition_detection`). Tokens of the
    prompt do not count."""

    def __init__(self, limits: LoopLimits) -> None:
        self._max_size = limits.max_pattern_size
        sizes = np.arange(1, self._max_size + 1)
        # For each pattern size: how many tokens in a row equal the token that many positions
        # before, and how many make a loop.
        self._runs = np.zeros(self._max_size, dtype=np.int64)
        self._needed = sizes * (limits.min_count - 1)
        self._needed[: limits.min_pattern_size - 1] = np.iinfo(np.int64).max
        # The previous tokens, newest first.
        self._before = np.full(self._max_size, -1, dtype=np.int64)

    def loops(self, token: int) -> bool:
        """Add the answer's next token. Returns True if it completes a loop."""
        self._runs += 1
        self._runs[self._before != token] = 0
        self._before[1:] = self._before[:-1].copy()
        self._before[0] = token
        return bool((self._runs >= self._needed).any())
