"""From logits to a token: the sampling chain as one pure function over numpy arrays, and the per-request sampler.

The chain's order is llama.cpp's default: penalties, top_k, typical_p, top_p, min_p, temperature, draw. Filters work on
probabilities before temperature, so a high temperature never lets in what the filters kept out.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.engine.messages import Sampling

Row = NDArray[np.float32]


class Constraint(Protocol):
    """Something that forbids tokens (a grammar). `apply` sets forbidden logits to -inf in place."""

    def apply(self, logits: Row) -> None:
        """Forbid what can't come next."""
        ...

    def accept(self, token: int) -> None:
        """A token was chosen."""
        ...

    def acceptable(self, tokens: Seq[int]) -> int:
        """How many of `tokens` could follow in a row, without advancing."""
        ...

    def forced(self) -> list[int]:
        """Tokens that must come next whatever the logits say; [] where there is a choice."""
        ...

    @property
    def finished(self) -> bool:
        """True when nothing but the end may follow."""
        ...


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sparse distribution: `ids` with `probs` (float64, summing to 1), most probable first."""

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    def prob(self, token: int) -> float:
        """Probability of `token` (0.0 where filtered out)."""
        hit = np.flatnonzero(self.ids == token)
        return float(self.probs[hit[0]]) if hit.size else 0.0

    def draw(self, uniform: float) -> int:
        """The token at `uniform` in [0, 1) of the cumulative distribution."""
        index = int(np.searchsorted(np.cumsum(self.probs), uniform, side="right"))
        return int(self.ids[min(index, len(self.ids) - 1)])


def penalise(logits: Row, sampling: Sampling, history: Seq[int]) -> Row:
    """Logits after logit_bias and the repeat, presence and frequency penalties over the last `repeat_last_n` tokens.

    Returns `logits` itself when nothing applies. repeat_penalty divides positive logits and multiplies negative ones
    (llama.cpp, after CTRL: arXiv 1909.05858); presence and frequency subtract as OpenAI documents them.
    """
    penalties = sampling.repeat_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
    if not sampling.logit_bias and not penalties:
        return logits
    out = logits.astype(np.float32, copy=True)
    for token, bias in sampling.logit_bias.items():
        if 0 <= token < len(out):
            out[token] = -np.inf if bias <= -100 else out[token] + bias
    if penalties:
        last = history if sampling.repeat_last_n < 0 else history[max(0, len(history) - sampling.repeat_last_n) :]
        for token, count in Counter(last).items():
            value = out[token]
            value = value / sampling.repeat_penalty if value > 0 else value * sampling.repeat_penalty
            out[token] = value - sampling.presence_penalty - count * sampling.frequency_penalty
    return out


def distribution(logits: Row, sampling: Sampling) -> Distribution:
    """The distribution a token is drawn from, after every filter and the temperature (> 0).

    logits: float32 [n_vocab], already penalised and constrained; -inf is never drawn.
    """
    n = len(logits)
    k = min(n, sampling.top_k) if sampling.top_k > 0 else n
    if k < n:
        ids = np.argpartition(logits, n - k)[n - k :]
    elif sampling.top_p < 1.0 or sampling.typical_p < 1.0 or sampling.min_p > 0.0:
        # Nothing further than 40 nats below the best survives float32 softmax; sorting the rest is cheap.
        ids = np.flatnonzero(logits > logits.max() - 40.0)
    else:
        ids = np.flatnonzero(np.isfinite(logits))
    values = logits[ids].astype(np.float64)
    order = np.argsort(-values, kind="stable")
    ids, values = ids[order], values[order]
    finite = int(np.count_nonzero(np.isfinite(values)))
    ids, values = ids[: max(1, finite)], values[: max(1, finite)]
    probs = _softmax(values)
    if sampling.typical_p < 1.0:
        ids, values, probs = _typical(ids, values, probs, sampling.typical_p)
    if sampling.top_p < 1.0:
        keep = int(np.searchsorted(np.cumsum(probs), sampling.top_p, side="left")) + 1
        ids, values, probs = ids[:keep], values[:keep], _softmax(values[:keep])
    if sampling.min_p > 0.0:
        keep = max(1, int(np.count_nonzero(probs >= sampling.min_p * probs[0])))
        ids, values = ids[:keep], values[:keep]
    return Distribution(ids, _softmax(values / sampling.temperature))


def log_softmax(logits: Row) -> NDArray[np.float64]:
    """Natural-log probabilities of the whole row (float64 [n_vocab])."""
    values = logits.astype(np.float64)
    values -= values.max()
    result: NDArray[np.float64] = values - math.log(float(np.exp(values).sum()))
    return result


def _softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    exp = np.exp(values - values.max())
    result: NDArray[np.float64] = exp / exp.sum()
    return result


def _typical(
    ids: NDArray[np.int64], values: NDArray[np.float64], probs: NDArray[np.float64], mass: float
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Locally typical sampling (arXiv 2202.00666): keep what is nearest to the entropy until `mass` is reached."""
    surprise = -np.log(np.maximum(probs, 1e-300))
    order = np.argsort(np.abs(surprise - float((probs * surprise).sum())), kind="stable")
    keep = int(np.searchsorted(np.cumsum(probs[order]), mass, side="left")) + 1
    chosen = np.sort(order[:keep])
    return ids[chosen], values[chosen], _softmax(values[chosen])


class Sampler:
    """Chooses the tokens of one request. The same seed gives the same choices for the same logits."""

    def __init__(self, sampling: Sampling, constraint: Constraint | None = None) -> None:
        self.sampling = sampling
        self.constraint = constraint
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        self._random = np.random.Generator(np.random.PCG64(seed & (2**63 - 1)))

    @property
    def greedy(self) -> bool:
        """True when the best logit is always the choice and nothing changes the logits."""
        s = self.sampling
        plain = s.repeat_penalty == 1.0 and not s.presence_penalty and not s.frequency_penalty and not s.logit_bias
        return s.temperature <= 0 and plain and self.constraint is None

    def prepared(self, logits: Row, history: Seq[int]) -> Row:
        """Logits after bias, penalties and constraint; the input is never written to."""
        out = penalise(logits, self.sampling, history)
        if self.constraint is not None:
            out = out.copy() if out is logits else out
            self.constraint.apply(out)
        return out

    def choose(self, logits: Row, history: Seq[int]) -> int:
        """The next token after `history` (token ids so far), given its logits (float32 [n_vocab])."""
        row = self.prepared(logits, history)
        token = int(row.argmax()) if self.sampling.temperature <= 0 else self.draw(distribution(row, self.sampling))
        if self.constraint is not None:
            self.constraint.accept(token)
        return token

    def verify(self, logits: Row, history: Seq[int], drafted: int, drawn_from: Distribution) -> tuple[int, bool]:
        """(next token, whether it is `drafted`) for a token drafted from `drawn_from`: maximal coupling with the
        distribution `choose` would draw from. Needs temperature > 0."""
        from localllm.engine.speculation.acceptance import couple

        p = distribution(self.prepared(logits, history), self.sampling)
        token, accepted = couple(p, drawn_from, drafted, self.uniform(), self.uniform())
        if self.constraint is not None:
            self.constraint.accept(token)
        return token, accepted

    def draw(self, dist: Distribution) -> int:
        """One token from `dist`."""
        return dist.draw(float(self._random.random()))

    def uniform(self) -> float:
        """One number in [0, 1) from the request's own stream."""
        return float(self._random.random())
