"""Choose tokens from the top-k logits of each row, which a device selected, for all rows at once.

The result equals the engine's sampler: double precision, and the same order (rank), so that a seed
draws the same token in both. If the top k do not determine the token, it is left open and the
caller samples from the full row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm_backends.values import Chunk, SampleSpec

Ids = NDArray[np.int32]
Rows = NDArray[np.float32]
# Token ids, and the amount that is added to the logit of each.
Amounts = tuple[NDArray[np.int64], NDArray[np.float32]]


@dataclass(frozen=True, slots=True, eq=False)
class TopRows:
    """The top-k logits of some rows.

    `logits` [rows, k] and their `ids` are in any order; no other token of the row has a greater
    logit. `totals` [rows] is the sum of e^(logit - greatest logit) over all tokens of a row; None:
    not known.
    """

    ids: Ids
    logits: Rows
    totals: NDArray[np.float64] | None = None


# Chooses the best token.
BEST = SampleSpec(0.0, 0, 1.0, 0.0, 0.0)


def needs_all_weights(spec: SampleSpec) -> bool:
    """Return whether the draw depends on the weight of all tokens, which then must be given."""
    return spec.temperature > 0 and spec.top_k == 0


def may_decide(spec: SampleSpec | None, n: int) -> bool:
    """Return False if the `n` greatest logits can't determine the token (spec None: the best
    token)."""
    if spec is None or spec.temperature <= 0:
        return True
    if not needs_all_weights(spec):
        return spec.top_k < n
    if _changes_logits(spec):
        return False
    return spec.temperature == 1.0 or spec.top_p < 1.0 or spec.min_p > 0.0


def _changes_logits(spec: SampleSpec) -> bool:
    """Return whether `spec` changes logits before a token is chosen."""
    if spec.banned or spec.allowed is not None:
        return True
    return bool(spec.seen or spec.bias or spec.dry_bias)


def _changed(ids: Ids, logits: Rows, spec: SampleSpec) -> Rows:
    """Return the top-k logits of one row as `spec` changes them.

    A changed logit becomes -inf if a token outside the top k might now be greater.
    """
    if _may_raise_logits(spec):
        return np.full_like(logits, -np.inf)
    smallest = logits.min()
    seen = spec.seen
    out = logits.copy()
    _add(out, ids, spec.bias)
    if seen is not None and len(seen.ids):
        hit, at = _matches(ids, seen.ids)
        counts = seen.counts[at].astype(np.float32)
        repeat = np.float32(seen.repeat)
        was = out[hit]
        was = np.where(was > 0, was / repeat, was * repeat)
        out[hit] = was - (counts * np.float32(seen.frequency) + np.float32(seen.presence))
    _add(out, ids, spec.dry_bias)
    if spec.allowed is not None:
        bits = spec.allowed[ids >> 3] >> (ids & 7)
        out[bits & 1 == 0] = -np.inf
    for token in spec.banned:
        out[ids == token] = -np.inf
    # If all are -inf, the caller decides with the full row.
    out[out <= smallest] = -np.inf
    return out


def _may_raise_logits(spec: SampleSpec) -> bool:
    """Return whether `spec` can increase a logit."""
    seen = spec.seen
    if seen is not None and (seen.repeat < 1.0 or seen.presence < 0.0 or seen.frequency < 0.0):
        return True
    return _any_positive(spec.bias) or _any_positive(spec.dry_bias)


def _any_positive(amounts: Amounts | None) -> bool:
    return amounts is not None and bool((amounts[1] > 0).any())


def _add(logits: Rows, ids: Ids, amounts: Amounts | None) -> None:
    if amounts is not None:
        tokens, added = amounts
        hit, at = _matches(ids, tokens)
        logits[hit] += added[at]


def _matches(ids: Ids, others: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return a mask of the `ids` that are among `others`, and their indices there."""
    if not len(others):
        return np.zeros(len(ids), dtype=np.bool_), others
    order = np.argsort(others, kind="stable")
    place = np.searchsorted(others, ids, sorter=order)
    at = order[np.minimum(place, len(others) - 1)]
    hit = others[at] == ids
    return hit, at[hit]


