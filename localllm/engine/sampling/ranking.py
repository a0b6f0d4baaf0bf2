"""The order of a row's tokens: by logit, greatest first, and among equals the lower id."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]

# How many candidates are put in order before a filter is asked whether it wants more.
HEAD = 512


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
    if len(ids) > 4 * HEAD and len(ids) > k:
        found = logits[ids]
        ids = ids[found >= np.partition(found, len(ids) - k)[len(ids) - k]]
    return by_rank(logits, ids)[:k]


def by_rank(logits: Row, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """`ids` (ascending) by logit, greatest first; among equals the lower id."""
    if len(ids) <= 4 * HEAD:
        return ids[np.argsort(-logits[ids], kind="stable")]
    # One integer holds both, half as long to sort: an IEEE float's bits count upwards for positive numbers (whose sign
    # bit is 0) and downwards for negative ones, and here the greatest must come first. Adding 0 makes -0 one with 0.
    bits = (logits[ids] + np.float32(0)).view(np.uint32)
    rank = np.where(bits >> 31, bits, bits ^ np.uint32(0x7FFFFFFF)).astype(np.uint64) << np.uint64(32)
    order = np.sort(rank | ids.astype(np.uint64)) & np.uint64(0xFFFFFFFF)
    return order.astype(np.int64)
