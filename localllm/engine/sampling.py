"""From logits to a token: the sampling chain as one pure function over numpy arrays, and the per-request sampler.

The chain's order is llama.cpp's default: penalties, DRY, top_k, typical_p, top_p, min_p, XTC, temperature, draw. Filters
work on probabilities before temperature, so a high temperature never lets in what the filters kept out.
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

from localllm.engine.coupling import Distribution, couple
from localllm.engine.dry import TokenBytes, penalise_repetitions
from localllm.engine.messages import Sampling
from localllm.engine.thought_limit import ThoughtLimit

Row = NDArray[np.float32]

# How many candidates are put in order before a filter is asked whether it wants more.
_HEAD = 512


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

    logits: float32 [n_vocab], already penalised and constrained; -inf is never drawn. Equal logits give an equal
    distribution, order included, whatever else the row holds: a seed then draws the same token.
    """
    excludes = sampling.xtc_probability > 0.0 and sampling.xtc_threshold <= 0.5
    cuts = sampling.top_p < 1.0 or sampling.min_p > 0.0
    if 0 < sampling.top_k < len(logits):
        ids, ranked = best_ids(logits, sampling.top_k), sampling.top_k
    else:
        # Nothing further than 40 nats below the best survives a filter over a float32 softmax.
        least = logits.max() - 40.0 if cuts or sampling.typical_p < 1.0 else -np.inf
        ids = np.flatnonzero(logits > least)
        ids, ranked = _head_first(logits, ids) if sampling.typical_p >= 1.0 else (_by_rank(logits, ids), len(ids))
    if not len(ids):
        return Distribution(np.array([logits.argmax()]), np.ones(1))
    values = logits[ids].astype(np.float64)
    if sampling.typical_p < 1.0:
        ids, values = _typical(ids, values, sampling.typical_p)
    if cuts:
        keep = _survivors(values, sampling)
        if keep > ranked:
            ids = _by_rank(logits, np.sort(ids))
            values = logits[ids].astype(np.float64)
            keep = _survivors(values, sampling)
        ids, values = ids[:keep], values[:keep]
    return _without_top_choices(ids, values, sampling) if excludes else _drawn(ids, values, sampling)


def _drawn(ids: NDArray[np.int64], values: NDArray[np.float64], sampling: Sampling) -> Distribution:
    return Distribution(ids, _softmax(values / sampling.temperature))


def _without_top_choices(ids: NDArray[np.int64], values: NDArray[np.float64], sampling: Sampling) -> Distribution:
    """XTC ("exclude top choices"): with xtc_probability all tokens of at least xtc_threshold but the least probable of
    them are left out.

    Whether they are is not drawn here: this is the mixture of both cases, which one draw then follows exactly, and
    which a drafted token can be verified against like any other distribution.
    """
    order = np.argsort(-values, kind="stable")
    excluded = order[: max(0, int(np.count_nonzero(_softmax(values) >= sampling.xtc_threshold)) - 1)]
    whole = _drawn(ids, values, sampling)
    if not len(excluded):
        return whole
    rest = values / sampling.temperature
    rest[excluded] = -np.inf
    p = min(1.0, sampling.xtc_probability)
    return Distribution(ids, (1.0 - p) * whole.probs + p * _softmax(rest))


def best_ids(logits: Row, k: int) -> NDArray[np.int64]:
    """Ids of the `k` (> 0) greatest logits above -inf, greatest first and the lower id first among equals."""
    width = len(logits) // (4 * k)
    least = -np.inf
    if width >= 4:
        # k pieces of the row peak at `least` or above, so the k greatest do too, and seldom much else: a comparison
        # with it costs a tenth of a partition, which moreover needs milliseconds for a row that is mostly -inf.
        pieces = len(logits) // width
        peaks = logits[: pieces * width].reshape(pieces, width).max(axis=1)
        least = np.partition(peaks, pieces - k)[pieces - k]
    ids = np.flatnonzero(logits >= least if least > -np.inf else logits > -np.inf)
    if len(ids) > 4 * _HEAD and len(ids) > k:
        found = logits[ids]
        ids = ids[found >= np.partition(found, len(ids) - k)[len(ids) - k]]
    return _by_rank(logits, ids)[:k]


