"""Sample tokens on the device, so that the next step can start before the host has seen them.

The contract defines the computation and its order (`SampleSpec`). The best tokens of a row are
found from the maxima of blocks, without sorting the vocabulary. Everything between two reductions
is one kernel (mx.compile). Parameters are arrays, so one compiled function serves every mix of
requests with the same stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import MAX_SAMPLED_TOP_K, SampleSpec, SeenTokens

UNSURE = -1
# Fewest tokens that are ranked. top_k is rounded up to a power of two, so that few functions are
# compiled.
_MIN_HEAD = 64
# Longest row that Metal sorts in one kernel (mlx/backend/metal/sort.cpp: 512 threads, 8 values
# each).
_SORTED_AT_ONCE = 4096
# Block size for sums over the full vocabulary.
_BLOCK = 64
# Token lists differ in length between requests and steps. They are padded to a power of two, at
# least this one.
_MIN_LIST = 16
_NOTHING_SEEN = SeenTokens(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32))


@dataclass
class DeviceTokens:
    """Tokens that the device computes. `specs`: the spec of each token."""

    tokens: Any
    specs: Sequence[SampleSpec] = ()

    @cached_property
    def on_host(self) -> list[int]:
        """The tokens; UNSURE if the caller must sample from the logits."""
        return [int(t) for t in np.array(self.tokens)]


@dataclass(frozen=True, slots=True)
class _Stages:
    """The stages of a compiled function.

    `head`: number of ranked tokens to draw from (0: no such draw). `total`: also sum the full row,
    for a top_p over all tokens. `free`: draw from all tokens by id. `best`: take the best token.
    """

    head: int
    total: bool
    free: bool
    best: bool

    @classmethod
    def of(cls, specs: Sequence[SampleSpec], n_vocab: int) -> _Stages:
        most_kept = 0
        total = False
        free = False
        best = False
        for spec in specs:
            if spec.temperature <= 0:
                best = True
            elif 0 < spec.top_k < n_vocab:
                most_kept = max(most_kept, spec.top_k)
            elif spec.top_p < 1.0:
                total = True
            else:
                free = True
        head = 0
        if total:
            head = MAX_SAMPLED_TOP_K
        elif most_kept:
            head = _power(most_kept, _MIN_HEAD)
        return cls(head=min(head, n_vocab), total=total, free=free, best=best)


def sample(rows: Any, specs: Sequence[SampleSpec], drawn: Any = None) -> DeviceTokens:
    """Start sampling one token from each of `rows` (logits [len(specs), n_vocab]).

    Runs on the current default stream. `drawn` [len(specs)] are newer tokens, not yet known to the
    host, that the specs do not include.
    """
    n_vocab = int(rows.shape[-1])
    stream = mx.default_stream(mx.default_device())
    sampling = _compiled(_Stages.of(specs, n_vocab), str(stream))
    changes = _changes(specs, n_vocab, drawn)
    return DeviceTokens(sampling(rows, _parameters(specs, n_vocab), changes), specs)


# --- from specs to arrays -------------------------------------------------------------------------


def _changes(specs: Sequence[SampleSpec], n_vocab: int, drawn: Any) -> dict[str, Any]:
    """Return the changes to the logits, by name.

    Unused changes are left out, and are not part of the compiled function.
    """
    changes: dict[str, Any] = {}
    if _any_use(specs, "bias") or any(spec.banned for spec in specs):
        # A banned token has minus infinity, which later changes do not alter.
        changes["bias"] = _sparse([[spec.bias, _banned(spec)] for spec in specs], n_vocab)
    if _any_use(specs, "seen"):
        seen = [spec.seen or _NOTHING_SEEN for spec in specs]
        changes["seen"] = _filled([(tokens.ids, tokens.counts) for tokens in seen])
        if drawn is not None:
            leaving = [[tokens.leaving] for tokens in seen]
            changes["ahead"] = [mx.array(leaving, dtype=mx.int32), drawn]
    if _any_use(specs, "dry_bias"):
        changes["dry_bias"] = _sparse([[spec.dry_bias] for spec in specs], n_vocab)
    if _any_use(specs, "allowed"):
        changes["allowed"] = _allowed(specs, n_vocab)
    return changes


def _any_use(specs: Sequence[SampleSpec], stage: str) -> bool:
    return any(getattr(spec, stage) is not None for spec in specs)


def _parameters(specs: Sequence[SampleSpec], n_vocab: int) -> Any:
    """Return one row of numbers for each spec."""
    table = []
    for spec in specs:
        top_k = spec.top_k if 0 < spec.top_k < n_vocab else n_vocab
        draw = (spec.temperature, top_k, spec.top_p, spec.min_p, spec.uniform)
        seen = spec.seen or _NOTHING_SEEN
        table.append((*draw, seen.repeat, seen.presence, seen.frequency))
    return mx.array(np.array(table, dtype=np.float32))


def _power(n: int, minimum: int) -> int:
    return max(minimum, 1 << max(0, n - 1).bit_length())


def _filled(lists: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> list[Any]:
    """Turn lists of (ids, numbers) into two arrays.

    Each list is padded with its first element, or with token 0 and number 0 if it is empty.
    """
    longest = _power(max(len(ids) for ids, _ in lists), _MIN_LIST)
    ids = np.zeros((len(lists), longest), dtype=np.int32)
    numbers = np.zeros((len(lists), longest), dtype=np.float32)
    for row, (mine, amounts) in enumerate(lists):
        if len(mine):
            ids[row] = mine[0]
            ids[row, : len(mine)] = mine
            numbers[row] = amounts[0]
            numbers[row, : len(mine)] = amounts
    return [mx.array(ids), mx.array(numbers)]


def _sparse(
    lists: Sequence[Sequence[tuple[NDArray[Any], NDArray[Any]] | None]], n_vocab: int
) -> list[Any]:
    """Return sparse additions to the logits of each row, combined from several lists."""
    joined = []
    for pair in lists:
        # Start with an addition of zero, because lists are padded with their first element.
        all_ids = [np.zeros(1, dtype=np.int64)]
        all_amounts = [np.zeros(1, dtype=np.float32)]
        for part in pair:
            if part is not None:
                all_ids.append(part[0])
                all_amounts.append(part[1])
        ids = np.concatenate(all_ids)
        amounts = np.concatenate(all_amounts)
        known = (ids >= 0) & (ids < n_vocab)
        joined.append((ids[known], amounts[known]))
    return _filled(joined)


def _banned(spec: SampleSpec) -> tuple[NDArray[Any], NDArray[Any]]:
    ids = np.array(spec.banned, dtype=np.int64)
    return ids, np.full(len(ids), -np.inf, dtype=np.float32)


def _allowed(specs: Sequence[SampleSpec], n_vocab: int) -> Any:
    """Return which tokens each row allows, from the specs' bits (lowest bit first)."""
    table = np.ones((len(specs), n_vocab), dtype=np.bool_)
    for row, d in zip(table, specs, strict=True):
        if d.allowed is not None:
            row[:] = np.unpackbits(d.allowed, count=n_vocab, bitorder="little")
    return mx.array(table)


