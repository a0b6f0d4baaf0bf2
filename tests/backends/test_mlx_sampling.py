"""Tokens sampled on the device are the tokens our own sampler chooses, and the step behind them is
begun before they are seen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drive import run
from engine.sampling_reference import (
    KINDS,
    after_penalties,
    interval_faults,
    probabilities,
    rows_like_models,
)
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Generation, Request, Sampling, Text
from localllm.engine.sampling.grammar import GrammarCompiler
from localllm.engine.sampling.sampler import Sampler, TokenRules
from localllm_backends import conformance
from localllm_backends.contract import LoadSpec, SampleSpec, SeenTokens
from localllm_backends.mlx import backend_type as mlx
from models import tiny_mlx
from support.examples import examples
from support.until import until

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(mlx.available() is not None, reason=str(mlx.available())),
]


# Of single precision: shares and sums of shares err by less.
NEAR = 1e-4


def faults(
    row: np.ndarray, sampling: Sampling, drawn: list[tuple[float, int]], **changes: Any
) -> list[str]:
    """What contradicts the definition in double precision: of all that single precision may make of
    where top_p and min_p end."""
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
    """Allows every token that does not divide by `n`."""

    finished = False

    def __init__(self, n: int, n_vocab: int) -> None:
        self.tokens = np.arange(n_vocab) % n > 0

    def allowed(self) -> np.ndarray:
        return np.packbits(self.tokens, bitorder="little")

    def accept(self, token: int) -> None:
        assert self.tokens[token]


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
def test_what_is_drawn_follows_the_definition(
    streams: list[tuple[Sampling, str, bool, bool]], n_vocab: int, seed: int, history: list[int]
) -> None:
    """Rows of several requests with stages of their own, each at 30 uniforms: a token has one
    interval, as long as it is probable."""
    import mlx.core as mx

    from localllm_backends.mlx.sampling import UNSURE, sample

    history = [t for t in history if t < n_vocab] + [1, 2]
    rows = [rows_like_models(n_vocab, seed + i, kind) for i, (_, kind, *_) in enumerate(streams)]
    uniforms = np.random.default_rng(seed).random(30)
    asked, given_rows = [], []
    for row, (sampling, _, schema, ban) in zip(rows, streams, strict=True):
        # Two of the better tokens are banned.
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
    found = iter(sample(device_rows, asked).on_host())
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
def test_what_is_drawn_behind_a_token_nobody_has_seen_is_what_would_be_drawn_once_it_is_seen(
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
        sampler.sampled(tokens[-1])
        seen = sampler.sample_spec([3, *history, tokens[-1]])
        assert seen == following
        before.append(following)
        behind.append(seen)
    if not tokens:
        return
    # Of small integers, so that not one bit is lost and equals are many.
    rows = mx.array(rng.integers(-4, 9, (len(tokens), 40)).astype(np.float32))
    early = sample(rows, before, drawn=mx.array(tokens, dtype=mx.int32)).on_host()
    assert early == sample(rows, behind).on_host()


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
        found = np.array(sample(mx.array(np.tile(row, (n, 1))), asked).on_host())
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
def test_a_draw_takes_few_kernels(filters: str, changes: str, tmp_path: Path) -> None:
    """Of all rows together, from a vocabulary as large as Qwen's: views take none."""
    import mlx.core as mx

    from localllm_backends.mlx.sampling import sample

    rows = mx.zeros((2, 152_064), dtype=mx.bfloat16)
    asked = [SampleSpec(*FILTERS[filters], 0.3, **CHANGES[changes])] * 2
    tokens = sample(rows, asked, drawn=mx.array([1, 2], dtype=mx.int32)).tokens
    mx.export_to_dot(str(tmp_path / "draw.dot"), tokens)
    names = re.findall(r'label ?= ?"([^"]+)"', (tmp_path / "draw.dot").read_text())
    assert 0 < len([n for n in names if n not in VIEWS]) <= 45


# --- served ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def written(shape: str) -> Path:
        if shape not in made:
            made[shape] = tiny_mlx.SHAPES[shape](tmp_path_factory.mktemp(shape) / "model")
        return made[shape]

    return written


class Calls:
    """Counts calls of the model."""

    def __init__(self, backend: Any) -> None:
        self.n, self._model = 0, backend.stepper.model
        backend.stepper.model = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.n += 1
        return self._model(*args, **kwargs)


