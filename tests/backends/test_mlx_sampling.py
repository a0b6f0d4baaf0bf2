"""Tokens sampled on the device are the tokens our own sampler chooses, and the step behind them is begun before they are seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drive import run
from localllm.engine.core import Engine, EngineSettings
from localllm.engine.messages import Generation, Request, Sampling, Text
from localllm.engine.sampling.filters import distribution
from localllm.engine.sampling.sampler import Sampler, TokenRules
from localllm_backends import conformance
from localllm_backends.contract import LoadSpec, SampleSpec
from localllm_backends.mlx import backend_type as mlx
from models import tiny_mlx

pytestmark = [pytest.mark.mlx, pytest.mark.skipif(mlx.available() is not None, reason=str(mlx.available()))]


def rows_of(n_vocab: int, seed: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    row = rng.normal(0, 2.2, n_vocab)
    row[rng.integers(0, n_vocab, 12)] += np.linspace(14, 4, 12)
    if kind == "ties":
        row = np.round(row)
    elif kind == "equal":
        row[:] = 1.0
    elif kind == "spike":
        row[3] = 80.0
    elif kind == "forbidden":
        row[rng.random(n_vocab) < 0.99] = -np.inf
        row[2] = 0.0
    return row.astype(np.float32)


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.2, 0.8, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 20, 512]),
    top_p=st.sampled_from([1.0, 0.95, 0.5]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**40),
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(samplings, st.sampled_from(["words", "ties", "equal", "spike", "forbidden"])), min_size=1, max_size=4
    ),
    st.sampled_from([6, 300, 5_000]),
    st.integers(0, 2**32),
)
def test_what_is_drawn_there_is_what_would_be_drawn_here(
    streams: list[tuple[Sampling, str]], n_vocab: int, seed: int
) -> None:
    import mlx.core as mx

    from localllm_backends.mlx.sampling import UNSURE, sample

    rows = np.stack([rows_of(n_vocab, seed + i, kind) for i, (_, kind) in enumerate(streams)])
    # Every other stream has two of its better tokens banned.
    bans = [tuple(int(t) for t in np.argsort(row)[-2:]) if i % 2 else () for i, row in enumerate(rows)]
    samplers = [Sampler(sampling, None, TokenRules(never=b)) for (sampling, _), b in zip(streams, bans, strict=True)]
    asked = [d for s in samplers if (d := s.sample_spec(10)) is not None]
    given_rows = mx.array(rows)
    found = sample(given_rows, asked).on_host()
    assert np.array_equal(np.array(given_rows), rows, equal_nan=True)
    for row, sampler, token in zip(rows, samplers, found, strict=True):
        assert token in (UNSURE, sampler.choose(row, [1]))


def test_the_device_is_seldom_unsure_and_follows_the_distribution() -> None:
    """Chi-squared over 3,000 draws, with the bound that one fair run in ten thousand exceeds."""
    import mlx.core as mx

    from localllm_backends.mlx.sampling import UNSURE, sample

    row = rows_of(600, 1, "words")
    rng = np.random.default_rng(2)
    for sampling in (Sampling(), Sampling(temperature=1.0, top_k=0, top_p=0.9, min_p=0.0)):
        n = 3_000
        asked = [
            SampleSpec(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, u) for u in rng.random(n)
        ]
        found = np.array(sample(mx.array(np.tile(row, (n, 1))), asked).on_host())
        assert (found == UNSURE).mean() < 0.01
        expected = distribution(row, sampling)
        seen = np.bincount(found[found != UNSURE], minlength=len(row))
        assert seen[expected.ids].sum() == seen.sum()
        wanted = expected.probs * seen.sum()
        large = wanted >= 5
        chi = float(((seen[expected.ids] - wanted)[large] ** 2 / wanted[large]).sum())
        degrees = int(large.sum()) - 1
        assert chi < degrees + 3.8 * np.sqrt(2 * degrees) + 10


# --- served ------------------------------------------------------------------------------------------------------------


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
        opened.append(Engine(backend, EngineSettings(headroom_bytes=0)))
        return opened[-1], Calls(backend)

    yield opened_on
    for engine in opened:
        engine.close()


def asked(name: str, sampling: Sampling, n_tokens: int = 40, **more: Any) -> Request:
    prompt = [7 + (i * 31 + len(name) * 7) % 200 for i in range(30)]
    grammar = more.pop("grammar", None)
    return Request(name, prompt, Generation(sampling, n_tokens, ignore_eos=True, **more), grammar=grammar, draft="off")


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


HOT = Sampling(temperature=1.2, top_k=0, top_p=1.0, min_p=0.0)


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


def test_all_kinds_of_requests_run_beside_each_other(engines: Callable[..., tuple[Engine, Calls]]) -> None:
    """Sampled there, greedy, penalised and with log-probabilities: each as if it were sampled here."""
    kinds = [
        asked("a", replace(HOT, seed=1), 20),
        asked("bb", Sampling(temperature=0.0), 8),
        asked("ccc", replace(HOT, seed=2, repeat_penalty=1.3), 12),
        asked("dddd", replace(HOT, seed=3), 16, logprobs=3),
    ]
    there, _ = engines("llama")
    here, _ = engines("llama", samples=False)
    assert tokens_of(there, *kinds) == tokens_of(here, *kinds)


def test_a_stop_string_and_a_grammar_hold_beside_drawn_streams(engines: Callable[..., tuple[Engine, Calls]]) -> None:
    """A step begun ahead for one that stops, or beside one whose tokens a grammar chooses, changes nobody's tokens."""
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
    subject = conformance.Subject(backend)
    conformance.what_is_sampled_follows_from_the_logits(subject)
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
    assert backend.capabilities.samples is (mx.default_device() != mx.Device(mx.cpu))
    backend.close()
