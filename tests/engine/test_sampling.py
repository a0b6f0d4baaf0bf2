"""Which tokens may be drawn, in which order, with which probability: against a slow reading of the same rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.engine.messages import Sampling
from localllm.engine.sampling.ranking import Row, best_ids
from localllm.engine.sampling.sampler import Sampler, distribution

OPEN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Logits of vocabularies small and large, with many ties and, as a grammar leaves them, much that is forbidden."""
    n = draw(st.sampled_from([1, 2, 37, 300, 2_500, 9_000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    row = rng.normal(0, draw(st.sampled_from([0.5, 4.0])), n).astype(np.float32)
    if draw(st.booleans()):
        row = np.round(row).astype(np.float32)  # ties, and -0.0 beside 0.0
    allowed = draw(st.sampled_from([1.0, 0.5, 0.02, 0.0]))
    row[rng.random(n) > allowed] = -np.inf
    row[rng.integers(n)] = 1.0
    return row


filters = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 40, 700, 5_000]),
    top_p=st.sampled_from([0.1, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)


def by_rank(row: Row) -> list[int]:
    """Every token that is not forbidden: by logit, then by id."""
    values = row.tolist()
    return sorted((t for t, value in enumerate(values) if value > -math.inf), key=lambda t: (-values[t], t))


def shares(values: list[float]) -> list[float]:
    """Softmax."""
    exp = [math.exp(v - max(values)) for v in values]
    return [e / math.fsum(exp) for e in exp]


def read_slowly(row: Row, sampling: Sampling) -> dict[int, float]:
    """The rules one after the other: top_k, top_p, min_p, temperature."""
    ids = by_rank(row)
    ids = ids[: sampling.top_k] if sampling.top_k else ids
    if sampling.top_p < 1:
        kept, mass = [], 0.0
        for token, share in zip(ids, shares([float(row[t]) for t in ids]), strict=True):
            if mass >= sampling.top_p:
                break
            kept.append(token)
            mass += share
        ids = kept
    probs = shares([float(row[t]) for t in ids])
    ids = [t for t, p in zip(ids, probs, strict=True) if p >= sampling.min_p * probs[0]]
    return dict(zip(ids, shares([float(row[t]) / sampling.temperature for t in ids]), strict=True))


def is_what_the_rules_say(row: Row, sampling: Sampling) -> None:
    found = distribution(row, sampling)
    expected = read_slowly(row, sampling)
    probs = dict(zip(found.ids.tolist(), found.probs.tolist(), strict=True))
    # A share that ends on the limit to the last bit may fall on either side of it.
    assert len(probs.keys() ^ expected.keys()) <= 1
    if probs.keys() == expected.keys():
        assert all(math.isclose(probs[t], expected[t], rel_tol=1e-9, abs_tol=1e-15) for t in probs)
    assert math.isclose(float(found.probs.sum()), 1.0, rel_tol=1e-9)
    head = found.ids.tolist()[:512]
    assert head == by_rank(row)[: len(head)]


@settings(deadline=None, max_examples=50)
@given(rows(), filters)
def test_it_is_what_the_rules_say(row: Row, sampling: Sampling) -> None:
    is_what_the_rules_say(row, sampling)


@pytest.mark.long
@settings(deadline=None, max_examples=300)
@given(rows(), filters)
def test_it_is_what_the_rules_say_of_many(row: Row, sampling: Sampling) -> None:
    is_what_the_rules_say(row, sampling)


@settings(deadline=None, max_examples=150)
@given(rows(), st.sampled_from([1, 2, 40, 300, 2_000, 20_000]))
def test_the_best_are_ranked_by_logit_then_by_id(row: Row, k: int) -> None:
    assert best_ids(row, k).tolist() == by_rank(row)[:k]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=0), Sampling(top_k=0, typical_p=0.9), OPEN])
def test_ties_keep_their_order_whatever_lies_far_below(sampling: Sampling) -> None:
    rng = np.random.default_rng(3)
    tied = rng.choice(50_000, 60, replace=False)
    drawn = set()
    orders = set()
    for far in range(4):
        row = np.full(50_000, -np.inf, dtype=np.float32)
        row[rng.choice(50_000, 20_000, replace=False)] = -200.0 - far
        row[tied] = 5.0
        found = distribution(row, sampling)
        orders.add(tuple(t for t in found.ids.tolist() if row[t] == 5.0))
        drawn.add(tuple(Sampler(Sampling(seed=s)).draw(found) for s in range(20)))
    (order,) = orders
    assert list(order) == sorted(tied.tolist())[: len(order)]
    assert len(drawn) == 1


def test_a_row_on_which_everything_is_forbidden_still_gives_a_token() -> None:
    row = np.full(5_000, -np.inf, dtype=np.float32)
    for sampling in (Sampling(), Sampling(top_k=0), OPEN):
        found = distribution(row, sampling)
        assert found.ids.tolist() == [0]
        assert found.probs.tolist() == [1.0]


def test_a_wide_nucleus_is_ranked_to_its_end() -> None:
    row = np.random.default_rng(1).normal(0, 0.1, 20_000).astype(np.float32)
    found = distribution(row, Sampling(temperature=1.0, top_k=0, top_p=0.9, min_p=0.0))
    assert 15_000 < len(found.ids) < 20_000
    assert found.ids.tolist() == by_rank(row)[: len(found.ids)]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    row = np.zeros(4_000, dtype=np.float32)
    row[[17, 900]] = 2.0
    assert Sampler(Sampling(temperature=0)).choose(row, []) == 17
    assert best_ids(row, 2).tolist() == [17, 900]
