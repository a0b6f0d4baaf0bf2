"""The sampling invariant: draws follow the definition in double precision within `TOLERANCE`, and
greedy sampling gives the same token.

The filters keep the defined tokens. Exceptions are tokens with at most `TOLERANCE` of the
probability together, or limits that differ by a rounding error. The remaining tokens have the
defined probabilities: the distance in total variation is below `TOLERANCE`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.sampling_reference import (
    KINDS,
    Row,
    after_penalties,
    interval_faults,
    kept,
    probabilities,
    readable,
    rows_like_models,
    tempered,
)
from localllm.engine.messages import Sampling
from localllm.engine.sampling.filters import distribution
from localllm.engine.sampling.sampler import Sampler, TokenRules
from support.examples import examples

TOLERANCE = 2e-5
OPEN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)

rows = st.builds(
    rows_like_models,
    st.sampled_from([1, 2, 70, 5_000, 9_001, 40_000]),
    st.integers(0, 2**32),
    st.sampled_from(KINDS),
)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.05, 0.3, 0.7, 1.0, 1.0, 1.8]),
    top_k=st.sampled_from([0, 0, 0, 1, 3, 40, 512, 700, 6_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.95, 0.5, 0.1]),
    min_p=st.sampled_from([0.0, 0.0, 1e-4, 0.05, 0.5, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 1.0, 0.95, 0.5, 0.2]),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0013, 0.1, 0.3, 0.6]),
)
changes = st.builds(
    dict,
    repeat_penalty=st.sampled_from([0.8, 1.0, 1.3]),
    repeat_last_n=st.sampled_from([-1, 0, 5, 64]),
    presence_penalty=st.sampled_from([-0.5, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    logit_bias=st.sampled_from([{}, {3: 4.0, 5: -100.0, 10**7: 1.0}]),
    dry_multiplier=st.sampled_from([0.0, 0.8]),
    dry_penalty_last_n=st.sampled_from([-1, 12]),
)


class Allows:
    """The constraint of an answer whose grammar allows the given tokens."""

    finished = False
    active = True
    in_call = False
    can_continue_unconstrained = False

    def __init__(self, allowed: NDArray[np.bool_]) -> None:
        self.allowed_now, self.accepted = allowed, []  # type: ignore[var-annotated]

    def apply(self, logits: Row) -> None:
        logits[~self.allowed_now] = -np.inf

    def accept(self, token: int) -> int:
        self.accepted.append(token)
        return token


def spell(token: int) -> bytes:
    return b"%d " % token if token % 7 else b"\n"


def history_of(row: Row, seed: int, length: int) -> list[int]:
    """Return earlier tokens: mostly likely ones, many of them repeated."""
    rng = np.random.default_rng(seed)
    likely = np.argsort(-row)[:20]
    some = np.where(
        rng.random(length) < 0.7, rng.choice(likely, length), rng.integers(0, len(row), length)
    )
    return [int(t) for t in np.concatenate([some, some[-5:]])]


def drawn_by(row: Row, sampling: Sampling, n: int) -> list[tuple[float, int]]:
    """Return `n` draws as (uniform number, token)."""
    drawn = []
    for seed in range(n):
        seeded = replace(sampling, seed=seed)
        drawn.append((Sampler(seeded).uniform(), Sampler(seeded).choose(row, [])))
    return drawn


def distance(found: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    return 0.5 * float(np.abs(found - expected).sum())


def distributed(row: Row, sampling: Sampling) -> NDArray[np.float64]:
    found = distribution(row, sampling)
    out = np.zeros(len(row))
    out[found.ids] = found.probs
    assert abs(float(found.probs.sum()) - 1.0) < 1e-9
    return out


def at_the_limits(sampling: Sampling) -> Iterator[Sampling]:
    """Return the same filters with each limit moved by a rounding error, in all combinations of
    directions."""
    limits = [
        n for n in ("top_p", "typical_p", "min_p", "xtc_threshold") if 0 < getattr(sampling, n) < 1
    ]
    for signs in itertools.product((-1.0, 0.0, 1.0), repeat=len(limits)):
        moved = {
            n: getattr(sampling, n) * (1 + sign * 2e-6)
            for n, sign in zip(limits, signs, strict=True)
        }
        yield replace(sampling, **moved)


def follows(found: NDArray[np.float64], logits: Row, sampling: Sampling) -> bool:
    """Return whether the distribution found is the defined one within the tolerance."""
    row = readable(logits)
    share = tempered(row, kept(row, OPEN), OPEN)
    for near in itertools.chain([sampling], at_the_limits(sampling)):
        ids = kept(row, near)
        wanted = tempered(row, ids, near)
        # Single precision cannot represent the smallest probabilities.
        missing = ids[(found[ids] == 0) & (wanted[ids] > 1e-30)]
        added = np.setdiff1d(np.flatnonzero(found), ids)
        if share[missing].sum() + share[added].sum() > TOLERANCE:
            continue
        if len(missing) or len(added):
            ids = np.setdiff1d(np.concatenate([ids, added]), missing)
            wanted = tempered(row, ids[np.lexsort((ids, -row[ids]))], near)
        if distance(found, wanted) <= TOLERANCE:
            return True
    return False


@settings(max_examples=examples(300))
@given(rows, samplings)
def test_the_sampling_distribution_equals_its_definition(row: Row, sampling: Sampling) -> None:
    before = row.copy()
    assert follows(distributed(row, sampling), row, sampling)
    assert np.array_equal(row, before, equal_nan=True)


@settings(max_examples=examples(100))
@given(rows, samplings)
def test_a_draw_follows_the_distribution(row: Row, sampling: Sampling) -> None:
    drawn = drawn_by(row, sampling, 40)
    assert interval_faults(drawn, distributed(row, sampling), TOLERANCE) == []


@settings(max_examples=examples(150))
@given(
    rows,
    samplings,
    changes,
    st.integers(0, 2**32),
    st.sampled_from([1.0, 0.5, 0.01, 0.0]),
    st.sampled_from([0, 3, 80]),
)
def test_options_of_a_request_change_the_distribution(
    row: Row, sampling: Sampling, change: dict[str, float], seed: int, share: float, length: int
) -> None:
    """A request's bias, penalties, DRY, grammar mask and banned ends change the distribution, and
    the drawn token follows it."""
    sampling = replace(sampling, **change, seed=seed)  # type: ignore[arg-type]
    history = history_of(row, seed, length)
    allowed = np.random.default_rng(seed).random(len(row)) < share if share < 1.0 else None
    constraint = Allows(allowed) if allowed is not None else None
    rules = TokenRules(
        min_length=len(history) + 1, end_tokens=tuple({0, len(row) // 2}), text=spell
    )
    sampler = Sampler(sampling, constraint, rules)  # type: ignore[arg-type]
    wanted = after_penalties(
        row, sampling, history, spell=spell, allowed=allowed, banned=rules.banned(len(history))
    )
    prepared = sampler.prepared(row, history)
    numbers = np.isfinite(row) & np.isfinite(wanted)
    if not np.isinf(row).any() and not np.isnan(row).any():
        np.testing.assert_allclose(prepared[numbers], wanted[numbers], rtol=1e-5, atol=1e-5)
        assert (prepared == -np.inf).tolist() == (wanted.astype(np.float32) == -np.inf).tolist()
    # After rounding to single precision, two different logits may be equal. The sampler decides the
    # order of such tokens.
    assert follows(distributed(prepared, sampling), prepared, sampling)
    token = sampler.choose(row, history)
    assert distributed(prepared, sampling)[token] > 0
    if (wanted > -np.inf).any() and np.inf not in row and not np.isnan(row).any():
        assert wanted[token] > -np.inf
    assert constraint is None or constraint.accepted == [token]
    greedy = Sampler(replace(sampling, temperature=0.0), constraint, rules)  # type: ignore[arg-type]
    assert greedy.choose(row, history) == int(readable(prepared).argmax())


FILTERS = {
    "none": OPEN,
    "none, T 0.7": replace(OPEN, temperature=0.7),
    "top_p": replace(OPEN, top_p=0.95),
    "top_p, T 1.4": replace(OPEN, top_p=0.95, temperature=1.4),
    "top_p 0.3": replace(OPEN, top_p=0.3),
    "min_p": replace(OPEN, min_p=0.05),
    "min_p 1e-4, T 0.8": replace(OPEN, min_p=1e-4, temperature=0.8),
    "top_p, min_p 1e-5": replace(OPEN, min_p=1e-5, top_p=0.99),
    "typical": replace(OPEN, typical_p=0.9),
    "typical, top_p, min_p, T 0.8": replace(
        OPEN, typical_p=0.9, top_p=0.95, min_p=1e-4, temperature=0.8
    ),
    "XTC": replace(OPEN, xtc_probability=0.5),
    "XTC 1e-4, T 0.8": replace(OPEN, xtc_probability=0.5, xtc_threshold=1e-4, temperature=0.8),
    "top_k 40": replace(OPEN, top_k=40, top_p=0.95, min_p=0.05),
    "top_k 512": replace(OPEN, top_k=512),
    "top_k 20000": replace(OPEN, top_k=20_000),
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize(
    "kind", ["words", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("flat", "bf16"))]
)
def test_rows_of_262144_tokens_follow_the_definition(kind: str, name: str) -> None:
    sampling = FILTERS[name]
    row = rows_like_models(262_144, 7, kind)
    found = distributed(row, sampling)
    assert follows(found, row, sampling)
    assert interval_faults(drawn_by(row, sampling, 25), found, TOLERANCE) == []


def test_many_draws_of_one_stream_fit_the_distribution() -> None:
    """Chi-squared over 4,000 draws of one request."""
    row = rows_like_models(9_001, 5, "words")
    for sampling in (Sampling(seed=1), OPEN, replace(OPEN, top_p=0.9, xtc_probability=0.3)):
        sampler, probs, n = Sampler(sampling), probabilities(row, sampling), 4_000
        seen = np.bincount([sampler.choose(row, []) for _ in range(n)], minlength=len(row))
        assert not seen[probs == 0].any()
        large = probs * n >= 5
        chi = float(((seen[large] - probs[large] * n) ** 2 / (probs[large] * n)).sum())
        assert chi < int(large.sum()) + 5 * np.sqrt(2 * int(large.sum())) + 10


def histories(length: int) -> Seq[int]:
    return [(i * i) % 9_000 for i in range(length)]


def test_log_probabilities_are_those_of_the_unmodified_logits() -> None:
    for kind in ("words", "large", "equal", "forbidden", "flat"):
        row = rows_like_models(40_000, 1, kind)
        exact = row.astype(np.float64) - row.max()
        exact -= np.log(np.exp(exact).sum())
        sampler = Sampler(Sampling(repeat_penalty=1.5, logit_bias={7: 3.0}))
        sampler.choose(row, histories(30))
        own, best = sampler.log_probabilities(row, 7, 20)
        assert own == exact[7] or abs(own - exact[7]) < 2e-5
        order = np.lexsort((np.arange(len(row)), -row))[: len(best)]
        assert [t for t, _ in best] == order.tolist()
        np.testing.assert_allclose([p for _, p in best], exact[order], atol=2e-5)
