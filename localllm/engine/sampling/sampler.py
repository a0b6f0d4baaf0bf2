"""The sampler of one request: from a row of logits to its next token.

The order is llama.cpp's default: penalties and DRY (penalties.py), then the bans of grammars,
minimum lengths and thinking budgets, then the filters and the temperature (filters.py), and a
draw.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from localllm.engine.messages import Sampling, ThinkingLimit
from localllm.engine.sampling.constraint import AnswerConstraint
from localllm.engine.sampling.filters import candidates, distribution, without_nan, xtc_applies
from localllm.engine.sampling.penalties import Penalties, TokenBytes
from localllm.engine.sampling.rejection import Distribution, rejection_sample
from localllm.engine.sampling.row import (
    GreatestLogits,
    Row,
    base_of,
    block_sums,
    buffer,
    exp_weights,
)
from localllm_backends.contract import MAX_SAMPLED_TOP_K, SampleSpec


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Rules for the next token that depend on the position in one request's text.

    `min_length`: none of `end_tokens` may come before this many tokens (prompt included).
    `never`: end tokens that may not come at all.
    `thinking`: a thinking budget, which may force the next token.
    `text`: spells a token.
    """

    min_length: int = 0
    end_tokens: tuple[int, ...] = ()
    never: tuple[int, ...] = ()
    thinking: ThinkingBudget | None = None
    text: TokenBytes | None = None

    def banned(self, length: int) -> tuple[int, ...]:
        """The tokens that may not come after `length` tokens, as long as any other token may."""
        if length < self.min_length:
            return self.end_tokens
        return self.never


class Sampler:
    """Chooses the tokens of one request. The same seed and logits give the same choices."""

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
        # Numbers drawn from the stream and sent to a backend, but not used yet.
        self._uniforms: list[float] = []
        self._penalties = Penalties(sampling, self._rules.text)
        self._prepared_spec: SampleSpec | None = None

    @property
    def constrained(self) -> bool:
        """True if a grammar restricts the next token."""
        return self.constraint is not None and self.constraint.active

    def _banned(self, length: int) -> tuple[int, ...]:
        """The tokens that may not come after `length` tokens. Within a call only its grammar
        decides.
        """
        if self.constraint is not None and self.constraint.in_call:
            return ()
        return self._rules.banned(length)

    def _may_end_thought(self) -> bool:
        """True if a thinking budget may force the next token: no call has ended the reasoning."""
        if self.constraint is None:
            return True
        return not (self.constraint.active or self.constraint.call_ended_reasoning)

    def takes_argmax(self, length: int, ahead: int = 0) -> bool:
        """True if the next choice is simply the greatest logit, so the rows are not needed here.

        This holds after `length` tokens and after up to `ahead` more, if the tokens are allowed
        (`allows`).
        """
        if self.sampling.temperature > 0 or self._penalties.active or self.constrained:
            return False
        budget = self._rules.thinking
        return budget is None or not budget.may_force(length, ahead)

    def allows(self, tokens: Sequence[int], length: int) -> bool:
        """True if each of `tokens` may come at its position, the first of them after `length`
        tokens.
        """
        return not any(token in self._banned(at) for at, token in enumerate(tokens, length))

    def sample_spec(self, history: Sequence[int]) -> SampleSpec | None:
        """Parameters with which a backend may sample the token after `history`.

        The backend may also sample the following token if that does not depend on this one through
        a grammar or a repetition. Returns None if the row is needed here, or if the choice is the
        greatest logit anyway.
        """
        s = self.sampling
        n = len(history)
        if self._is_ready():
            return self._prepared_spec
        if self._needs_row(n):
            return None
        uniform = following = 0.0
        if s.temperature > 0:
            uniform, following = self._next_uniforms(2)
        dry_bias = self._penalties.repetitions(history)
        allowed = None
        if self.constraint is not None:
            allowed = self.constraint.allowed()
        return SampleSpec(
            s.temperature,
            s.top_k,
            s.top_p,
            s.min_p,
            uniform,
            following if dry_bias is None and allowed is None else None,
            self._banned(n),
            self._penalties.seen(history),
            self._penalties.bias,
            dry_bias,
            allowed,
        )

    def _is_ready(self) -> bool:
        """Whether the spec that was made ahead is still valid."""
        if self._prepared_spec is None or not self._uniforms or self.constrained:
            return False
        return self._prepared_spec.uniform == self._uniforms[0]

    def look_ahead(self, spec: SampleSpec) -> None:
        """Make the spec for the token after the one that `spec`, the last one, will sample.

        It is made only if it does not depend on that token.
        """
        rules = self._rules
        known = self._uniforms[:1] == [spec.uniform] and spec.next_uniform is not None
        if known and spec.seen is None and not rules.min_length and rules.thinking is None:
            _, uniform, following = self._next_uniforms(3)
            self._prepared_spec = replace(spec, uniform=uniform, next_uniform=following)

    def _needs_row(self, length: int) -> bool:
        """Whether the choice after `length` tokens needs the row here, or is the greatest logit
        anyway.
        """
        s = self.sampling
        budget = self._rules.thinking
        if s.temperature > 0 and (
            s.typical_p < 1.0 or xtc_applies(s) or s.top_k > MAX_SAMPLED_TOP_K
        ):
            return True
        if self.constraint is not None and self.constraint.active:
            # If a call may end here, the model may have to choose again.
            return self.constraint.can_continue_unconstrained
        return self.takes_argmax(length) or (budget is not None and budget.may_force(length))

    def _next_uniforms(self, n: int) -> Sequence[float]:
        """The next `n` numbers of the stream. They remain the next ones until they are used."""
        while len(self._uniforms) < n:
            self._uniforms.append(float(self._random.random()))
        return self._uniforms[:n]

    def sampled(self) -> None:
        """Record that a backend chose a token with the last `sample_spec`."""
        if self.sampling.temperature > 0:
            self.uniform()

    def accept(self, token: int) -> int:
        """Take the token that a backend chose, and return the token that counts."""
        if self.constraint is None:
            return token
        accepted = self.constraint.accept(token)
        return token if accepted is None else accepted

    def prepared(self, logits: Row, history: Sequence[int]) -> Row:
        """The logits after bias, penalties and constraint, for any `history`. The input is not
        changed.
        """
        return self._prepared(logits, history, Penalties(self.sampling, self._rules.text)).copy()

    def _prepared(self, logits: Row, history: Sequence[int], penalties: Penalties) -> Row:
        """The same in a buffer, or the row itself if it does not change.

        `penalties` must follow one growing sequence.
        """
        rules = self._rules
        banned = [t for t in self._banned(len(history)) if t < len(logits)]
        forced = None
        if rules.thinking is not None and self._may_end_thought():
            forced = rules.thinking.forced(history)
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
            banned_logits = row[banned]
            row[banned] = -np.inf
            # If no other token may follow, the ban does not apply.
            if row.max() == -np.inf:
                row[banned] = banned_logits
        return row

    def choose(self, logits: Row, history: Sequence[int]) -> int:
        """The next token after `history`, given its logits (float32 [n_vocab]).

        `history` must continue that of the last call.
        """
        row = self._prepared(logits, history, self._penalties)
        if self.sampling.temperature > 0:
            token = candidates(row, self.sampling).draw(self.uniform())
        else:
            token = int(row.argmax())
            if math.isnan(row[token]):
                token = int(without_nan(row).argmax())
        return self._accepted(token, logits, history)

    def _accepted(self, token: int, logits: Row, history: Sequence[int]) -> int:
        """The token that counts after `token` was chosen. A new token is chosen if necessary."""
        if self.constraint is None:
            return token
        accepted = self.constraint.accept(token)
        if accepted is None:
            return self.choose(logits, history)
        return accepted

    def log_probabilities(
        self, logits: Row, token: int, n: int, also: Sequence[int] = ()
    ) -> tuple[float, list[tuple[int, float]]]:
        """Natural-log probabilities of the model, before any change or filter.

        Returns that of `token`, and pairs of token and log probability for the `n` greatest and
        `also`.
        """
        top = GreatestLogits(logits)
        if not math.isfinite(top.greatest):
            top = GreatestLogits(without_nan(logits))
        base = base_of(top.greatest)
        weights = exp_weights(top.row, base, 1.0, buffer("weights", len(logits)))
        log_total = base + math.log(float(block_sums(weights).sum()))
        best = [*(top.ranked(n) if n else ()), *also]
        return float(logits[token]) - log_total, [
            (int(t), float(logits[t]) - log_total) for t in best
        ]

    def verify(
        self, logits: Row, history: Sequence[int], drafted: int, drawn_from: Distribution
    ) -> tuple[int, bool]:
        """Return (next token, whether it is `drafted`) for a token drafted from `drawn_from`.

        It uses rejection sampling against the distribution of `choose`. Needs temperature > 0.
        """
        p = distribution(self._prepared(logits, history, self._penalties), self.sampling)
        token, accepted = rejection_sample(p, drawn_from, drafted, self.uniform(), self.uniform())
        return self._accepted(token, logits, history), accepted

    def uniform(self) -> float:
        """One number in [0, 1) from the request's own stream."""
        if self._uniforms:
            return self._uniforms.pop(0)
        return float(self._random.random())


