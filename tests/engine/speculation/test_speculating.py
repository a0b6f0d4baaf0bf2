"""Speculation in the engine's loop with the scripted backend: drafting changes the speed of an
answer, never its text."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Seq

import numpy as np
import pytest

from engine.drive import ALONE, GREEDY, Outcome, run, settle
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Sampling
from localllm.engine.sampling.row import Row
from localllm.engine.speculation.draft_model import vocabulary_difference
from localllm_backends.contract import Chunk
from support.requests import request_for
from support.scripted_backend import ScriptedBackend, ScriptedResult


def engine_of(
    backend: ScriptedBackend, draft: ScriptedBackend | None = None, mode: str = "auto"
) -> Engine:
    """Return an engine for which verification is free. By its clock every step takes the same time
    and a step of a draft model a small part of that, so the engine drafts everything that it
    can."""
    ticks = itertools.count(1.0)

    def clock() -> float:
        return next(ticks) / 1000 + len(backend.steps) / 100

    engine = Engine(backend, EngineSettings(draft=mode), clock=clock, draft_backend=draft)
    settle(engine)
    return engine


def plain(prompt: str, n: int, **more: object) -> str:
    request = request_for("x", prompt, n, GREEDY, **more)  # type: ignore[arg-type]
    return run(Engine(ScriptedBackend(n_ctx=1024)), request).text["x"]


def test_a_right_prediction_saves_steps_and_changes_nothing() -> None:
    expected = plain("say it", 60, ignore_eos=True)
    backend = ScriptedBackend(n_ctx=1024)
    engine = engine_of(backend)
    before = len(backend.steps)
    request = request_for("a", "say it", 60, GREEDY, ignore_eos=True, prediction=expected)
    outcome = run(engine, request)
    assert outcome.text["a"] == expected
    assert len(backend.steps) - before < 20
    usage = outcome.finish("a").usage
    assert usage.completion_tokens == 60
    assert usage.accepted_draft_tokens > 40
    assert engine.snapshot()["accepted_ngram_tokens"] == usage.accepted_draft_tokens


def test_a_prediction_is_read_only_up_to_the_maximum_answer_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a prediction of several megabytes stopped the engine for a minute."""
    backend = ScriptedBackend(n_ctx=64)
    most = 0
    tokenize = backend.tokenize

    def counted(text: str, **options: bool) -> list[int]:
        nonlocal most
        most = max(most, len(text))
        return tokenize(text, **options)

    monkeypatch.setattr(backend, "tokenize", counted)
    request = request_for("a", "say it", 2, GREEDY, prediction="ab " * 100_000)
    run(engine_of(backend), request).finish("a")
    assert 0 < most <= 8 * 64


@pytest.mark.parametrize("memory", [("any", 0, True), ("bounded", 8, False)])
def test_mixes_with_wrong_predictions_equal_plain_runs(memory: tuple[str, int, bool]) -> None:
    rewind, rewind_tokens, segments = memory
    rng = random.Random(rewind)
    backend = ScriptedBackend(
        n_ctx=512, rewind=rewind, rewind_tokens=rewind_tokens, segments=segments
    )  # type: ignore[arg-type]
    engine = engine_of(backend)
    drafted = 0
    for mix in range(40):
        wanted: dict[str, str] = {}
        outcome = Outcome()
        cancelled = set()
        for i in range(rng.randint(1, 4)):
            prompt = f"{mix} " + "please repeat " * rng.randint(0, 3)
            n = rng.randint(1, 50)
            text = plain(prompt, n)
            guess = "".join(rng.choice("abc") if rng.random() < 0.1 else c for c in text)
            key = f"{mix}-{i}"
            wanted[key] = text
            request = request_for(key, prompt, n, GREEDY, prediction=guess[rng.randint(0, 3) :])
            outcome.take(engine.submit(request, backend.tokenize(prompt)))
            for _ in range(rng.randint(0, 3)):
                outcome.take(engine.step())
            if rng.random() < 0.2:
                outcome.take(engine.cancel(key))
                cancelled.add(key)
        while engine.has_work:
            outcome.take(engine.step())
            engine.check_integrity()
        for key, text in wanted.items():
            got = outcome.text.get(key, "")
            assert text.startswith(got) if key in cancelled else got == text
            drafted += outcome.finish(key).usage.accepted_draft_tokens
    assert drafted > 200