# --- on the device --------------------------------------------------------------------------------


@cache
def _compiled(stages: _Stages, stream: str) -> Any:
    """Compile one function per stream, because a compiled function keeps the stream of its first
    call."""
    return mx.compile(partial(_sample, stages))


@cache
def _numbers(n: int, dtype: Any = mx.uint32) -> Any:
    """Return 0 to n - 1. The array is cached, or each function would make it again in every
    step."""
    found = mx.arange(n, dtype=dtype)
    mx.eval(found)
    return found


def _sample(stages: _Stages, rows: Any, parameters: Any, changes: dict[str, Any]) -> Any:
    adjusted = _adjusted(rows.astype(mx.float32), parameters, changes)
    return _drawn(stages, adjusted, parameters)


def _adjusted(rows: Any, parameters: Any, changes: dict[str, Any]) -> Any:
    """Return the logits after bias, penalties, reductions and the mask."""
    if "bias" in changes:
        rows = _added(rows, *changes["bias"])
    if "seen" in changes:
        ids, counts = changes["seen"]
        if "ahead" in changes:
            leaving, drawn = changes["ahead"]
            ids, counts = _counted_on(ids, counts, leaving=leaving, drawn=drawn[:, None])
        repeat, presence, frequency = (parameters[:, i : i + 1] for i in (5, 6, 7))
        values = mx.take_along_axis(rows, ids, axis=1)
        repeated = mx.where(values > 0, values / repeat, values * repeat)
        lower = repeated - presence - counts * frequency
        # An id that occurs twice in the list has the same count both times.
        rows = mx.put_along_axis(rows, ids, mx.where(counts > 0, lower, values), axis=1)
    if "dry_bias" in changes:
        rows = _added(rows, *changes["dry_bias"])
    if "allowed" in changes:
        rows = mx.where(changes["allowed"], rows, -mx.inf)
    return rows