def _draw_settings(spec: SampleSpec) -> tuple[float, float, float, float, float]:
    """Return (temperature, top_k, top_p, min_p, uniform) for `TopKChooser`."""
    if spec.temperature <= 0:
        # Draws the best token.
        return (1.0, 1.0, math.inf, 0.0, 0.0)
    top_p = spec.top_p if spec.top_p < 1.0 else math.inf
    return (spec.temperature, spec.top_k, top_p, spec.min_p, spec.uniform)


class TopKChooser:
    """Chooses the next tokens of the `chunks` with the indices `where`.

    The constructor prepares everything that depends only on the specs. It runs while the device
    still computes the rows.
    """

    def __init__(self, chunks: Sequence[Chunk], where: Sequence[int]) -> None:
        self._n_chunks = len(chunks)
        self._where = where
        self._rows = np.arange(len(where))
        specs = [chunks[i].sample or BEST for i in where]
        self._specs = specs
        self._changed = [i for i, s in enumerate(specs) if _changes_logits(s)]
        self._any_draws = any(s.temperature > 0 for s in specs)
        if not self._any_draws:
            return
        settings = np.array([_draw_settings(s) for s in specs])
        self._temperature = settings[:, 0:1]
        self._top_k = settings[:, 1].astype(np.int64)
        self._top_p = settings[:, 2:3]
        self._min_p = settings[:, 3:4]
        self._uniform = settings[:, 4:5]
        self._at_one = self._temperature == 1.0
        self._all_at_one = bool(self._at_one.all())
        self._filtered = (self._top_p < math.inf) | (self._min_p > 0)
        self._any_filtered = self._filtered.any()
        # Draws that need the weight of all tokens.
        self._needs_totals = np.array(
            [[needs_all_weights(s) and not _changes_logits(s)] for s in specs]
        )
        self._any_needs_totals = self._needs_totals.any()

    def of(self, top: TopRows) -> list[int | None]:
        """Return the next token of each chunk, from the `top` logits of the rows in `where`.

        None means that the token is left open.
        """
        if not self._where:
            return [None] * self._n_chunks
        logits = top.logits
        if self._changed:
            logits = logits.copy()
            for i in self._changed:
                logits[i] = _changed(top.ids[i], top.logits[i], self._specs[i])
        # Rows with NaN, or with only forbidden tokens, are left open.
        with np.errstate(invalid="ignore"):
            if self._any_draws:
                tokens, certain = self._drawn(top, logits)
            else:
                tokens, certain = self._best(top, logits)
        tokens_of_rows: list[int | None] = tokens.tolist()
        if not certain.all():
            tokens_of_rows = [
                token if ok else None
                for token, ok in zip(tokens_of_rows, certain.tolist(), strict=True)
            ]
        if len(tokens_of_rows) == self._n_chunks:
            return tokens_of_rows
        at = dict(zip(self._where, tokens_of_rows, strict=True))
        return [at.get(i) for i in range(self._n_chunks)]

    def _best(self, top: TopRows, logits: Rows) -> tuple[Ids, NDArray[np.bool_]]:
        """Return the best token of each row, and whether it is certain."""
        at = logits.argmax(axis=1)
        best = logits[self._rows, at]
        tokens = top.ids[self._rows, at]
        hit = logits == best[:, None]
        if np.count_nonzero(hit) != len(at):
            tokens = np.where(hit, top.ids, np.int32(0x7FFFFFFF)).min(axis=1)
        # Tokens with the least of these logits may have equals outside the top k.
        return tokens, (best > logits.min(axis=1)) & (best < np.inf)

    def _drawn(self, top: TopRows, logits: Rows) -> tuple[Ids, NDArray[np.bool_]]:
        """Draw one token per row, and return whether it is certain.

        A token is not certain if its logit is the smallest of the top k, because tokens outside may
        have the same logit.
        """
        n, k = logits.shape
        rows = self._rows
        top_k = self._top_k
        # Draw a rank first and look up its id: sorting the ids too took five times as long.
        ranked = np.sort(logits, axis=1)[:, ::-1]
        totals = None
        if self._any_needs_totals:
            # The weight of all tokens; the probabilities of the first ones depend on it.
            row_totals = 0.0 if top.totals is None else top.totals[:, None]
            totals = np.where(self._needs_totals, row_totals, 0.0)
            top_k = np.where(totals[:, 0] > 0, k, top_k)
        last = np.minimum(np.maximum(top_k, 1), k) - 1
        width = int(last.max()) + 1
        certain = (top_k > 0) & (top_k <= k) & (ranked[:, 0] < np.inf)
        if self._changed:
            # Tokens outside the top k may have a higher rank than those that were lowered.
            certain &= ranked[rows, last] > -np.inf
        weights, tempered = self._weights(ranked[:, :width], last)
        if self._any_filtered:
            passing = self._passing(weights, totals)
            if totals is not None:
                # If the filters keep the last of the top k, they may keep tokens outside as well.
                may_pass_outside = (totals > 0) & self._filtered
                certain &= ~may_pass_outside[:, 0] | ~passing[rows, last]
            tempered = tempered * passing
        cumulative = np.add.accumulate(tempered, axis=1)
        top_mass = cumulative[:, -1:]
        mass = top_mass
        if totals is not None:
            # The weight of the tokens outside is known only at temperature 1.
            beyond = (totals > 0) & ~self._filtered
            mass = np.where(beyond, np.maximum(totals, mass), mass)
            among_few = self._at_one & (self._uniform * mass < top_mass)
            certain &= ~beyond[:, 0] | among_few[:, 0]
        goal = np.minimum(self._uniform * mass, np.nextafter(top_mass, 0.0))
        rank = (cumulative <= goal).argmin(axis=1)
        drawn = ranked[rows, rank]
        hit = logits == drawn[:, None]
        tokens: Ids = top.ids[rows, hit.argmax(axis=1)]
        if np.count_nonzero(hit) != n:
            for i in np.flatnonzero(hit.sum(axis=1) > 1):
                # Equal logits are ranked by id.
                equals = np.sort(top.ids[i, hit[i]])
                n_greater = np.count_nonzero(ranked[i] > drawn[i])
                tokens[i] = equals[rank[i] - n_greater]
        return tokens, certain & (drawn > ranked[:, -1])

    def _weights(
        self, ranked: Rows, last: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the weights of the ranked tokens at temperature 1 and at the requested
        temperature.

        Tokens after the `last` of each row have weight 0.
        """
        distances = ranked.astype(np.float64)
        distances = distances - distances[:, :1]
        weights = np.exp(distances)
        tempered = weights
        if not self._all_at_one:
            tempered = np.exp(distances / self._temperature)
        width = ranked.shape[1]
        if last.min() < width - 1:
            limited = np.arange(width) <= last[:, None]
            weights = weights * limited
            tempered = tempered * limited
        return weights, tempered

    def _passing(
        self, weights: NDArray[np.float64], totals: NDArray[np.float64] | None
    ) -> NDArray[np.bool_]:
        """Return a mask of the ranked tokens that the filters keep, by the rules of filters.py.

        top_p keeps the fewest tokens that reach its share; min_p keeps tokens with that share of
        the best token's weight.
        """
        summed = np.add.accumulate(weights, axis=1)
        all_weigh = summed[:, -1:]
        if totals is not None:
            all_weigh = np.where(totals > 0, totals, all_weigh)
        passing = weights >= self._min_p
        passing[:, 1:] &= summed[:, :-1] < self._top_p * all_weigh
        return passing