@pytest.fixture
def engines(folder: Callable[[str], Path]) -> Iterator[Callable[..., tuple[Engine, Calls]]]:
    opened: list[Engine] = []

    def opened_on(shape: str, *, samples: bool = True) -> tuple[Engine, Calls]:
        backend = mlx.load(LoadSpec(str(folder(shape)), n_ctx=1024, n_seq_max=4, n_batch=64))
        backend.capabilities = replace(backend.capabilities, samples=samples)
        opened.append(
            Engine(
                backend, EngineSettings(headroom_bytes=0, make_constraint=GrammarCompiler(backend))
            )
        )
        return opened[-1], Calls(backend)

    yield opened_on
    for engine in opened:
        engine.close()


def asked(name: str, sampling: Sampling, n_tokens: int = 40, **more: Any) -> Request:
    prompt = [7 + (i * 31 + len(name) * 7) % 200 for i in range(30)]
    grammar = more.pop("grammar", None)
    return Request(
        name,
        prompt,
        Generation(sampling, n_tokens, ignore_eos=True, **more),
        grammar=grammar,
        draft="off",
    )


def tokens_of(engine: Engine, *requests: Request) -> dict[str, list[int]]:
    for request in requests:
        assert isinstance(request.prompt, list)
        engine.submit(request, request.prompt)
    said: dict[str, list[int]] = {r.id: [] for r in requests}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Text):
                said[event.id] += event.tokens
    engine.check_integrity()
    return said


# Drawn in the order of the logits, there as here; without a top_k there it is by id.
HOT = Sampling(temperature=1.2, top_k=300, top_p=1.0, min_p=0.0)


@pytest.mark.parametrize("shape", ["llama", "sliding", "hybrid"])
def test_sampled_steps_are_started_ahead_with_the_tokens_of_our_own_sampler(
    engines: Callable[..., tuple[Engine, Calls]], shape: str
) -> None:
    there, calls = engines(shape)
    here, plain_calls = engines(shape, samples=False)
    for seed, sampling in enumerate([HOT, replace(HOT, top_p=0.9, top_k=20)]):
        request = asked("a", replace(sampling, seed=seed), 16)
        calls.n = plain_calls.n = 0
        found = tokens_of(there, request)
        assert found == tokens_of(here, request)
        assert found == tokens_of(there, request), "the same seed, the same tokens"
        assert here.backend.stepper.ahead is None  # type: ignore[attr-defined]


def test_steps_begun_ahead_are_used(engines: Callable[..., tuple[Engine, Calls]]) -> None:
    engine, calls = engines("llama")
    requests = [asked(f"r{'x' * i}", replace(HOT, seed=i)) for i in range(3)]
    for request in requests:
        engine.submit(request, request.prompt)  # type: ignore[arg-type]
    while engine.jobs.waiting or any(job.prefilling for job in engine.jobs.running.values()):
        engine.step()
    engine.step()
    calls.n = 0
    for _ in range(20):
        engine.step()
    assert calls.n <= 24, "each step is computed once, but where the device was unsure"
    assert engine.backend.stepper.ahead is not None  # type: ignore[attr-defined]
    engine.cancel(requests[0].id)
    left = [e for _ in range(30) for e in engine.step()]
    assert {e.id for e in left} == {r.id for r in requests[1:]}, "the others go on"
    engine.check_integrity()


GREEDY = Sampling(temperature=0.0)
MIXES = {
    "penalties": [
        asked("a", replace(HOT, seed=1, repeat_penalty=1.3)),
        asked("bb", replace(GREEDY, presence_penalty=0.5)),
    ],
    "bias": [
        asked("a", replace(HOT, seed=1, logit_bias={5: 3.0}, dry_multiplier=0.8)),
        asked("bb", GREEDY),
    ],
    "schema": [
        asked("a", replace(HOT, seed=1), grammar=("regex", "[a-z]{90,99}")),
        asked("bb", replace(HOT, seed=2)),
    ],
    "schema alone": [asked("a", replace(GREEDY), grammar=("regex", "[a-z]{90,99}"))],
    "logprobs": [asked("a", replace(HOT, seed=1), logprobs=2), asked("bb", GREEDY, logprobs=0)],
    "all": [
        asked("a", replace(HOT, top_k=0, seed=1, frequency_penalty=0.2)),
        asked("bb", GREEDY),
        asked("ccc", replace(HOT, min_p=0.05, top_k=0, dry_multiplier=0.5)),
        asked("dddd", replace(HOT, seed=3), grammar=("regex", "[a-z]{90,99}")),
    ],
}