def _added(rows: Any, ids: Any, amounts: Any) -> Any:
    row = _numbers(rows.shape[0], mx.int32)[:, None]
    return rows.at[row, ids].add(amounts)


def _counted_on(ids: Any, counts: Any, leaving: Any, drawn: Any) -> tuple[Any, Any]:
    """Return `ids` and their counts after `drawn` entered and `leaving` (-1: none) left the
    window."""
    same = ids == drawn
    before = mx.where(same, counts, 0.0).max(axis=1, keepdims=True)
    new = before + 1.0 - (drawn == leaving)
    changed = counts + same - (ids == leaving)
    return mx.concatenate([ids, drawn], axis=1), mx.concatenate([changed, new], axis=1)


def _drawn(stages: _Stages, rows: Any, parameters: Any) -> Any:
    """Return a token for each row.

    UNSURE if the best logit is not finite, or if top_p includes tokens after the ranked ones.
    """
    specs, top_k, top_p, min_p, uniform = (parameters[:, i : i + 1] for i in range(5))
    temperature = mx.where(specs > 0, specs, 1.0)
    best = rows.max(axis=-1, keepdims=True)
    unsure = mx.logical_not(mx.abs(best) < mx.inf)
    token: Any = None
    if stages.head:
        token, truncated = _draw_from_ranked(
            stages, rows, best, temperature, top_k, top_p, min_p, uniform
        )
        unsure = unsure | truncated
    if stages.free:
        ranks = (top_k < rows.shape[-1]) | (top_p < 1.0)
        token = _either(ranks, token, _draw_from_all(rows, best, temperature, min_p, uniform))
    if stages.best:
        token = _either(specs > 0, token, mx.argmax(rows, axis=-1, keepdims=True))
    return mx.where(unsure, UNSURE, token.astype(mx.int32))[:, 0]


def _either(condition: Any, token: Any, otherwise: Any) -> Any:
    """Return `token` for rows with `condition`, and `otherwise` for the others.

    If `token` is None, return `otherwise` for all rows.
    """
    if token is None:
        return otherwise
    return mx.where(condition, token, otherwise)


