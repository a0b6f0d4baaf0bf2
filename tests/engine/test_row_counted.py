"""Draws by counting: what the rules say in double precision, for rows of which a good part may be drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.test_logits import defined
from localllm.engine.messages import Sampling
from localllm.engine.sampling import row_counted
from localllm.engine.sampling.logits import Logits
from localllm.engine.sampling.ranking import Row
from localllm.engine.sampling.sampler import Sampler
from localllm.engine.sampling.top_choices import Excluded

OPEN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


def flat(n: int, seed: int, spread: float, kind: str) -> Row:
    """Rows without words that stand out, or with some; with equals, forbidden tokens, or much too far below."""
    rng = np.random.default_rng(seed)
    row = rng.normal(0.0, spread, n).astype(np.float32)
    if kind == "ties":
        row = np.round(row * 4) / np.float32(4)
    elif kind == "forbidden":
        row[rng.random(n) < 0.4] = -np.inf
    elif kind == "few":
        row[rng.random(n) < 0.9] = -np.inf
    elif kind == "deep":
        row[rng.random(n) < 0.4] -= np.float32(500.0)
    elif kind == "peaked":
        row[rng.integers(0, n, 20)] += np.linspace(18, 6, 20).astype(np.float32)
    elif kind == "large":
        row = row * np.float32(8) + np.float32(1e4)
    return row


rows = st.builds(
    flat,
    st.sampled_from([8_192, 9_001, 40_000]),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.01, 0.5, 2.2, 20.0]),
    st.sampled_from(["noise", "noise", "ties", "forbidden", "few", "deep", "peaked", "large"]),
)
filtered = st.builds(
    Sampling,
    temperature=st.sampled_from([0.2, 0.7, 1.0, 1.0, 1.8]),
    top_k=st.just(0),
    top_p=st.sampled_from([0.2, 0.9, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-4, 0.05, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 0.5, 0.95]),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.5]),
    xtc_threshold=st.sampled_from([0.001, 0.1]),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=200, deadline=None)
@given(rows, filtered, st.floats(0.0, 1.0, exclude_max=True))
def test_what_is_drawn_is_what_the_rules_say(row: Row, sampling: Sampling, uniform: float) -> None:
    before = row.copy()
    excluded = Excluded(sampling.xtc_probability, sampling.xtc_threshold)
    found = row_counted.draw(Logits(row), sampling, uniform, excluded)
    assert np.array_equal(row, before)
    if found is not None and (sampling.typical_p < 1 or sampling.top_p < 1 or sampling.min_p):
        expected, near = defined(row, sampling, uniform)
        assert found == expected or near < 1e-11


@settings(max_examples=100, deadline=None)
@given(rows, filtered)
def test_a_sampler_chooses_what_the_rules_say(row: Row, sampling: Sampling) -> None:
    expected, near = defined(row, sampling, Sampler(sampling).uniform())
    assert Sampler(sampling).choose(row, []) == expected or near < 1e-11


def test_rows_of_real_vocabularies_are_answered() -> None:
    """Giving no answer would be right too."""
    answered = dict.fromkeys(("p", "typical", "hot", "all"), 0)
    uniforms = np.random.default_rng(3).random(20)
    for seed, uniform in enumerate(uniforms):
        logits = Logits(flat(262_144, seed, 2.2, "noise"))
        for name, sampling in {
            "p": replace(OPEN, top_p=0.95),
            "typical": replace(OPEN, typical_p=0.9),
            "hot": replace(OPEN, top_p=0.95, temperature=1.4),
            "all": replace(OPEN, typical_p=0.9, top_p=0.95, min_p=1e-4, temperature=0.8),
        }.items():
            answered[name] += row_counted.draw(logits, sampling, float(uniform)) is not None
    assert all(n >= 19 for n in answered.values()), answered
