"""Tokens sampled on the device equal those of our own sampler, and the next step starts before they
are read."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling_reference import (
    KINDS,
    after_penalties,
    interval_faults,
    probabilities,
    rows_like_models,
)
from localllm.engine.messages import Sampling
from localllm.engine.sampling.sampler import Sampler, TokenRules
from localllm_backends.contract import SampleSpec, SeenTokens
from localllm_backends.mlx import backend_type as mlx
from support.examples import examples

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(mlx.available() is not None, reason=str(mlx.available())),
]


# Single precision: probabilities and their sums have smaller errors than this.
NEAR = 1e-4


def faults(
    row: np.ndarray, sampling: Sampling, drawn: list[tuple[float, int]], **changes: Any
) -> list[str]:
    """Return the violations of the definition in double precision. Of all limits of top_p and min_p
    within single precision, the best match counts."""
    best: list[str] | None = None
    for by in (0.0, -NEAR / 10, NEAR / 10):
        near = replace(
            sampling,
            top_p=min(1.0, sampling.top_p + by),
            min_p=max(0.0, sampling.min_p * (1 + 10 * by)),
        )
        near = sampling if sampling.top_p >= 1.0 and not sampling.min_p else near
        found = interval_faults(
            drawn, probabilities(after_penalties(row, near, **changes), near), NEAR
        )
        best = found if best is None or len(found) < len(best) else best
    return best or []


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.2, 0.8, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 20, 200, 512]),
    top_p=st.sampled_from([1.0, 0.95, 0.5]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**40),
    repeat_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.2]),
    repeat_last_n=st.sampled_from([-1, 0, 1, 4, 64]),
    logit_bias=st.sampled_from([{}, {3: 2.5}, {1: -100, 4: 7.0, 10**7: 3.0}]),
    dry_multiplier=st.sampled_from([0.0, 0.0, 0.8]),
)


class Grammar:
    """The constraint of an answer whose grammar allows every token that `n` does not divide."""

    finished = False
    active = True
    in_call = False
    can_continue_unconstrained = False

    def __init__(self, n: int, n_vocab: int) -> None:
        self.tokens = np.arange(n_vocab) % n > 0

    def allowed(self) -> np.ndarray:
        return np.packbits(self.tokens, bitorder="little")

    def accept(self, token: int) -> int:
        assert self.tokens[token]
        return token


def spell(token: int) -> bytes:
    return b"%d" % token


def sampler_of(sampling: Sampling, grammar: Grammar | None, never: tuple[int, ...]) -> Sampler:
    return Sampler(sampling, grammar, TokenRules(never=never, text=spell))  # type: ignore[arg-type]


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(samplings, st.sampled_from(KINDS), st.booleans(), st.booleans()),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([6, 301, 5_001]),
    st.integers(0, 2**32),
    st.lists(st.integers(-5, 9), max_size=90),
)
def test_device_draws_follow_the_definition(
    streams: list[tuple[Sampling, str, bool, bool]], n_vocab: int, seed: int, history: list[int]
) -> None:
    """Rows of several requests with different sampler stages, each at 30 uniforms: every token owns
    one interval, as long as its probability."""
    import mlx.core as mx

    from localllm_backends.mlx.sampling import UNSURE, sample

    history = [t for t in history if t < n_vocab] + [1, 2]
    rows = [rows_like_models(n_vocab, seed + i, kind) for i, (_, kind, *_) in enumerate(streams)]
    uniforms = np.random.default_rng(seed).random(30)
    asked, given_rows = [], []
    for row, (sampling, _, schema, ban) in zip(rows, streams, strict=True):
        # Two of the best tokens are banned.
        never = tuple(int(t) for t in np.argsort(row)[-2:]) if ban else ()
        spec = sampler_of(sampling, Grammar(3, n_vocab) if schema else None, never).sample_spec(
            history
        )
        if spec is not None:
            asked += [replace(spec, uniform=u) for u in uniforms]
            given_rows += [row] * len(uniforms)
    if not asked:
        return
    device_rows = mx.array(np.stack(given_rows))
    found = iter(sample(device_rows, asked).on_host)
    assert np.array_equal(np.array(device_rows), np.stack(given_rows), equal_nan=True), (
        "the logits stay as they are"
    )
    for row, (sampling, kind, schema, ban) in zip(rows, streams, strict=True):
        never = tuple(int(t) for t in np.argsort(row)[-2:]) if ban else ()
        grammar = Grammar(3, n_vocab) if schema else None
        if sampler_of(sampling, grammar, never).sample_spec(history) is None:
            continue
        drawn = [(float(u), next(found)) for u in uniforms]
        if any(token == UNSURE for _, token in drawn):
            wide = n_vocab > 512 and sampling.top_p < 1 and not 0 < sampling.top_k < n_vocab
            changed = after_penalties(
                row, sampling, history, spell=spell, allowed=grammar and grammar.tokens
            )
            changed[list(never)] = -np.inf
            assert wide or not np.isfinite(changed).any() or kind in ("nan", "infinite"), (
                "it could have told"
            )
            continue
        changes: dict[str, Any] = {"history": history, "spell": spell, "banned": never}
        changes["allowed"] = None if grammar is None else grammar.tokens
        if sampling.temperature > 0:
            assert not faults(row, sampling, drawn, **changes)
        else:
            changed = after_penalties(row, sampling, **changes)
            (token,) = {t for _, t in drawn}
            assert changed[token] >= changed.max() - 1e-5 * max(1.0, abs(changed.max()))


@settings(max_examples=examples(40))
@given(
    st.lists(samplings, min_size=1, max_size=3),
    st.lists(st.integers(0, 9), max_size=20),
    st.integers(0, 2**32),
)
def test_a_draw_after_a_token_still_on_the_device_equals_the_draw_after_reading_it(
    streams: list[Sampling], history: list[int], seed: int
) -> None:
    import mlx.core as mx

    from localllm_backends.mlx.sampling import sample

    rng = np.random.default_rng(seed)
    before, behind, tokens = [], [], []
    for sampling in streams:
        sampler = sampler_of(sampling, None, (5,))
        spec = sampler.sample_spec([3, *history])
        following = None if spec is None else spec.next()
        if following is None:
            continue
        tokens.append(int(rng.integers(0, 10)))
        sampler.sampled()
        seen = sampler.sample_spec([3, *history, tokens[-1]])
        assert seen == following
        before.append(following)
        behind.append(seen)
    if not tokens:
        return
    # Small integers, so that no bit is lost and many logits are equal.
    rows = mx.array(rng.integers(-4, 9, (len(tokens), 40)).astype(np.float32))
    early = sample(rows, before, drawn=mx.array(tokens, dtype=mx.int32)).on_host
    assert early == sample(rows, behind).on_host


def test_draws_follow_the_distribution() -> None:
    """Chi-squared over 3,000 draws, with the bound that one fair run in ten thousand exceeds."""
    import mlx.core as mx

    from localllm_backends.mlx.sampling import UNSURE, sample

    row = rows_like_models(5_000, 1, "words")
    rng = np.random.default_rng(2)
    for sampling in (Sampling(), Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)):
        n = 3_000
        asked = [
            SampleSpec(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, u)
            for u in rng.random(n)
        ]
        found = np.array(sample(mx.array(np.tile(row, (n, 1))), asked).on_host)
        assert UNSURE not in found
        expected = probabilities(row, sampling)
        seen = np.bincount(found, minlength=len(row))
        assert not seen[expected == 0].any()
        large = expected * n >= 5
        chi = float(((seen - expected * n)[large] ** 2 / (expected * n)[large]).sum())
        degrees = int(large.sum()) - 1
        assert chi < degrees + 3.8 * np.sqrt(2 * degrees) + 10


VIEWS = {"Broadcast", "ExpandDims", "Slice", "Squeeze", "Reshape", "Flatten", "Unflatten"}
CHANGES: dict[str, dict[str, Any]] = {
    "as they are": {},
    "changed": {
        "seen": SeenTokens(np.arange(90), np.ones(90, np.int32), 3, 1.1, 0.5),
        "bias": (np.arange(9), np.ones(9, np.float32)),
        "banned": (1, 2),
    },
    "under a grammar": {"allowed": np.full(19_008, 255, np.uint8), "banned": (1, 2)},
}
FILTERS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "catalog": (0.7, 20, 0.8, 0.0),
    "unfiltered": (1.0, 0, 1.0, 0.0),
    "top_p": (1.0, 0, 0.95, 0.0),
    "min_p": (1.2, 0, 1.0, 0.1),
}


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("changes", CHANGES)
def test_a_draw_launches_few_kernels(filters: str, changes: str, tmp_path: Path) -> None:
    """The count is for all rows together, with a vocabulary as large as Qwen's. Views need no
    kernel."""
    import mlx.core as mx

    from localllm_backends.mlx.sampling import sample

    rows = mx.zeros((2, 152_064), dtype=mx.bfloat16)
    asked = [SampleSpec(*FILTERS[filters], 0.3, **CHANGES[changes])] * 2
    tokens = sample(rows, asked, drawn=mx.array([1, 2], dtype=mx.int32)).tokens
    mx.export_to_dot(str(tmp_path / "draw.dot"), tokens)
    names = re.findall(r'label ?= ?"([^"]+)"', (tmp_path / "draw.dot").read_text())
    assert 0 < len([n for n in names if n not in VIEWS]) <= 45
