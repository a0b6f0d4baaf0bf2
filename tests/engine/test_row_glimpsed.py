"""Draws by the peaks of groups alone: what the rules say in double precision, or nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.test_logits import changed, defined, history_of, penalties, rows
from localllm.engine.messages import Sampling
from localllm.engine.sampling import row_glimpsed
from localllm.engine.sampling.logits import Logits
from localllm.engine.sampling.ranking import Row
from localllm.engine.sampling.top_choices import Excluded

OPEN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.2, 0.7, 1.0, 1.0, 1.8]),
    top_k=st.just(0),
    top_p=st.sampled_from([0.2, 0.9, 0.95, 0.999, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-4, 0.05, 1.0]),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.001, 0.1, 0.5]),
)


@settings(max_examples=400, deadline=None)
@given(
    rows,
    samplings,
    penalties,
    st.floats(0.0, 1.0, exclude_max=True),
    st.integers(0, 99),
    st.sampled_from([0, 90]),
    st.sampled_from([0, 0, 40]),
)
def test_what_is_drawn_is_what_the_rules_say(
    row: Row, sampling: Sampling, penalty: Sampling, uniform: float, seed: int, length: int, n_own: int
) -> None:
    logits, _ = changed(row, penalty, history_of(row, seed, length), seed, n_own)
    excluded = Excluded(sampling.xtc_probability, sampling.xtc_threshold)
    found = row_glimpsed.draw(logits, sampling, uniform, excluded)
    if found is not None:
        expected, near = defined(logits.whole(), sampling, uniform)
        assert found == expected or near < 1e-11


@pytest.mark.parametrize("sampling", [OPEN, replace(OPEN, top_p=0.95), replace(OPEN, temperature=0.7)], ids=str)
def test_rows_with_words_that_stand_out_are_mostly_answered(sampling: Sampling) -> None:
    """Giving no answer would be right too."""
    rng = np.random.default_rng(4)
    answered = 0
    for _ in range(40):
        row = rng.normal(0.0, 2.2, 262_144).astype(np.float32)
        row[rng.integers(0, len(row), 40)] += np.linspace(18, 6, 40).astype(np.float32)
        answered += row_glimpsed.draw(Logits(row), sampling, float(rng.random())) is not None
    assert answered >= 25
