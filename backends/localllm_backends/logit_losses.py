"""Losses between rows of logits of the same tokens, from two ways to compute them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localllm_backends.values import KvFidelity

Rows = NDArray[np.float64]
# A finite number in place of logits of minus infinity.
_LOWEST_FINITE = -1e30


def log_probabilities(logits: NDArray[np.float32]) -> Rows:
    """Return the log probabilities of `logits` [tokens, vocabulary]."""
    values = np.maximum(logits.astype(np.float64), _LOWEST_FINITE)
    values -= values.max(axis=1, keepdims=True)
    sums = np.exp(values).sum(axis=1, keepdims=True)
    normal: Rows = values - np.log(sums)
    return normal


def losses(exact: Rows, near: Rows) -> Rows:
    """Return for each token the KL divergence in nats, and 1 if the best token differs: [2,
    tokens]."""
    divergence = (np.exp(exact) * (exact - near)).sum(axis=1)
    flips = exact.argmax(axis=1) != near.argmax(axis=1)
    return np.stack([divergence, flips])


def fidelity(pair: tuple[str, str], pieces: Sequence[Rows]) -> KvFidelity:
    """Return the mean losses of a pair of KV types over all `pieces` of a text."""
    mean_kl, flips = np.concatenate(pieces, axis=1).mean(axis=1)
    return KvFidelity(*pair, max(0.0, float(mean_kl)), float(flips))