def test_sampled_answers_keep_their_seed_with_lookups() -> None:
    """A lookup is a point mass. Coupling with a point mass means drawing from p and comparing, so
    the same draws give the same text."""
    sampling = Sampling(temperature=0.9, seed=11)
    request = request_for("x", "hello", 60, sampling, ignore_eos=True)
    expected = run(Engine(ScriptedBackend(n_ctx=1024)), request).text["x"]
    engine = engine_of(ScriptedBackend(n_ctx=1024))
    outcome = run(
        engine, request_for("x", "hello", 60, sampling, ignore_eos=True, prediction=expected)
    )
    assert outcome.text["x"] == expected
    assert outcome.finish("x").usage.accepted_draft_tokens > 30


def test_stop_strings_and_limits_end_inside_a_draft() -> None:
    text = plain("tell", 80, ignore_eos=True)
    stop = text[37:40]
    for more in ({"stop": (stop,)}, {"max_tokens": 23}):
        request = request_for(
            "a",
            "tell",
            **{"max_tokens": 80, **more},
            sampling=GREEDY,
            ignore_eos=True,
            prediction=text,
        )  # type: ignore[arg-type]
        outcome = run(engine_of(ScriptedBackend(n_ctx=1024)), request)
        assert outcome.text["a"] == (text[: text.index(stop)] if "stop" in more else text[:23])


def test_drafting_can_be_disabled_by_setting_or_request() -> None:
    text = plain("tell", 40, ignore_eos=True)
    asked = request_for("a", "tell", 40, GREEDY, ignore_eos=True, prediction=text)
    off = engine_of(ScriptedBackend(n_ctx=1024), mode="off")
    assert run(off, asked).finish("a").usage.accepted_draft_tokens == 0
    assert off.snapshot()["speculation"] == "switched off"
    on = engine_of(ScriptedBackend(n_ctx=1024))
    refused = request_for("b", "tell", 40, GREEDY, ignore_eos=True, prediction=text, draft="off")
    assert run(on, refused).finish("b").usage.accepted_draft_tokens == 0


def test_the_snapshot_reports_a_kv_cache_that_cannot_remove_rejected_drafts() -> None:
    engine = engine_of(ScriptedBackend(rewind="none", segments=False))
    text = plain("tell", 20)
    outcome = run(engine, request_for("a", "tell", 20, GREEDY, prediction=text))
    assert outcome.text["a"] == text
    assert "can't remove rejected draft tokens" in str(engine.snapshot()["speculation"])


def test_drafts_never_park_or_end_a_request_for_want_of_cells() -> None:
    prompt = "x" * 20
    text = plain(prompt, 44, ignore_eos=True)
    engine = engine_of(ScriptedBackend(n_ctx=64))
    outcome = run(engine, request_for("a", prompt, 44, GREEDY, ignore_eos=True, prediction=text))
    assert outcome.text["a"] == text
    assert engine.metrics.parked == 0


class EveryOther:
    """A constraint: only letters, and every third token must be an X."""

    def __init__(self) -> None:
        self.n = 0

    def copy(self) -> EveryOther:
        return EveryOther()

    def _ok(self, n: int, token: int) -> bool:
        letter = chr(max(token - 3, 0))
        return letter == "X" if n % 3 == 2 else letter.isascii() and letter.isalpha()

    def apply(self, logits: Row) -> None:
        for token in range(len(logits)):
            if not self._ok(self.n, token):
                logits[token] = -np.inf

    def accept(self, token: int) -> None:
        assert self._ok(self.n, token)
        self.n += 1

    def acceptable(self, tokens: Seq[int]) -> int:
        good = 0
        while good < len(tokens) and self._ok(self.n + good, tokens[good]):
            good += 1
        return good

    def forced(self) -> list[int]:
        return [ord("X") + 3] if self.n % 3 == 2 else []

    stuck = False

    @property
    def finished(self) -> bool:
        return self.n >= 45


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_grammar_holds_over_drafts(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=5)

    def answer(mode: str, prediction: str) -> tuple[str, int]:
        settings = EngineSettings(draft=mode, make_matcher=lambda *_: EveryOther())
        ticks = itertools.count(1.0)
        engine = Engine(
            ScriptedBackend(n_ctx=1024), settings, clock=lambda: next(ticks) / 1000, cpu=ALONE
        )
        settle(engine)
        request = request_for(
            "a", "go", 60, sampling, grammar=("regex", "."), ignore_eos=True, prediction=prediction
        )
        outcome = run(engine, request)
        return outcome.text["a"], outcome.finish("a").usage.accepted_draft_tokens

    expected, _ = answer("off", "")
    got, accepted = answer("auto", expected[:10] + "??" + expected[12:])
    assert got == expected
    assert accepted > 10


