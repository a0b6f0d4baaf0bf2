"""The sampler of one request: from a row of logits to its next token.

The chain's order is llama.cpp's default: penalties and DRY (penalties.py), then what grammars,
minimum lengths and thinking budgets forbid, then the filters and the temperature (filters.py), and
a draw.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from localllm.engine.messages import Sampling, ThinkingLimit
from localllm.engine.sampling.constraint import AnswerConstraint
from localllm.engine.sampling.filters import candidates, distribution, excludes, readable
from localllm.engine.sampling.penalties import Penalties, TokenBytes
from localllm.engine.sampling.rejection import Distribution, rejection_sample
from localllm.engine.sampling.row import Row, Top, base_of, block_sums, buffer, weigh
from localllm_backends.contract import MAX_SAMPLED_TOP_K, SampleSpec


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What one request's place in its text says about the next token: none of `end_tokens` comes
    before `min_length` tokens (prompt included), none of `never` (some of those) at all, and
    `thought` may force one. `text` spells a token."""

    min_length: int = 0
    end_tokens: tuple[int, ...] = ()
    never: tuple[int, ...] = ()
    thought: ThinkingBudget | None = None
    text: TokenBytes | None = None

    def banned(self, length: int) -> tuple[int, ...]:
        """What may not come behind `length` tokens, as long as anything else may."""
        if length < self.min_length:
            return self.end_tokens
        return self.never


