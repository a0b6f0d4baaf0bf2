"""Filters of a whole row by bounds give the answers of their plain definition in double precision, or none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from localllm.engine.messages import Sampling
from localllm.engine.sampling import row_bounds
from localllm.engine.sampling.ranking import Row
from localllm.engine.sampling.sampler import Sampler, distribution

OPEN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


def made(n: int, seed: int, spread: float, peaks: int, *, rounded: bool = False, allowed: float = 1.0) -> Row:
    """Logits as models have them: noise, and some words that would do."""
    rng = np.random.default_rng(seed)
    row = rng.normal(0.0, spread, n).astype(np.float32)
    row[rng.integers(0, n, peaks)] += np.linspace(18, 6, peaks).astype(np.float32)
    row = np.round(row) if rounded else row
    row[rng.random(n) > allowed] = -np.inf
    row[rng.integers(n)] = 1.0
    return row


rows = st.builds(
    made,
    st.sampled_from([1, 2, 40, 700, 9_000, 40_000]),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.5, 2.2, 4.0]),
    st.sampled_from([0, 3, 40]),
    rounded=st.booleans(),
    allowed=st.sampled_from([1.0, 1.0, 0.3, 0.001]),
)


def ranked(row: Row, temperature: float = 1.0) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Every token by logit and then by id, with its probability."""
    ids = np.lexsort((np.arange(len(row)), -row))
    ids = ids[np.isfinite(row[ids])]
    values = row[ids].astype(np.float64) / temperature
    probs = np.exp(values - values[0])
    return ids, probs / probs.sum()


def plain_cut(row: Row, top_p: float, min_p: float) -> list[int]:
    ids, probs = ranked(row)
    keep = int(np.searchsorted(np.cumsum(probs), top_p)) + 1 if top_p < 1 else len(ids)
    keep = min(keep, int((probs >= min_p * probs[0]).sum())) if min_p else keep
    return ids[: max(1, keep)].tolist()


def plain_typical(row: Row, mass: float) -> list[int]:
    ids, probs = ranked(row)
    surprise = -np.log(np.maximum(probs, 1e-300))
    order = np.argsort(np.abs(surprise - (probs * surprise).sum()), kind="stable")
    keep = int(np.searchsorted(np.cumsum(probs[order]), mass)) + 1
    return ids[np.sort(order[:keep])].tolist()


@settings(max_examples=300, deadline=None)
@given(rows, st.sampled_from([0.1, 0.5, 0.9, 0.95, 0.999, 1.0]), st.sampled_from([0.0, 0.01, 0.05, 0.5, 1.0]))
def test_what_is_cut_is_what_the_definition_cuts(row: Row, top_p: float, min_p: float) -> None:
    if top_p >= 1 and not min_p:
        return
    found = row_bounds.cut(row, Sampling(top_p=top_p, min_p=min_p))
    assert found is None or found.tolist() == plain_cut(row, top_p, min_p)


@settings(max_examples=200, deadline=None)
@given(rows, st.sampled_from([0.1, 0.5, 0.9, 0.95, 0.999]))
def test_what_is_typical_is_what_the_definition_says(row: Row, mass: float) -> None:
    found = row_bounds.typical(row, mass)
    assert found is None or found.tolist() == plain_typical(row, mass)


@settings(max_examples=200, deadline=None)
@given(rows, st.sampled_from([0.2, 0.7, 1.0, 1.5]), st.floats(0.0, 1.0, exclude_max=True))
def test_what_is_picked_is_what_the_definition_draws(row: Row, temperature: float, uniform: float) -> None:
    found = row_bounds.pick(row, temperature, uniform)
    if found is not None:
        ids, probs = ranked(row, temperature)
        reached = np.cumsum(probs)
        # numpy's own rounding of a running sum over a large row is the definition's, not ours.
        nearest = float(np.abs(reached - uniform).min())
        assert found == ids[min(int(np.searchsorted(reached, uniform, side="right")), len(ids) - 1)] or nearest < 1e-12
        assert found == distribution(row, replace(OPEN, temperature=temperature)).draw(uniform) or nearest < 1e-12


@pytest.mark.parametrize("n_vocab", [49_152, 151_936, 262_144])
def test_rows_of_real_vocabularies_are_answered(n_vocab: int) -> None:
    """Bounds that never suffice would be right too."""
    answered = dict.fromkeys(("cut", "typical", "pick"), 0)
    rng = np.random.default_rng(n_vocab)
    for seed in range(20):
        row = made(n_vocab, seed, 2.2, 40)
        answered["cut"] += row_bounds.cut(row, Sampling(top_p=0.95, min_p=0.0)) is not None
        answered["typical"] += row_bounds.typical(row, 0.9) is not None
        answered["pick"] += row_bounds.pick(row, 1.0, 0.98 * rng.random()) is not None
    assert all(n >= 19 for n in answered.values()), answered


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_a_seed_draws_the_same_with_and_without_bounds(temperature: float) -> None:
    sampling = replace(OPEN, temperature=temperature)
    quick, slow = Sampler(sampling), Sampler(sampling)
    for seed in range(60):
        row = made(9_000, seed, 2.2, 12 if seed % 2 else 0)
        assert quick.choose(row, []) == slow.draw(distribution(row, sampling))