@pytest.mark.parametrize("shape", ["llama", "hybrid"])
@pytest.mark.parametrize("mix", MIXES)
def test_a_step_is_submitted_once_whatever_is_asked(
    engines: Callable[..., tuple[Engine, Calls]],
    mix: str,
    shape: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the next one's model call in it, for whoever stands beside whom."""
    import mlx.core as mx

    engine, calls = engines(shape)
    for request in MIXES[mix]:
        engine.submit(request, request.prompt)  # type: ignore[arg-type]
    running = engine.jobs.running

    def decode() -> bool:
        engine.step()
        return len(running) == len(MIXES[mix]) and all(
            job.n_generated > 3 for job in running.values()
        )

    until(decode, "all of them decode")
    submitted, submit = [], mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (submitted.append(1), submit(*arrays)))
    calls.n, before = 0, {job.id: job.n_generated for job in running.values()}
    for _ in range(12):
        engine.step()
    assert {job.id: job.n_generated - before[job.id] for job in running.values()} == dict.fromkeys(
        before, 12
    )
    assert (len(submitted), calls.n) == (12, 12)
    engine.check_integrity()


def test_all_kinds_of_requests_run_beside_each_other(
    engines: Callable[..., tuple[Engine, Calls]],
) -> None:
    """Sampled there, greedy, penalised and with log-probabilities: each as if it were sampled
    here."""
    kinds = [
        asked("a", replace(HOT, seed=1), 20),
        asked("bb", Sampling(temperature=0.0), 8),
        asked("ccc", replace(HOT, seed=2, repeat_penalty=1.3), 12),
        asked("dddd", replace(HOT, seed=3), 16, logprobs=3),
    ]
    there, _ = engines("llama")
    here, _ = engines("llama", samples=False)
    assert tokens_of(there, *kinds) == tokens_of(here, *kinds)


def test_a_stop_string_and_a_grammar_hold_beside_drawn_streams(
    engines: Callable[..., tuple[Engine, Calls]],
) -> None:
    """A step begun ahead for one that stops, or beside one whose tokens a grammar chooses, changes
    nobody's tokens."""
    there, _ = engines("llama")
    here, _ = engines("llama", samples=False)
    plain = asked("a", replace(HOT, seed=5), 24)
    said = run(there, plain).text["a"]
    kinds = [
        replace(plain, generation=replace(plain.generation, stop=(said[len(said) // 2 :][:3],))),
        asked("bb", replace(HOT, seed=6), 24, grammar=("regex", "[a-f]{3,9}")),
        asked("ccc", replace(HOT, seed=7), 24),
    ]
    found = tokens_of(there, *kinds)
    assert found == tokens_of(here, *kinds)
    assert 0 < len(found["a"]) < 24
    assert len(found["ccc"]) == 24


def test_sampling_keeps_the_contract(folder: Callable[[str], Path]) -> None:
    """Also on a processor, which doesn't offer it."""
    backend = mlx.load(LoadSpec(str(folder("llama")), n_ctx=256, n_batch=64))
    backend.capabilities = replace(backend.capabilities, samples=True)
    check = conformance.what_is_sampled_follows_from_the_logits
    conformance.Subject(backend).examine(check)
    assert backend.cells_free() == backend.info.n_ctx, "the check leaves nothing behind"
    backend.close()


def test_nothing_is_held_that_grows(engines: Callable[..., tuple[Engine, Calls]]) -> None:
    import mlx.core as mx

    engine, _ = engines("llama")
    run(engine, asked("a", replace(HOT, seed=1)))
    held = mx.get_active_memory()
    for i in range(4):
        run(engine, asked("a", replace(HOT, seed=i)))
    assert mx.get_active_memory() <= held * 1.1


def test_a_processor_leaves_sampling_to_the_engine(folder: Callable[[str], Path]) -> None:
    import mlx.core as mx

    backend = mlx.load(LoadSpec(str(folder("llama")), n_ctx=256))
    on_gpu = mx.default_device() != mx.Device(mx.cpu)
    assert backend.capabilities.samples is on_gpu
    assert backend.capabilities.kv_on_device is on_gpu, (
        "and lines stay where they are while others run"
    )
    backend.close()