class Sampler:
    """Chooses the tokens of one request. The same seed gives the same choices for the same
    logits."""

    def __init__(
        self,
        sampling: Sampling,
        constraint: AnswerConstraint | None = None,
        rules: TokenRules | None = None,
    ) -> None:
        self.sampling = sampling
        self.constraint = constraint
        self._rules = rules if rules is not None else TokenRules()
        if sampling.seed is not None:
            seed = sampling.seed
        else:
            seed = secrets.randbits(63)
        self._random = np.random.Generator(np.random.PCG64(seed & (2**63 - 1)))
        # What was taken from the stream and told to a backend, but not used yet.
        self._uniforms: list[float] = []
        self._penalties = Penalties(sampling, self._rules.text)
        self._ready: SampleSpec | None = None

    @property
    def constrained(self) -> bool:
        """True if a grammar decides on the next token."""
        return self.constraint is not None and self.constraint.active

    def _banned(self, length: int) -> tuple[int, ...]:
        """The tokens that may not come behind `length` tokens. Within a call its grammar alone
        decides."""
        if self.constraint is not None and self.constraint.in_call:
            return ()
        return self._rules.banned(length)

    def takes_argmax(self, length: int, ahead: int = 0) -> bool:
        """True when the best logits as they are will be the choices behind `length` tokens, and
        behind up to `ahead` more, wherever they are allowed (`allows`): the rows themselves need
        not be looked at."""
        if self.sampling.temperature > 0 or self._penalties.active or self.constrained:
            return False
        thought = self._rules.thought
        return thought is None or not thought.may_force(length, ahead)

    def allows(self, tokens: Sequence[int], length: int) -> bool:
        """True when each of `tokens` may come in its place, the first of them behind `length`
        tokens."""
        return not any(token in self._banned(at) for at, token in enumerate(tokens, length))

    def sample_spec(self, history: Sequence[int]) -> SampleSpec | None:
        """How a backend may sample the token behind `history`, and begin with the next one where
        that does not depend on this one by a grammar or a repetition; None where that takes a look
        here, or where the best logit is the choice anyway."""
        s = self.sampling
        n = len(history)
        if self._is_ready():
            return self._ready
        if self._needs_row(n):
            return None
        uniform = following = 0.0
        if s.temperature > 0:
            uniform, following = self._next_uniforms(2)
        reduced = self._penalties.repetitions(history)
        allowed = None
        if self.constraint is not None:
            allowed = self.constraint.allowed()
        return SampleSpec(
            s.temperature,
            s.top_k,
            s.top_p,
            s.min_p,
            uniform,
            following if reduced is None and allowed is None else None,
            self._banned(n),
            self._penalties.seen(history),
            self._penalties.bias,
            reduced,
            allowed,
        )

    def _is_ready(self) -> bool:
        """Whether the spec that was made ahead still holds."""
        if self._ready is None or not self._uniforms or self.constrained:
            return False
        return self._ready.uniform == self._uniforms[0]

    def look_ahead(self, spec: SampleSpec) -> None:
        """Make the spec of the token behind the one that `spec`, the last one, will sample, where
        it does not depend on that."""
        rules = self._rules
        known = self._uniforms[:1] == [spec.uniform] and spec.next_uniform is not None
        if known and spec.seen is None and not rules.min_length and rules.thought is None:
            _, uniform, following = self._next_uniforms(3)
            self._ready = replace(spec, uniform=uniform, next_uniform=following)

    def _needs_row(self, length: int) -> bool:
        """Whether the choice behind `length` tokens takes a look at the row here, or is the best
        logit anyway."""
        s = self.sampling
        thought = self._rules.thought
        if s.temperature > 0 and (s.typical_p < 1.0 or excludes(s) or s.top_k > MAX_SAMPLED_TOP_K):
            return True
        if self.constraint is not None and self.constraint.active:
            # Where a call may end, the choice may have to be made again.
            return self.constraint.may_go_on_freely
        return self.takes_argmax(length) or (thought is not None and thought.may_force(length))

    def _next_uniforms(self, n: int) -> Sequence[float]:
        """The next `n` draws, which stay the next ones until they are used."""
        while len(self._uniforms) < n:
            self._uniforms.append(float(self._random.random()))
        return self._uniforms[:n]

    def sampled(self) -> None:
        """A backend chose a token as the last `sample_spec` says."""
        if self.sampling.temperature > 0:
            self.uniform()

    def accept(self, token: int) -> int:
        """Take the token that a backend chose; returns the one that counts."""
        if self.constraint is None:
            return token
        accepted = self.constraint.accept(token)
        return token if accepted is None else accepted

    def prepared(self, logits: Row, history: Sequence[int]) -> Row:
        """Logits after bias, penalties and constraint, behind any `history`; the input is never
        written to."""
        return self._prepared(logits, history, Penalties(self.sampling, self._rules.text)).copy()

    def _prepared(self, logits: Row, history: Sequence[int], penalties: Penalties) -> Row:
        """The same in a buffer, or the row itself where nothing changes it. `penalties` follow one
        growing line."""
        rules = self._rules
        banned = [t for t in self._banned(len(history)) if t < len(logits)]
        forced = None
        if rules.thought is not None and not self.constrained:
            forced = rules.thought.forced(history)
        if not (penalties.active or banned or self.constrained or forced is not None):
            return logits
        row = buffer("prepared", len(logits))
        if forced is not None:
            row.fill(-np.inf)
            row[forced] = 0.0
            return row
        np.copyto(row, logits)
        penalties.apply(row, history)
        if self.constraint is not None:
            self.constraint.apply(row)
        if banned:
            before = row[banned]
            row[banned] = -np.inf
            # As it was where nothing else may follow.
            if row.max() == -np.inf:
                row[banned] = before
        return row

    def choose(self, logits: Row, history: Sequence[int]) -> int:
        """The next token after `history` (token ids so far, those of the last call and what came
        since), given its logits (float32 [n_vocab])."""
        row = self._prepared(logits, history, self._penalties)
        if self.sampling.temperature > 0:
            token = candidates(row, self.sampling).draw(self.uniform())
        else:
            token = int(row.argmax())
            if math.isnan(row[token]):
                token = int(readable(row).argmax())
        return self._taken(token, logits, history)

    def _taken(self, token: int, logits: Row, history: Sequence[int]) -> int:
        """The token that counts of the one that was chosen, which may be chosen again."""
        if self.constraint is None:
            return token
        accepted = self.constraint.accept(token)
        if accepted is None:
            return self.choose(logits, history)
        return accepted

    def log_probabilities(
        self, logits: Row, token: int, n: int, also: Sequence[int] = ()
    ) -> tuple[float, list[tuple[int, float]]]:
        """Natural-log probabilities as the model has them, before anything is changed or filtered
        out: that of `token`, and with their tokens the `n` greatest and those of `also`."""
        top = Top(logits)
        if not math.isfinite(top.greatest):
            top = Top(readable(logits))
        base = base_of(top.greatest)
        weights = weigh(top.row, base, 1.0, buffer("weights", len(logits)))
        log_total = base + math.log(float(block_sums(weights).sum()))
        best = [*(top.ranked(n) if n else ()), *also]
        return float(logits[token]) - log_total, [
            (int(t), float(logits[t]) - log_total) for t in best
        ]

    def verify(
        self, logits: Row, history: Sequence[int], drafted: int, drawn_from: Distribution
    ) -> tuple[int, bool]:
        """(next token, whether it is `drafted`) for a token drafted from `drawn_from`: rejection
        sampling against the distribution `choose` would draw from. Needs temperature > 0."""
        p = distribution(self._prepared(logits, history, self._penalties), self.sampling)
        token, accepted = rejection_sample(p, drawn_from, drafted, self.uniform(), self.uniform())
        return self._taken(token, logits, history), accepted

    def uniform(self) -> float:
        """One number in [0, 1) from the request's own stream."""
        if self._uniforms:
            return self._uniforms.pop(0)
        return float(self._random.random())