def test_all_drafts_of_an_identical_draft_model_are_accepted() -> None:
    expected = plain("dear", 60, ignore_eos=True)
    backend, small = ScriptedBackend(n_ctx=1024), ScriptedBackend(n_ctx=1024)
    engine = engine_of(backend, small)
    outcome = run(engine, request_for("a", "dear", 60, GREEDY, ignore_eos=True))
    assert outcome.text["a"] == expected
    snapshot = engine.snapshot()
    assert snapshot["accepted_model_tokens"] == snapshot["drafted_model_tokens"] > 20  # type: ignore[operator]


def test_a_draft_model_draws_for_sampled_requests_and_several_at_once() -> None:
    engine = engine_of(ScriptedBackend(n_ctx=2048), ScriptedBackend(n_ctx=2048))
    requests = [
        request_for(f"r{i}", f"dear {i}", 40, Sampling(temperature=0.8, seed=i), ignore_eos=True)
        for i in range(4)
    ]
    outcome = run(engine, *requests)
    assert all(outcome.finish(r.id).usage.completion_tokens == 40 for r in requests)
    # The draft model is the same model and draws from the same distribution, so coupling accepts
    # every token.
    snapshot = engine.snapshot()
    assert snapshot["accepted_model_tokens"] == snapshot["drafted_model_tokens"] > 20  # type: ignore[operator]


def test_the_draft_model_reuses_the_prefix_of_an_earlier_request() -> None:
    small = ScriptedBackend(n_ctx=1024)
    engine = engine_of(ScriptedBackend(n_ctx=1024), small)
    prompt = "long " * 40
    run(engine, request_for("a", prompt, 60, GREEDY, ignore_eos=True))
    settle(engine)
    before = small.computed_tokens
    run(engine, request_for("b", prompt + "more", 20, GREEDY, ignore_eos=True))
    assert small.computed_tokens - before < 60


def test_a_failing_draft_model_only_disables_its_drafts() -> None:
    small = ScriptedBackend(n_ctx=1024)
    engine = engine_of(ScriptedBackend(n_ctx=1024), small)

    def fail(n: int) -> None:
        if n % 3 == 0:
            small.fail_next_step = "gone"

    outcome = run(engine, request_for("a", "dear", 50, GREEDY, ignore_eos=True), between=fail)
    assert outcome.text["a"] == plain("dear", 50, ignore_eos=True)


def test_vocabularies_are_compared_by_what_tokens_mean() -> None:
    words = [bytes([i]) for i in range(200)]
    assert vocabulary_difference(words, words) is None
    assert vocabulary_difference(words, [*words, b"<pad>"]) is None
    assert "token 7" in str(vocabulary_difference(words, [*words[:7], b"?", *words[8:]]))
    assert "200 tokens" in str(vocabulary_difference(words, words[:20]))


class Failing(ScriptedBackend):
    """A backend whose steps fail while no request runs: the device is gone or out of memory."""

    broken = True

    def step(self, chunks: Seq[Chunk]) -> ScriptedResult:
        if self.broken:
            self.fail_next_step = "the device is gone"
        return super().step(chunks)


@pytest.mark.parametrize("which", ["the model", "the draft model"])
def test_a_probe_that_fails_costs_no_request(which: str) -> None:
    backend, small = (Failing(n_ctx=1024) for _ in range(2))
    (backend if which == "the draft model" else small).broken = False
    engine = engine_of(backend, small)
    assert backend.cells_free() == backend.info.n_ctx
    backend.broken = small.broken = False
    assert run(engine, request_for("a", "say it", 30, GREEDY, ignore_eos=True)).text["a"] == plain(
        "say it", 30, ignore_eos=True
    )


def test_a_probe_verifies_different_tokens() -> None:
    seen: list[list[int]] = []

    class Noting(ScriptedBackend):
        def step(self, chunks: Seq[Chunk]) -> ScriptedResult:
            seen.extend(list(c.tokens) for c in chunks)
            return super().step(chunks)

    engine_of(Noting(n_ctx=1024))
    assert max(len(tokens) for tokens in seen) == 32
    assert all(len(set(tokens)) == len(tokens) for tokens in seen)
