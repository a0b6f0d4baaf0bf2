"""A row and its changes, looked at without a copy: the same answers as of the changed row itself, whatever it holds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from localllm.engine.messages import Sampling
from localllm.engine.sampling.grammar import MatcherConstraint
from localllm.engine.sampling.logits import Changes, Logits
from localllm.engine.sampling.penalties import Tallies, Tally
from localllm.engine.sampling.ranking import Row
from localllm.engine.sampling.sampler import Bounds, Sampler
from localllm.engine.sampling.weights import Weights

OPEN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
KINDS = ("words", "noise", "ties", "equal", "spike", "forbidden", "large", "nan", "infinite")


def row_of(n: int, seed: int, kind: str) -> Row:
    """Logits as models have them, and as nobody wants them."""
    rng = np.random.default_rng(seed)
    row = rng.normal(0.0, 2.2, n).astype(np.float32)
    some = rng.integers(0, n, 30)
    if kind != "noise":
        row[some] += np.linspace(18, 6, 30).astype(np.float32)
    if kind == "ties":
        row = np.round(row)
    elif kind == "equal":
        row[:] = 3.0
    elif kind == "spike":
        row[some[0]] = 90.0
    elif kind == "forbidden":
        row[rng.random(n) < 0.999] = -np.inf
        row[some[0]] = 1.0
    elif kind == "large":
        row = row * 9.0 - 300.0
    elif kind == "nan":
        row[some[:3]] = np.nan
    elif kind == "infinite":
        row[some[:2]] = np.inf
    return row.astype(np.float32)


rows = st.builds(row_of, st.sampled_from([1, 70, 9_001, 40_000]), st.integers(0, 2**32), st.sampled_from(KINDS))
penalties = st.builds(
    Sampling,
    repeat_penalty=st.sampled_from([0.8, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-0.5, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
)


def history_of(row: Row, seed: int, length: int) -> list[int]:
    """Tokens that came: the likely ones above all."""
    rng = np.random.default_rng(seed)
    likely = np.argsort(-row)[:20]
    return [
        int(t)
        for t in np.where(rng.random(length) < 0.5, rng.choice(likely, length), rng.integers(0, len(row), length))
    ]


def changed(row: Row, sampling: Sampling, history: Seq[int], seed: int, n_own: int) -> tuple[Logits, Row]:
    """Changes kept beside the row, and the row they make."""
    rng = np.random.default_rng(seed)
    tallies, out = Tallies(-1), row.copy()
    ids = tallies.read(history, len(row))
    for token in ids:
        value = out[token]
        times, share = value * np.float32(sampling.repeat_penalty), value / np.float32(sampling.repeat_penalty)
        value = share if value > 0 else times
        value = np.float32(value - np.float32(sampling.presence_penalty))
        out[token] = value - np.float32(int(tallies.of[token]) * sampling.frequency_penalty)
    own = np.unique(rng.integers(0, len(row), n_own)) if n_own else np.empty(0, dtype=np.int64)
    values = rng.normal(8.0, 8.0, len(own)).astype(np.float32)
    values[: len(own) // 3] = -np.inf
    out[own] = values
    tally = Tally(ids, tallies.of, sampling) if len(ids) else None
    return Logits(row, Changes(own, values, tally)), out


def readable(row: Row) -> Row:
    """What is no number is never drawn, and of infinite ones there are no greater."""
    row = np.where(np.isnan(row), np.float32(-np.inf), row)
    return np.where(row == np.inf, np.float32(0), np.float32(-np.inf)) if np.inf in row else row


@settings(max_examples=150, deadline=None)
@given(rows, penalties, st.integers(0, 99), st.sampled_from([0, 3, 90, 3_000]), st.sampled_from([0, 1, 40]))
def test_a_changed_row_is_what_its_copy_is(row: Row, sampling: Sampling, seed: int, length: int, n_own: int) -> None:
    logits, copy = changed(row, sampling, history_of(row, seed, length), seed, n_own)
    before = row.copy()
    wanted = readable(copy)
    ranks = np.lexsort((np.arange(len(row)), -wanted))
    ranks = ranks[wanted[ranks] > -np.inf]
    np.testing.assert_allclose(logits.whole(), wanted, rtol=1e-6)
    exact = logits.whole()
    ranks = np.lexsort((np.arange(len(row)), -exact))
    ranks = ranks[exact[ranks] > -np.inf]
    for k in (1, 3, 40, 300):
        assert logits.top(k).tolist() == ranks[:k].tolist()
    assert logits.greatest() == (ranks[0] if len(ranks) else 0)
    if np.isfinite(row).any() and np.isfinite(row.max()):
        assert logits.best() == exact.max()
    some = np.random.default_rng(seed).integers(0, len(row), 50)
    if np.isfinite(row.max()):
        assert logits.at(some).tolist() == exact[some].tolist()
    assert np.array_equal(row, before, equal_nan=True)


@settings(max_examples=150, deadline=None)
@given(rows, st.sampled_from([0.05, 0.3, 0.7, 1.0, 1.7]))
def test_the_total_is_as_near_as_it_says(row: Row, temperature: float) -> None:
    for moments in (False, True):
        weights = Weights(row, temperature, moments=moments and temperature == 1.0)
        if not np.isfinite(row.max()):
            assert not weights.usable
            continue
        exact = np.exp((row.astype(np.float64) - weights.offset) / temperature)
        assert abs(weights.total - exact.sum()) <= weights.error * exact.sum()
        blocks = np.add.reduceat(exact, np.arange(0, len(row), 64))
        assert np.allclose(weights.sums, blocks, rtol=1e-4, atol=1e-5 * exact.sum())
        if weights.moments:
            with np.errstate(invalid="ignore"):
                parts = np.where(exact > 0, exact * (row - weights.offset), 0.0)
            assert abs(weights.moment - parts.sum()) <= weights.moment_error


combinations = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.4]),
    top_k=st.sampled_from([0, 0, 1, 40, 700]),
    top_p=st.sampled_from([1.0, 0.95, 0.3]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    typical_p=st.sampled_from([1.0, 1.0, 0.9]),
    repeat_penalty=st.sampled_from([1.0, 1.2]),
    repeat_last_n=st.sampled_from([-1, 64]),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    logit_bias=st.sampled_from([{}, {3: 4.0, 5: -100.0, 10**7: 1.0}]),
    dry_multiplier=st.sampled_from([0.0, 0.8]),
    dry_penalty_last_n=st.sampled_from([-1, 64]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
)


def defined(row: Row, sampling: Sampling, uniform: float) -> tuple[int, float]:
    """The token at `uniform` by the rules one after the other in double precision, and how near it was to another."""
    s = sampling
    ids = np.lexsort((np.arange(len(row)), -row))
    ids = ids[row[ids] > -np.inf]
    if not len(ids):
        return 0, 1.0

    def shares(ids: np.ndarray, heat: float = 1.0) -> np.ndarray:
        exp = np.exp((row[ids].astype(np.float64) - float(row[ids].max())) / heat)
        return np.asarray(exp / exp.sum())

    near = 1.0

    def reached(running: np.ndarray, goal: float) -> int:
        nonlocal near
        near = min(near, float(np.abs(running - goal).min()))
        return int(np.searchsorted(running, goal)) + 1

    whole = not (0 < s.top_k < len(row) or s.typical_p < 1 or s.top_p < 1 or s.min_p) and len(ids) > 2048
    if 0 < s.top_k < len(row):
        ids = ids[: s.top_k]
    if s.typical_p < 1:
        p = shares(ids)
        surprise = -np.log(np.maximum(p, 1e-300))
        far = np.abs(surprise - (p * surprise).sum())
        order = np.argsort(far, kind="stable")
        keep = reached(np.cumsum(p[order]), s.typical_p)
        if keep < len(ids):
            near = min(near, float(np.abs(np.diff(far[order[max(0, keep - 3) : keep + 2]])).min()))
        ids = ids[np.sort(order[:keep])]
    if s.top_p < 1 or s.min_p:
        p = shares(ids)
        keep = reached(np.cumsum(p), s.top_p) if s.top_p < 1 else len(ids)
        ids = ids[: max(1, min(keep, int((p >= s.min_p * p[0]).sum())))]
    if whole:  # the head in order, what is behind it by id
        ids = np.concatenate([ids[:512], np.sort(ids[512:])])
    p, hot = shares(ids), shares(ids, s.temperature)
    gone = max(0, int((p >= s.xtc_threshold).sum()) - 1) if s.xtc_probability else 0
    if gone:
        near = min(near, float(np.abs(p - s.xtc_threshold).min()))
        rest = hot.copy()
        rest[:gone] = 0.0
        hot = (1 - s.xtc_probability) * hot + s.xtc_probability * rest / rest.sum()
    running = np.cumsum(hot)
    near = min(near, float(np.abs(running - uniform).min()))
    return int(ids[min(int(np.searchsorted(running, uniform, side="right")), len(ids) - 1)]), near


@settings(max_examples=150, deadline=None)
@given(rows, combinations, st.sampled_from([3, 200]))
def test_every_combination_chooses_what_the_rules_say(row: Row, sampling: Sampling, length: int) -> None:
    history = history_of(row, 5, length)
    bounds = Bounds(open_until=length + 1, ends=(0, 2), text=lambda t: b"%d " % t)
    prepared = Sampler(sampling, None, bounds).prepared(row, history)
    chosen = Sampler(sampling, None, bounds).choose(row, history)
    if sampling.temperature == 0:
        assert chosen == int(prepared.argmax())
        return
    expected, near = defined(prepared, sampling, Sampler(sampling).uniform())
    assert chosen == expected or near < 1e-11


class Bits:
    """Allows what its bits say, in the two ways in which a grammar can be asked."""

    def __init__(self, bits: np.ndarray) -> None:
        self.matcher = MatcherConstraint(self, len(bits))
        self._packed = np.packbits(bits, bitorder="little").tobytes()
        self.accepted: list[int] = []

    def compute_bitmask(self) -> bytes:
        return self._packed

    def consume_token(self, token: int) -> None:
        self.accepted.append(token)


class Slow:
    """The same, asked by `apply` alone."""

    def __init__(self, constraint: MatcherConstraint) -> None:
        self.apply, self.accept = constraint.apply, constraint.accept


@settings(max_examples=150, deadline=None)
@given(rows, combinations, st.sampled_from([1.0, 0.5, 0.01, 0.0]), st.booleans())
def test_what_a_grammar_leaves_is_chosen_from_however_it_is_asked(
    row: Row, sampling: Sampling, share: float, opened: bool
) -> None:
    assume(row.max() != np.inf)
    bits = np.random.default_rng(sampling.seed).random(len(row)) < share
    history = history_of(row, 3, 20)
    bounds = Bounds(open_until=30 * opened, ends=(0, 5), text=lambda t: b"%d " % t)
    asked = Bits(bits)
    quick = Sampler(sampling, asked.matcher, bounds)
    slow = Sampler(sampling, Slow(Bits(bits).matcher), bounds)  # type: ignore[arg-type]
    token = quick.choose(row, history)
    assert token == slow.choose(row, history)
    assert asked.accepted == [token]
    prepared = quick.prepared(row, history)
    assert prepared[token] > -np.inf or not (prepared > -np.inf).any()


@pytest.mark.parametrize("n_vocab", [262_144])
def test_draws_of_a_real_vocabulary_are_those_of_the_rules(n_vocab: int) -> None:
    """In its head and far behind it."""
    row = row_of(n_vocab, 3, "words")
    flat = row_of(n_vocab, 4, "noise")
    for seed in range(4):
        for sampling in (replace(OPEN, seed=seed), replace(OPEN, seed=seed, temperature=0.8, xtc_probability=0.5)):
            for given_row in (row, flat):
                uniform = Sampler(sampling).uniform()
                assert Sampler(sampling).choose(given_row, []) == defined(given_row, sampling, uniform)[0]


def test_log_probabilities_are_those_of_the_row_as_it_came() -> None:
    for kind in ("words", "large", "equal", "forbidden"):
        row = row_of(40_000, 1, kind)
        exact = row.astype(np.float64) - row.max()
        exact -= np.log(np.exp(exact).sum())
        sampler = Sampler(Sampling(repeat_penalty=1.5, logit_bias={7: 3.0}))
        sampler.choose(row, [1, 2, 3])
        own, best = sampler.log_probabilities(row, 7, 20)
        assert own == exact[7] or abs(own - exact[7]) < 2e-5
        order = np.lexsort((np.arange(len(row)), -row))[: len(best)]
        assert [t for t, _ in best] == order.tolist()
        np.testing.assert_allclose([p for _, p in best], exact[order], atol=2e-5)


def test_nothing_is_copied_for_what_a_request_changes() -> None:
    """What a token costs in memory does not depend on how much changed."""
    import tracemalloc

    row = row_of(262_144, 1, "words")
    history = list(range(5_000))
    sampler = Sampler(replace(OPEN, top_k=40, repeat_penalty=1.1, repeat_last_n=-1, logit_bias={5: 1.0}))
    sampler.choose(row, history)
    tracemalloc.start()
    sampler.choose(row, history)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < row.nbytes
