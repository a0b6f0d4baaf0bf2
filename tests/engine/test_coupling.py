"""Maximal coupling: emitted tokens follow the target's distribution exactly, and the acceptance
rate is the highest possible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling_reference import acceptance_probability
from localllm.engine.messages import Sampling
from localllm.engine.sampling.filters import distribution
from localllm.engine.sampling.rejection import Distribution, rejection_sample, residual
from localllm.engine.sampling.sampler import Sampler
from support.examples import examples

WEIGHTS = st.lists(st.integers(0, 20), min_size=2, max_size=8).filter(any)


def dist(weights: list[int]) -> Distribution:
    """Return a sparse distribution without the tokens of weight 0, the most probable token
    first."""
    total = sum(weights)
    ids = [i for i in sorted(range(len(weights)), key=lambda i: -weights[i]) if weights[i]]
    return Distribution(
        np.asarray(ids, dtype=np.int64), np.asarray([weights[i] / total for i in ids])
    )


def emitted_exactly(p: Distribution, q: Distribution, n: int) -> np.ndarray:
    """Return the distribution of the emitted token by enumeration: q(x)·min(1, p(x)/q(x)) +
    P(rejected)·residual(x)."""
    out = np.zeros(n)
    rejected = 0.0
    for token, probability in zip(q.ids, q.probs, strict=True):
        accept = min(1.0, p.prob(int(token)) / probability)
        # `rejection_sample` accepts below that threshold and rejects above it.
        if accept > 0:
            assert rejection_sample(p, q, int(token), accept * 0.999, 0.5) == (int(token), True)
        if accept < 1:
            assert not rejection_sample(
                p, q, int(token), min(accept * 1.001 + 1e-9, 0.999999), 0.5
            )[1]
        out[token] += probability * accept
        rejected += probability * (1 - accept)
    left = residual(p, q)
    for token, probability in zip(left.ids, left.probs, strict=True):
        out[token] += rejected * probability
    return out


@given(WEIGHTS, WEIGHTS)
def test_the_emitted_distribution_is_the_targets(a: list[int], b: list[int]) -> None:
    n = max(len(a), len(b))
    p, q = dist(a), dist(b)
    target = np.asarray([p.prob(i) for i in range(n)])
    assert np.allclose(emitted_exactly(p, q, n), target, rtol=0.0, atol=1e-12)


@given(WEIGHTS, WEIGHTS)
def test_acceptance_is_one_minus_total_variation(a: list[int], b: list[int]) -> None:
    n = max(len(a), len(b))
    p, q = dist(a), dist(b)
    distance = 0.5 * sum(abs(p.prob(i) - q.prob(i)) for i in range(n))
    accepted = sum(w * min(1.0, p.prob(int(t)) / w) for t, w in zip(q.ids, q.probs, strict=True))
    assert abs(acceptance_probability(p, q) - (1 - distance)) < 1e-12
    assert abs(accepted - (1 - distance)) < 1e-12


@pytest.mark.parametrize("draws", [20_000, pytest.param(100_000, marks=pytest.mark.long)])
@settings(max_examples=examples(5))
@given(WEIGHTS, WEIGHTS, st.integers(0, 2**32))
def test_many_draws_fit_the_target(draws: int, a: list[int], b: list[int], seed: int) -> None:
    p, q = dist(a), dist(b)
    rng = np.random.default_rng(seed)
    uniforms = rng.random((draws, 3))
    drafted = q.ids[
        np.minimum(
            np.searchsorted(np.cumsum(q.probs), uniforms[:, 0], side="right"), len(q.ids) - 1
        )
    ]
    counts = np.zeros(max(len(a), len(b)))
    accepted = 0
    for token, (_, accept, draw) in zip(drafted.tolist(), uniforms.tolist(), strict=True):
        out, right = rejection_sample(p, q, token, accept, draw)
        counts[out] += 1
        accepted += right
    expected = p.probs * draws
    assert counts[[i for i in range(len(counts)) if i not in p.ids]].sum() == 0
    chi_square = float(((counts[p.ids] - expected) ** 2 / expected).sum())
    # Mean k − 1, standard deviation √(2(k−1)); a deviation of ten of these never happens by chance.
    freedom = len(p.ids) - 1
    assert chi_square <= freedom + 10 * np.sqrt(2 * max(freedom, 1))
    # Six standard deviations of a proportion, at its largest.
    assert abs(accepted / draws - acceptance_probability(p, q)) < 6 * 0.5 / np.sqrt(draws)


@settings(max_examples=examples(16))
@given(
    st.integers(0, 2**32),
    st.sampled_from([0, 3]),
    st.sampled_from([1.0, 0.8]),
    st.sampled_from([0.0, 0.1]),
)
def test_verification_uses_the_distribution_that_choose_samples_from(
    seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    """The sampler applies its filters and temperature to the logits before the result is used as
    p."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=12).astype(np.float32) * 2
    sampling = Sampling(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    p = distribution(logits, sampling)
    q = distribution(rng.normal(size=12).astype(np.float32), sampling)
    sampler = Sampler(sampling)
    accepted = [sampler.verify(logits, [], q.draw(sampler.uniform()), q)[1] for _ in range(2000)]
    assert abs(np.mean(accepted) - acceptance_probability(p, q)) < 0.06


def test_equal_distributions_accept_everything() -> None:
    p = dist([1, 2, 3])
    assert all(rejection_sample(p, p, t, 0.999999, 0.5) == (t, True) for t in (0, 1, 2))
    assert residual(p, p) is p
