"""From logits to a token: the sampling chain as one pure function over numpy arrays, and the per-request sampler.

The chain's order is llama.cpp's default: penalties, DRY, top_k, typical_p, top_p, min_p, XTC, temperature, draw. Filters
work on probabilities before temperature, so a high temperature never lets in what the filters kept out.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.engine.messages import Sampling
from localllm.engine.sampling import row_bounds, row_counted, row_exactly, row_glimpsed
from localllm.engine.sampling.dry import Recent, TokenBytes, penalty, repetitions
from localllm.engine.sampling.logits import UNCHANGED, Changes, Facts, Logits
from localllm.engine.sampling.penalties import Tallies, Tally, counted, penalised
from localllm.engine.sampling.ranking import HEAD, Row, best_ids, by_rank
from localllm.engine.sampling.rejection import Distribution, couple
from localllm.engine.sampling.thought_limit import ThoughtLimit
from localllm.engine.sampling.top_choices import NOTHING, Excluded
from localllm_backends.contract import MAX_SAMPLED_TOP_K, SampleSpec


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


class MaskingConstraint(Constraint, Protocol):
    """A Constraint that can say what it allows without a row being changed."""

    def allowed(self) -> NDArray[np.uint8]:
        """One bit for each token, the lowest bit of a byte first; tokens without one are forbidden."""
        ...

    def masked(self, logits: Row) -> Row:
        """What `apply` would leave of `logits`, as another row."""
        ...


# With more tokens allowed than this the whole row is looked at.
_FEW_ALLOWED = 8192


def distribution(given: Row | Logits, sampling: Sampling) -> Distribution:
    """The distribution a token is drawn from, after every filter and the temperature (> 0).

    given: float32 [n_vocab], penalised and constrained; -inf is never drawn. Equal logits give an equal
    distribution, order included, whatever else the row holds: a seed then draws the same token.
    """
    logits = given if isinstance(given, Logits) else Logits(given)
    if 0 < sampling.top_k < len(logits) and not math.isfinite(logits.peaks.greatest):
        logits = Logits(logits.whole())
    return _distributed(_left(logits, sampling), logits, sampling)


def _distributed(ids: NDArray[np.int64], logits: Logits, sampling: Sampling) -> Distribution:
    """What is drawn where the filters leave `ids`, best first."""
    if not len(ids):
        return Distribution(np.array([logits.whole().argmax()]), np.ones(1))
    values = logits.at(ids).astype(np.float64)
    if not np.isfinite(values[0]):  # what is infinite was found by its place only
        values = logits.whole()[ids].astype(np.float64)
    return _without_top_choices(ids, values, sampling) if _excludes(sampling) else _drawn(ids, values, sampling)


def _excludes(sampling: Sampling) -> bool:
    return sampling.xtc_probability > 0.0 and sampling.xtc_threshold <= 0.5


def _cuts(sampling: Sampling) -> bool:
    return sampling.top_p < 1.0 or sampling.min_p > 0.0


def _left(logits: Logits, sampling: Sampling) -> NDArray[np.int64]:
    """What top_k, typical_p, top_p and min_p leave, best first; without any of the last three only the head of it is."""
    found = _bounded(logits, sampling)
    if found is None and _cuts(sampling) and sampling.typical_p >= 1.0:
        found = row_exactly.cut_sorted(logits, sampling)
    if found is not None:
        return found
    row = logits.whole()
    # Nothing further than 40 nats below the best survives a filter over a float32 softmax.
    least = row.max() - 40.0 if _cuts(sampling) or sampling.typical_p < 1.0 else -np.inf
    ids = np.flatnonzero(row > least)
    if sampling.typical_p < 1.0:
        ids = by_rank(row, ids)
        return _left_of(row[ids], ids, len(ids), sampling)
    ids, ranked = _head_first(row, ids)
    left = _left_of(row[ids], ids, ranked, sampling)
    if ranked < len(left) and _cuts(sampling):
        ids = by_rank(row, np.sort(ids))
        left = _left_of(row[ids], ids, len(ids), sampling)
    return left


def _bounded(logits: Logits, sampling: Sampling) -> NDArray[np.int64] | None:
    """`_left` where only tokens near the best need be looked at; None where those are many, or nothing is filtered."""
    if 0 < sampling.top_k < len(logits):
        ids = logits.top(sampling.top_k)
        return _left_of(logits.at(ids), ids, len(ids), sampling)
    if sampling.typical_p < 1.0:
        found = row_bounds.typical(logits, sampling.typical_p)
        if found is None:
            return None
        return _left_of(logits.at(found), found, len(found), replace(sampling, typical_p=1.0))
    return row_bounds.cut(logits, sampling) if _cuts(sampling) else None


def _left_of(logits: Row, ids: NDArray[np.int64], ranked: int, sampling: Sampling) -> NDArray[np.int64]:
    """What typical_p, top_p and min_p leave of `ids`, which have `logits` and the first `ranked` of which are in order."""
    if not len(ids):
        return ids
    values = logits.astype(np.float64)
    if sampling.typical_p < 1.0:
        ids, values = _typical(ids, values, sampling.typical_p)
    return ids[: _survivors(values, sampling)] if _cuts(sampling) else ids


def _drawn_token(logits: Logits, sampling: Sampling, uniform: float) -> int:
    """The token at `uniform` of `distribution(logits, sampling)`, which need not be made whole for it."""
    if 0 < sampling.top_k < len(logits):
        return distribution(logits, sampling).draw(uniform)
    excluded = Excluded(min(1.0, sampling.xtc_probability), sampling.xtc_threshold) if _excludes(sampling) else NOTHING
    token = row_glimpsed.draw(logits, sampling, uniform, excluded)
    if token is not None:
        return token
    if _cuts(sampling) or sampling.typical_p < 1.0:
        ids = _bounded(logits, sampling)
        if ids is not None:
            return _distributed(ids, logits, sampling).draw(uniform)
        token = row_counted.draw(logits, sampling, uniform, excluded)
    else:
        token = row_bounds.pick(logits, sampling.temperature, uniform, excluded)
        if token is None:
            token = row_exactly.pick_exactly(logits, sampling.temperature, uniform, excluded)
    return distribution(logits, sampling).draw(uniform) if token is None else token


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


def _head_first(logits: Row, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """`ids` (ascending) with the best of them in front, ranked, and how many those are; the rest stay as they are:
    filters rarely look further, and sorting a whole vocabulary takes as long as a small model's step."""
    if len(ids) <= 4 * HEAD:
        return by_rank(logits, ids), len(ids)
    head = best_ids(logits, HEAD)
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


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request's place in its text says about the next token: none of `ends` comes before `open_until` tokens
    (prompt included), none of `never` (some of `ends`) at all, and `thought` may force one. `text` spells a token."""

    open_until: int = 0
    ends: tuple[int, ...] = ()
    never: tuple[int, ...] = ()
    thought: ThoughtLimit | None = None
    text: TokenBytes | None = None

    def banned(self, length: int) -> tuple[int, ...]:
        """What may not come behind `length` tokens, as long as anything else may."""
        return self.ends if length < self.open_until else self.never


@dataclass(frozen=True, slots=True)
class _Past:
    """What is kept of the tokens of one growing line."""

    tallies: Tallies
    recent: Recent

    @classmethod
    def of(cls, sampling: Sampling) -> _Past:
        """Nothing yet."""
        return cls(Tallies(sampling.repeat_last_n), Recent())


class Sampler:
    """Chooses the tokens of one request. The same seed gives the same choices for the same logits."""

    def __init__(self, sampling: Sampling, constraint: Constraint | None = None, bounds: Bounds | None = None) -> None:
        self.sampling = sampling
        self.constraint = constraint
        self._bounds = bounds if bounds is not None else Bounds()
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        self._random = np.random.Generator(np.random.PCG64(seed & (2**63 - 1)))
        # What was taken from the stream and told to a backend, but not used yet.
        self._uniforms: list[float] = []
        self._past = _Past.of(sampling)
        self._facts: Facts | None = None

    @property
    def greedy(self) -> bool:
        """True when the best logit is always the choice and nothing but `bounds` changes the logits."""
        s = self.sampling
        plain = s.repeat_penalty == 1.0 and not s.presence_penalty and not s.frequency_penalty and not s.logit_bias
        return s.temperature <= 0 and plain and not s.dry_multiplier and self.constraint is None

    def plain(self, length: int, ahead: int) -> bool:
        """True when the best logits as they are will be the choices behind `length` tokens, and behind up to `ahead`
        more, wherever they are `open`: the rows themselves need not be looked at."""
        bounds = self._bounds
        forces = bounds.thought is not None and bounds.thought.may_force(length, ahead)
        return self.greedy and not forces

    def open(self, tokens: Seq[int], length: int) -> bool:
        """True when each of `tokens` may come in its place, the first of them behind `length` tokens."""
        return not any(token in self._bounds.banned(at) for at, token in enumerate(tokens, length))

    def sample_spec(self, length: int) -> SampleSpec | None:
        """How a backend may sample the token behind `length` tokens, and begin with the next; None where that takes a look here
        (a grammar, penalties and the like)."""
        s, bounds = self.sampling, self._bounds
        plain = not (counted(s) or s.logit_bias or s.dry_multiplier or s.typical_p < 1.0 or _excludes(s))
        forces = bounds.thought is not None and bounds.thought.may_force(length)
        if s.temperature <= 0 or not plain or self.constraint is not None or forces or s.top_k > MAX_SAMPLED_TOP_K:
            return None
        while len(self._uniforms) < 2:
            self._uniforms.append(float(self._random.random()))
        uniform, following = self._uniforms[:2]
        return SampleSpec(s.temperature, s.top_k, s.top_p, s.min_p, uniform, following, bounds.banned(length))

    def prepared(self, logits: Row, history: Seq[int]) -> Row:
        """Logits after bias, penalties and constraint, behind any `history`; the input is never written to."""
        return self._prepared(Facts(logits), history, _Past.of(self.sampling)).whole()

    def _prepared(self, facts: Facts, history: Seq[int], past: _Past) -> Logits:
        bounds = self._bounds
        out = Logits(facts.row, self._changes(facts.row, history, past), facts)
        if self.constraint is not None:
            out = Logits(self._constrained(out.whole(), self.constraint))
        elif bounds.thought is not None and (forced := bounds.thought.forced(history)) is not None:
            row = np.full_like(facts.row, -np.inf)
            row[forced] = 0.0
            return Logits(row)
        banned = bounds.banned(len(history))
        if not banned:
            return out
        open_ = out.without(banned)
        # As it is where nothing else may follow.
        return open_ if open_.any_left() else out

    def _constrained(self, row: Row, constraint: Constraint) -> Row:
        masked: Callable[[Row], Row] | None = getattr(constraint, MaskingConstraint.masked.__name__, None)
        if masked is not None:
            return masked(row)
        row = row.copy()
        constraint.apply(row)
        return row

    def _changes(self, row: Row, history: Seq[int], past: _Past) -> Changes:
        """What the client's biases, the penalties and DRY change of `row`, in this order."""
        sampling, tally = self.sampling, None
        if counted(sampling):
            came = past.tallies.read(history, len(row))
            tally = Tally(came, past.tallies.of, sampling) if len(came) else None
        repeated = (
            repetitions(sampling, history, self._bounds.text, past.recent)
            if sampling.dry_multiplier and self._bounds.text is not None
            else {}
        )
        ids = sorted(t for t in {*sampling.logit_bias, *repeated} if 0 <= t < len(row))
        if not ids:
            return Changes(tally=tally) if tally is not None else UNCHANGED
        at = np.array(ids, dtype=np.int64)
        values = row[at]
        if sampling.logit_bias:
            bias = np.array([sampling.logit_bias.get(t, 0.0) for t in ids], dtype=np.float32)
            values = np.where(bias > -100, values + bias, np.float32(-np.inf))
        if tally is not None:
            counts = tally.of[at]
            values = np.where(counts > 0, penalised(values, counts, sampling), values)
        for i, token in enumerate(ids):
            if token in repeated:
                values[i] -= penalty(sampling, repeated[token])
        return Changes(at, values, tally)

    def choose(self, logits: Row, history: Seq[int]) -> int:
        """The next token after `history` (token ids so far, those of the last call and what came since), given its logits
        (float32 [n_vocab])."""
        token = self._chosen(self._look(logits), history)
        if self.constraint is not None:
            self.constraint.accept(token)
        return token

    def _chosen(self, facts: Facts, history: Seq[int]) -> int:
        names = self._few_allowed(len(facts.row))
        if names is not None:
            return self._choose_among(names, facts, history)
        return self._choice(self._prepared(facts, history, self._past))

    def _choice(self, left: Logits) -> int:
        return left.greatest() if self.sampling.temperature <= 0 else _drawn_token(left, self.sampling, self.uniform())

    def _few_allowed(self, n_vocab: int) -> NDArray[np.int64] | None:
        """The tokens that the grammar allows, ascending, where those are few; None where it is not asked."""
        allowed: Callable[[], NDArray[np.uint8]] | None = getattr(
            self.constraint, MaskingConstraint.allowed.__name__, None
        )
        if allowed is None or self.sampling.top_k > HEAD:
            return None
        bits = np.unpackbits(allowed(), bitorder="little")[:n_vocab].view(np.bool_)
        return np.flatnonzero(bits) if np.count_nonzero(bits) <= _FEW_ALLOWED else None

    def _choose_among(self, names: NDArray[np.int64], facts: Facts, history: Seq[int]) -> int:
        """The choice, where nothing but `names` is allowed: of a row of those alone."""
        values = Logits(facts.row, self._changes(facts.row, history, self._past), facts).at(names)
        banned = np.isin(names, self._bounds.banned(len(history)))
        if (values[~banned] > -np.inf).any():
            values[banned] = -np.inf
        if not (values > -np.inf).any():
            self.uniform()
            return 0
        return int(names[self._choice(Logits(values))])

    def _look(self, row: Row) -> Facts:
        """The facts of a new row, which its log-probabilities may want as well."""
        self._facts = Facts(row)
        return self._facts

    def log_probabilities(self, logits: Row, token: int, n: int) -> tuple[float, list[tuple[int, float]]]:
        """Natural-log probabilities as the model has them, before anything is changed or filtered out: that of `token`, and the
        `n` greatest with their tokens."""
        facts = self._facts if self._facts is not None and self._facts.row is logits else Facts(logits)
        log_total = facts.log_total()
        best = Logits(logits, UNCHANGED, facts).top(n) if n else ()
        return float(logits[token]) - log_total, [(int(t), float(logits[t]) - log_total) for t in best]

    def verify(self, logits: Row, history: Seq[int], drafted: int, drawn_from: Distribution) -> tuple[int, bool]:
        """(next token, whether it is `drafted`) for a token drafted from `drawn_from`: maximal coupling with the
        distribution `choose` would draw from. Needs temperature > 0."""
        p = distribution(self._prepared(self._look(logits), history, self._past), self.sampling)
        token, accepted = couple(p, drawn_from, drafted, self.uniform(), self.uniform())
        if self.constraint is not None:
            self.constraint.accept(token)
        return token, accepted

    def draw(self, dist: Distribution) -> int:
        """One token from `dist`."""
        return dist.draw(self.uniform())

    def uniform(self) -> float:
        """One number in [0, 1) from the request's own stream."""
        return self._uniforms.pop(0) if self._uniforms else float(self._random.random())