# Models open their reasoning in the first words of the answer, or never. The opening is searched
# for only in this many tokens.
_OPENS_WITHIN = 16


class ThinkingBudget:
    """The thinking budget of one request.

    When the budget is spent, the model's own end-of-thought text is forced, token by token.

    A forced token depends only on the tokens before it. So a drafted token is verified against
    exactly the distribution it would have been drawn from. Thinking begins after the prompt if the
    prompt opened it, else after the opening marker at the beginning of the answer.
    """

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
        """False if no token at `length` or up to `ahead` after it can be forced."""
        return self._first <= length + ahead and length <= self._last

    def forced(self, history: Sequence[int]) -> int | None:
        """The token that must follow `history` (prompt and answer so far); None if the model may
        choose.
        """
        if not self.may_force(len(history)):
            return None
        begin = self._begin(history)
        if begin is None:
            return None
        end = begin + self._limit.tokens
        n_forced = len(history) - end
        if n_forced < 0:
            return None
        reasoning = b"".join(self._text(t) for t in history[begin:end])
        if self._closing in reasoning:
            return None
        # If the model is cut off within its closing marker, only the rest of the marker is forced.
        rest = self._closing[_overlap(reasoning, self._closing) :].decode("utf-8", "replace")
        ending = self._tokenize(rest + self._limit.after)
        if n_forced < len(ending):
            return ending[n_forced]
        return None

    def _begin(self, history: Sequence[int]) -> int | None:
        if self._limit.opened:
            return self._n_prompt
        text = b""
        for i, token in enumerate(history[self._n_prompt : self._n_prompt + _OPENS_WITHIN]):
            text = (text + self._text(token)).lstrip()
            if text.startswith(self._opening):
                return self._n_prompt + i + 1
            if not self._opening.startswith(text):
                return None
        return None


def _overlap(text: bytes, marker: bytes) -> int:
    """The length of the end of `text` that begins `marker`, in bytes."""
    return next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)
