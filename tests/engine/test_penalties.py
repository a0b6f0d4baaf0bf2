"""Penalties for earlier tokens: incremental counts equal counts made anew."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.messages import Sampling
from localllm.engine.sampling.penalties import Tallies
from localllm.engine.sampling.sampler import Sampler


@given(
    st.lists(st.lists(st.integers(0, 30), max_size=90), min_size=1, max_size=12),
    st.sampled_from([-1, 0, 1, 5, 64, 100]),
)
def test_penalty_counts_cover_exactly_the_window(pieces: list[list[int]], window: int) -> None:
    tallies, line = Tallies(window), []
    for piece in pieces:
        line += piece
        ids, counts = tallies.follow(line)
        last = line if window < 0 else line[max(0, len(line) - window) :]
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == Counter(last)


def test_penalties_equal_their_documented_formulas() -> None:
    rng = random.Random(1)
    sampling = Sampling(
        temperature=0.0,
        repeat_penalty=1.3,
        repeat_last_n=20,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={3: 2.0, 4: -100.0},
    )
    sampler, history = Sampler(sampling), [rng.randrange(40) for _ in range(50)]
    for seed in range(60):
        row = np.random.default_rng(seed).normal(0, 2, 40).astype(np.float32)
        wanted = row.copy()
        wanted[3] += 2.0
        wanted[4] = -np.inf
        for token, count in Counter(history[-20:]).items():
            value = wanted[token] / 1.3 if wanted[token] > 0 else wanted[token] * 1.3
            wanted[token] = value - 0.4 - count * 0.2
        assert np.allclose(sampler.prepared(row, history), wanted, atol=1e-5)
        # Tokens of a possible draft are counted, and removed again afterwards.
        sampler.prepared(row, [*history, 1, 2, 3])
        token = sampler.choose(row, history)
        assert token == int(wanted.argmax())
        history.append(token)


def test_counting_a_token_does_not_read_all_earlier_tokens() -> None:
    """The window is the complete sequence, and only new tokens are read."""

    class Line(list[int]):
        read = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            found = super().__getitem__(key)
            Line.read += len(found) if isinstance(key, slice) else 1
            return found

        def __iter__(self):  # type: ignore[no-untyped-def]
            Line.read += len(self)
            return super().__iter__()

    history = Line(i % 500 for i in range(20_000))
    sampler = Sampler(Sampling(repeat_penalty=1.1, repeat_last_n=-1, seed=1))
    row = np.zeros(600, dtype=np.float32)
    history.append(sampler.choose(row, history))
    Line.read = 0
    for _ in range(50):
        history.append(sampler.choose(row, history))
    assert Line.read == 50