def _by_rank(logits: Row, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """`ids` (ascending) by logit, greatest first; among equals the lower id."""
    if len(ids) <= 4 * _HEAD:
        return ids[np.argsort(-logits[ids], kind="stable")]
    # One integer holds both, half as long to sort: an IEEE float's bits count upwards for positive numbers (whose sign
    # bit is 0) and downwards for negative ones, and here the greatest must come first. Adding 0 makes -0 one with 0.
    bits = (logits[ids] + np.float32(0)).view(np.uint32)
    rank = np.where(bits >> 31, bits, bits ^ np.uint32(0x7FFFFFFF)).astype(np.uint64) << np.uint64(32)
    order = np.sort(rank | ids.astype(np.uint64)) & np.uint64(0xFFFFFFFF)
    return order.astype(np.int64)


def _head_first(logits: Row, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """`ids` (ascending) with the best of them in front, ranked, and how many those are; the rest stay as they are:
    filters rarely look further, and sorting a whole vocabulary takes as long as a small model's step."""
    if len(ids) <= 4 * _HEAD:
        return _by_rank(logits, ids), len(ids)
    head = best_ids(logits, _HEAD)
    rest = np.ones(len(logits), dtype=bool)
    rest[head] = False
    return np.concatenate([head, ids[rest[ids]]]), len(head)


def _survivors(values: NDArray[np.float64], sampling: Sampling) -> int:
    """How many of `values` (greatest first) top_p and then min_p leave; at least one."""
    probs = _softmax(values)
    keep = len(values)
    if sampling.top_p < 1.0:
        keep = min(keep, int(np.searchsorted(np.cumsum(probs), sampling.top_p, side="left")) + 1)
    if sampling.min_p > 0.0:
        keep = min(keep, int(np.count_nonzero(probs >= sampling.min_p * probs[0])))
    return max(1, keep)


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
    ids: NDArray[np.int64], values: NDArray[np.float64], mass: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Locally typical sampling (arXiv 2202.00666): keep what is nearest to the entropy until `mass` is reached."""
    probs = _softmax(values)
    surprise = -np.log(np.maximum(probs, 1e-300))
    order = np.argsort(np.abs(surprise - float((probs * surprise).sum())), kind="stable")
    keep = int(np.searchsorted(np.cumsum(probs[order]), mass, side="left")) + 1
    chosen = np.sort(order[:keep])
    return ids[chosen], values[chosen]


def _without_ends(row: Row, ends: Seq[int]) -> Row:
    """`row` without the tokens that end an answer; as it is where nothing else may follow."""
    out = row.copy()
    out[list(ends)] = -np.inf
    return out if np.isfinite(out).any() else row


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request's place in its text says about the next token: none of `ends` comes before `open_until` tokens
    (prompt included), and `thought` may force one. `text` spells a token."""

    open_until: int = 0
    ends: tuple[int, ...] = ()
    thought: ThoughtLimit | None = None
    text: TokenBytes | None = None


class Sampler:
    """Chooses the tokens of one request. The same seed gives the same choices for the same logits."""

    def __init__(self, sampling: Sampling, constraint: Constraint | None = None, bounds: Bounds | None = None) -> None:
        self.sampling = sampling
        self.constraint = constraint
        self._bounds = bounds if bounds is not None else Bounds()
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        self._random = np.random.Generator(np.random.PCG64(seed & (2**63 - 1)))

    @property
    def greedy(self) -> bool:
        """True when the best logit is always the choice and nothing but `bounds` changes the logits."""
        s = self.sampling
        plain = s.repeat_penalty == 1.0 and not s.presence_penalty and not s.frequency_penalty and not s.logit_bias
        return s.temperature <= 0 and plain and not s.dry_multiplier and self.constraint is None

    def plain(self, length: int, ahead: int) -> bool:
        """True when the best logits as they are will be the choices behind `length` tokens, and behind up to `ahead`
        more: the rows themselves need not be looked at."""
        bounds = self._bounds
        forces = bounds.thought is not None and bounds.thought.may_force(length, ahead)
        return self.greedy and length >= bounds.open_until and not forces

    def prepared(self, logits: Row, history: Seq[int]) -> Row:
        """Logits after bias, penalties and constraint; the input is never written to."""
        bounds = self._bounds
        out = penalise(logits, self.sampling, history)
        if self.sampling.dry_multiplier and bounds.text is not None:
            out = out.copy() if out is logits else out
            penalise_repetitions(out, self.sampling, history, bounds.text)
        if self.constraint is not None:
            out = out.copy() if out is logits else out
            self.constraint.apply(out)
        elif bounds.thought is not None and (forced := bounds.thought.forced(history)) is not None:
            out = np.full_like(logits, -np.inf)
            out[forced] = 0.0
            return out
        return out if len(history) >= bounds.open_until else _without_ends(out, bounds.ends)

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