# Models open their reasoning with the answer's first words, if at all: behind that many tokens none
# is looked for.
_OPENS_WITHIN = 16


class ThinkingBudget:
    """The end of one request's thinking budget: when it is spent, the model's own end-of-thought
    text is forced, token by token.

    What is forced at a place depends on the tokens before it alone, so that a drafted token is
    verified against the very distribution it would have been drawn from. Thinking begins behind the
    prompt where that opened it, else behind the opening marker at the answer's beginning."""

    def __init__(
        self,
        limit: ThinkingLimit,
        n_prompt: int,
        tokenize: Callable[[str], list[int]],
        text: Callable[[int], bytes],
    ) -> None:
        self._limit = limit
        self._n_prompt = n_prompt
        self._tokenize = tokenize
        self._text = text
        self._opening = limit.opening.encode()
        self._closing = limit.closing.encode()
        longest = len(tokenize(limit.closing + limit.after)) + len(self._closing)
        self._first = n_prompt + limit.tokens
        self._last = self._first + longest + (0 if limit.opened else _OPENS_WITHIN)

    def may_force(self, length: int, ahead: int = 0) -> bool:
        """False where none of the tokens at `length` and up to `ahead` behind it can be forced."""
        return self._first <= length + ahead and length <= self._last

    def forced(self, history: Sequence[int]) -> int | None:
        """The token that must follow `history` (prompt and answer so far); None where the model may
        choose."""
        if not self.may_force(len(history)):
            return None
        begin = self._begin(history)
        if begin is None:
            return None
        end = begin + self._limit.tokens
        at = len(history) - end
        if at < 0:
            return None
        thought = b"".join(self._text(t) for t in history[begin:end])
        if self._closing in thought:
            return None
        # A model that was cut off in the middle of its closing marker is given the rest of it.
        rest = self._closing[_overlap(thought, self._closing) :].decode("utf-8", "replace")
        ending = self._tokenize(rest + self._limit.after)
        if at < len(ending):
            return ending[at]
        return None

    def _begin(self, history: Sequence[int]) -> int | None:
        if self._limit.opened:
            return self._n_prompt
        said = b""
        for i, token in enumerate(history[self._n_prompt : self._n_prompt + _OPENS_WITHIN]):
            said = (said + self._text(token)).lstrip()
            if said.startswith(self._opening):
                return self._n_prompt + i + 1
            if not self._opening.startswith(said):
                return None
        return None


def _overlap(text: bytes, marker: bytes) -> int:
    """Bytes at the end of `text` that begin `marker`."""
    return next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)