def _draw_from_ranked(
    stages: _Stages,
    rows: Any,
    best: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    uniform: Any,
) -> tuple[Any, Any]:
    """Draw from the ranked tokens; the cumulative sum must pass `uniform`.

    Also returns whether top_p includes tokens after the ranked ones.
    """
    n_vocab = int(rows.shape[-1])
    ids, values = _ranked(rows, stages.head)
    rank = _numbers(stages.head)[None]
    weights = mx.where(rank < top_k, mx.exp(values - best), 0.0)
    reached = mx.cumsum(weights, axis=-1)
    total = reached[:, -1:]
    unsure: Any = False
    if stages.total:
        of_row = mx.exp(rows - best).sum(axis=-1, keepdims=True)
        total = mx.where(top_k < n_vocab, total, of_row)
        if stages.head < n_vocab:
            by_top_p_alone = (top_k >= n_vocab) & (top_p < 1.0)
            unsure = by_top_p_alone & (reached[:, -1:] < top_p * total)
    in_top_p = (top_p >= 1.0) | (reached - weights < top_p * total)
    keep = in_top_p & (weights >= min_p) & (values > -mx.inf) & (rank < top_k)
    keep = keep | (rank < 1)
    hot = mx.where(keep, mx.exp((values - best) / temperature), 0.0)
    reached = mx.cumsum(hot, axis=-1)
    at = _at(reached, uniform * reached[:, -1:])
    return mx.take_along_axis(ids, at, axis=-1), unsure


def _draw_from_all(rows: Any, best: Any, temperature: Any, min_p: Any, uniform: Any) -> Any:
    """Draw from all tokens that min_p keeps, in the order of their ids.

    The cumulative sum must pass `uniform`. It is computed over blocks first, then within one block.
    """
    difference = rows - best
    weights = mx.where(mx.exp(difference) >= min_p, mx.exp(difference / temperature), 0.0)
    blocks = _blocks(weights, _BLOCK, 0.0)
    sums = blocks.sum(axis=-1)
    reached = mx.cumsum(sums, axis=-1)
    goal = uniform * reached[:, -1:]
    block = _at(reached, goal)
    chosen = mx.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    before = mx.take_along_axis(reached - sums, block, axis=-1)
    within = _at(mx.cumsum(chosen, axis=-1), goal - before)
    return mx.minimum(block * _BLOCK + within, rows.shape[-1] - 1)


def _at(reached: Any, goal: Any) -> Any:
    """Return the first index at which a cumulative sum passes `goal`, at most its last increase."""
    before = (reached <= goal) & (reached < reached[:, -1:])
    return before.astype(mx.uint32).sum(axis=-1, keepdims=True)


def _blocks(rows: Any, size: int, filling: float) -> Any:
    """Reshape to [rows, blocks, size]."""
    n_rows, width = rows.shape
    if width % size:
        rows = mx.pad(rows, [(0, 0), (0, -width % size)], constant_values=filling)
    return rows.reshape(n_rows, -1, size)


def _ranked(rows: Any, n: int) -> tuple[Any, Any]:
    """Return ids and values of the `n` greatest logits of each row, greatest first.

    Equal logits are ordered by id. All `n` are in the `n` blocks with the greatest maxima (with the
    lowest ids if maxima are equal), because any other block has `n` tokens that rank before its
    best one. So rows are narrowed until they can be sorted at once.
    """
    ids = None
    while int(rows.shape[-1]) > max(_SORTED_AT_ONCE, 2 * n):
        size = _power(-(-int(rows.shape[-1]) // _SORTED_AT_ONCE), 2)
        blocks = _blocks(rows, size, -mx.inf)
        peaks = mx.argsort(-blocks.max(axis=-1), axis=-1)
        chosen = mx.sort(peaks[:, :n], axis=-1)[:, :, None]
        rows = mx.take_along_axis(blocks, chosen, axis=1).reshape(rows.shape[0], -1)
        within = (chosen * size + _numbers(size)).reshape(rows.shape)
        ids = _ids_at(ids, within)
    order = mx.argsort(-rows, axis=-1)[:, :n]
    return _ids_at(ids, order), mx.take_along_axis(rows, order, axis=-1)


def _ids_at(ids: Any, places: Any) -> Any:
    """Return the ids at these places of each row; the places themselves if the rows were not
    narrowed."""
    if ids is None:
        return places
    return mx.take_along_axis(ids, places, axis=-1)
