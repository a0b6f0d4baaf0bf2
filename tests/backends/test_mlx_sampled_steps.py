"""Sampling on the device in the complete engine: steps are started early and submitted once, with
any mix of concurrent requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.drive import run
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Constraint, Generation, Request, Sampling, Text
from localllm.engine.sampling.grammar import GrammarCompiler
from localllm_backends import conformance
from localllm_backends.contract import LoadSpec
from localllm_backends.mlx import backend_type as mlx
from models import tiny_mlx
from models.tiny_mlx import Calls
from support.until import until

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(mlx.available() is not None, reason=str(mlx.available())),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def written(shape: str) -> Path:
        if shape not in made:
            made[shape] = tiny_mlx.SHAPES[shape](tmp_path_factory.mktemp(shape) / "model")
        return made[shape]

    return written


@pytest.fixture
def engines(folder: Callable[[str], Path]) -> Iterator[Callable[..., tuple[Engine, Calls]]]:
    opened: list[Engine] = []

    def opened_on(shape: str, *, samples: bool = True) -> tuple[Engine, Calls]:
        backend = mlx.load(LoadSpec(str(folder(shape)), n_ctx=1024, n_seq_max=4, n_batch=64))
        backend.capabilities = replace(backend.capabilities, samples=samples)
        opened.append(
            Engine(backend, EngineSettings(headroom_bytes=0, make_matcher=GrammarCompiler(backend)))
        )
        return opened[-1], Calls(backend)

    yield opened_on
    for engine in opened:
        engine.close()


def asked(name: str, sampling: Sampling, n_tokens: int = 40, **more: Any) -> Request:
    prompt = [7 + (i * 31 + len(name) * 7) % 200 for i in range(30)]
    constraint = Constraint(more.pop("grammar")) if "grammar" in more else None
    return Request(
        name,
        prompt,
        Generation(sampling, n_tokens, ignore_eos=True, **more),
        constraint,
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


# With a top_k, the device and our sampler both draw in the order of the logits; without one the
# device draws by id.
HOT = Sampling(temperature=1.2, top_k=300, top_p=1.0, min_p=0.0)


@pytest.mark.parametrize("shape", ["llama", "sliding", "hybrid"])
def test_sampled_steps_start_early_with_the_tokens_of_our_own_sampler(
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


def test_steps_started_early_are_used(engines: Callable[..., tuple[Engine, Calls]]) -> None:
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
    """The submission includes the next step's model call, for any mix of concurrent requests."""
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


def test_all_kinds_of_requests_run_concurrently_with_unchanged_tokens(
    engines: Callable[..., tuple[Engine, Calls]],
) -> None:
    """Requests sampled on the device, greedy ones, ones with penalties and ones with
    log-probabilities all get the same tokens as with sampling in the engine."""
    kinds = [
        asked("a", replace(HOT, seed=1), 20),
        asked("bb", Sampling(temperature=0.0), 8),
        asked("ccc", replace(HOT, seed=2, repeat_penalty=1.3), 12),
        asked("dddd", replace(HOT, seed=3), 16, logprobs=3),
    ]
    there, _ = engines("llama")
    here, _ = engines("llama", samples=False)
    assert tokens_of(there, *kinds) == tokens_of(here, *kinds)


def test_stop_strings_and_grammars_work_with_concurrent_device_sampled_streams(
    engines: Callable[..., tuple[Engine, Calls]],
) -> None:
    """A step may be started early for a request that then stops, or next to one whose tokens a
    grammar chooses. This changes no request's tokens."""
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


def test_device_sampling_keeps_the_contract(folder: Callable[[str], Path]) -> None:
    """This also holds on a CPU, which does not offer sampling."""
    backend = mlx.load(LoadSpec(str(folder("llama")), n_ctx=256, n_batch=64))
    backend.capabilities = replace(backend.capabilities, samples=True)
    check = conformance.what_is_sampled_follows_from_the_logits
    conformance.Subject(backend).examine(check)
    assert backend.cells_free() == backend.info.n_ctx, "the check leaves nothing behind"
    backend.close()


def test_active_memory_does_not_grow_with_requests(
    engines: Callable[..., tuple[Engine, Calls]],
) -> None:
    import mlx.core as mx

    engine, _ = engines("llama")
    run(engine, asked("a", replace(HOT, seed=1)))
    held = mx.get_active_memory()
    for i in range(4):
        run(engine, asked("a", replace(HOT, seed=i)))
    assert mx.get_active_memory() <= held * 1.1


def test_on_a_cpu_the_engine_samples(folder: Callable[[str], Path]) -> None:
    import mlx.core as mx

    backend = mlx.load(LoadSpec(str(folder("llama")), n_ctx=256))
    on_gpu = mx.default_device() != mx.Device(mx.cpu)
    assert backend.capabilities.samples is on_gpu
    assert backend.capabilities.kv_on_device is on_gpu, (
        "and lines stay where they are while others run"
    )
    backend.close()
