"""Compare DRY and XTC with direct implementations of their definitions, and verify drafts under
them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import sampling_reference
from engine.drive import run
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Sampling
from localllm.engine.sampling.filters import distribution
from localllm.engine.sampling.penalties import dry_penalty, dry_repetitions
from localllm.engine.sampling.sampler import Sampler, TokenRules
from support.examples import examples
from support.requests import request_for
from support.scripted_backend import ScriptedBackend

# Tokens of one, two and three letters, so that breakers lie within one token or span several.
PIECES = [b"a", b"b", b"c", b"\n", b"a\n", b"b:", b"c*c", b":"]
DRY = Sampling(dry_multiplier=0.8, dry_penalty_last_n=-1)
HISTORIES = st.lists(st.integers(0, len(PIECES) - 1), max_size=40)


def spell(token: int) -> bytes:
    return PIECES[token]


@settings(max_examples=examples(400))
@given(
    HISTORIES,
    st.sampled_from([-1, 0, 1, 5, 12]),
    st.integers(0, 4),
    st.lists(st.sampled_from(["\n", ":", "*", "b\n", "a\nb", "cc"]), max_size=3),
)
def test_dry_equals_its_definition(
    history: list[int], last: int, allowed: int, breakers: list[str]
) -> None:
    sampling = replace(
        DRY,
        dry_penalty_last_n=last,
        dry_allowed_length=allowed,
        dry_sequence_breakers=tuple(breakers),
    )
    assert dry_repetitions(sampling, history, spell) == sampling_reference.dry_repetitions(
        history, sampling, spell
    )


def test_dry_penalties_equal_the_example_of_llama_cpp() -> None:
    """a b c c b c y a b c: c would be the fourth token of a repetition, y the third, b the
    second."""
    a, b, c, y = 0, 1, 2, 7
    sampling = replace(DRY, dry_allowed_length=1, dry_sequence_breakers=())
    found = dry_repetitions(sampling, [a, b, c, c, b, c, y, a, b, c], spell)
    assert found == {c: 3, b: 1, y: 2}
    assert dry_penalty(sampling, 3) == pytest.approx(0.8 * 1.75**2)


def test_the_dry_penalty_changes_only_a_copy_of_the_logits() -> None:
    sampling = replace(DRY, temperature=1.0, dry_sequence_breakers=())
    row = np.zeros(len(PIECES), dtype=np.float32)
    out = Sampler(sampling, None, TokenRules(text=spell)).prepared(row, [0, 1, 2, 0, 1])
    assert out.tolist() == pytest.approx([0, 0, -0.8, 0, 0, 0, 0, 0])
    assert not row.any()


def test_the_penalty_of_a_very_long_repetition_is_finite() -> None:
    history = [0, 1] * 3000
    (length,) = dry_repetitions(replace(DRY, dry_sequence_breakers=()), history, spell).values()
    assert 150 < length < 170
    out = Sampler(DRY, None, TokenRules(text=spell)).prepared(
        np.zeros(8, dtype=np.float32), history
    )
    assert np.isfinite(out).all()
    assert out[0] < -1e30


def xtc_slowly(row: list[float], s: Sampling) -> dict[int, float]:
    """Return the probabilities after XTC as the weighted sum of both cases."""
    exp = [math.exp(v - max(row)) for v in row]
    share = [e / math.fsum(exp) for e in exp]
    ranked = sorted(range(len(row)), key=lambda t: (-row[t], t))
    top = [t for t in ranked if share[t] >= s.xtc_threshold]
    cases = [(1.0, ranked)]
    if len(top) > 1 and s.xtc_threshold <= 0.5:
        cases = [
            (1 - s.xtc_probability, ranked),
            (s.xtc_probability, [t for t in ranked if t not in top[:-1]]),
        ]
    out = dict.fromkeys(ranked, 0.0)
    for chance, ids in cases:
        hot = {t: math.exp((row[t] - max(row)) / s.temperature) for t in ids}
        total = math.fsum(hot.values())
        for t, value in hot.items():
            out[t] += chance * value / total
    return out


@settings(max_examples=examples(200))
@given(
    st.lists(st.integers(-30, 30), min_size=2, max_size=40),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0.01, 0.1, 0.3, 0.6]),
    st.sampled_from([0.5, 1.0, 2.0]),
)
def test_xtc_equals_its_definition(
    row: list[int], chance: float, threshold: float, temperature: float
) -> None:
    values = [v / 10 for v in row]
    sampling = Sampling(
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        xtc_probability=chance,
        xtc_threshold=threshold,
    )
    logits = np.asarray(values, dtype=np.float32)
    found = distribution(logits, sampling)
    expected = xtc_slowly(logits.astype(float).tolist(), sampling)
    assert {int(t): float(p) for t, p in zip(found.ids, found.probs, strict=True)} == pytest.approx(
        expected, abs=1e-9
    )


def test_xtc_applies_to_the_tokens_that_pass_the_filters() -> None:
    logits = np.log(np.asarray([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    found = distribution(
        logits, Sampling(temperature=1.0, top_k=2, top_p=1, min_p=0, xtc_probability=1.0)
    )
    assert (found.prob(0), found.prob(1)) == (0.0, 1.0)


@pytest.mark.parametrize("n", [8_000, pytest.param(20_000, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "change",
    [{"xtc_probability": 0.5}, {"dry_multiplier": 2.0, "dry_sequence_breakers": ()}, {}],
    ids=str,
)
def test_drafts_are_verified_against_the_distribution_with_dry_and_xtc(
    change: dict[str, object], n: int
) -> None:
    rng = np.random.default_rng(5)
    sampling = replace(Sampling(temperature=0.9, seed=1), **change)  # type: ignore[arg-type]
    logits, history = rng.normal(size=8).astype(np.float32) * 2, [0, 1, 2, 5, 0, 1]
    sampler = Sampler(sampling, None, TokenRules(text=spell))
    p = distribution(sampler.prepared(logits, history), sampling)
    q = distribution(rng.normal(size=8).astype(np.float32), Sampling(temperature=1.0))
    seen = np.zeros(8)
    accepted = 0
    for _ in range(n):
        token, right = sampler.verify(logits, history, q.draw(sampler.uniform()), q)
        seen[token] += 1
        accepted += right
    assert np.abs(seen / n - [p.prob(t) for t in range(8)]).max() < 0.02
    assert abs(accepted / n - sampling_reference.acceptance_probability(p, q)) < 0.02


def generated(draft: str, sampling: Sampling, **more: object) -> tuple[list[int], str, int]:
    """Return the tokens, the text, and the number of accepted draft tokens."""
    engine = Engine(ScriptedBackend(n_ctx=1024), EngineSettings(draft=draft))
    engine.speculator.cost.set({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0, 32: 1.0})
    outcome = run(
        engine, request_for("r", "abcabcabc " * 12, 150, sampling, ignore_eos=True, **more)
    )
    drafted = outcome.finish("r").usage.accepted_draft_tokens
    engine.close()
    return outcome.tokens["r"], outcome.text["r"], drafted


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_answer_is_the_same_with_and_without_drafts_under_dry(temperature: float) -> None:
    dry = Sampling(
        temperature=temperature,
        seed=2,
        dry_multiplier=5.0,
        dry_allowed_length=0,
        dry_sequence_breakers=(),
    )
    plain, text, _ = generated("off", dry)
    drafted, _, accepted = generated("ngram", dry, prediction=text)
    assert drafted == plain
    assert accepted > 50
    assert plain != generated("off", replace(dry, dry_multiplier=0.0))[0]


def test_disabled_dry_and_xtc_read_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("DRY was asked")

    monkeypatch.setattr("localllm.engine.sampling.penalties.dry_repetitions", never)
    assert Sampler(Sampling(temperature=0)).takes_argmax(10, 5)
    assert len(generated("off", Sampling(seed=3))[0]) == 150
