"""Batching, caching, parking and the disk change no greedy answer of a real model, for every kind
of memory.

A first divergence is allowed at a near tie (crowds.py), and counted. In a mixture of experts the
near tie may be in the router, where it is not visible, and send the token to another expert. Such
flips are limited in number instead."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.crowds import crowds_equal_isolated_runs, divergence, isolated
from engine.drive import GREEDY, Outcome, run
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm_backends.contract import Chunk, LoadSpec
from localllm_backends.llamacpp import backend_type as llamacpp
from localllm_backends.llamacpp.backend import LlamaCppBackend
from models import tiny_gguf
from support.requests import request_for

ROUTER_FLIPS = {"moe": 0.05}

SHAPES: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_gguf.write_llama,
    "sliding": tiny_gguf.write_sliding,
    "hybrid": tiny_gguf.write_hybrid,
    "moe": tiny_gguf.write_moe,
}


@pytest.mark.parametrize("mixes", [20, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.parametrize("shape", SHAPES)
def test_random_mixes_equal_isolated_runs(shape: str, mixes: int, tmp_path: Path) -> None:
    path = SHAPES[shape](tmp_path / "model.gguf")
    spec = LoadSpec(str(path), n_ctx=768, n_seq_max=4, n_batch=64)
    alone = llamacpp.load(spec)
    # A small cache of 150 kB forces evictions; the disk tier restores some of the evicted KV.
    settings = EngineSettings(
        cache_bytes=150_000,
        disk_dir=str(tmp_path / "kv"),
        disk_bytes=10**8,
        sliced_prefill_tokens=40,
    )
    engine = Engine(llamacpp.load(spec), settings)
    crowds_equal_isolated_runs(
        engine, alone, shape, mixes, router_flips=ROUTER_FLIPS.get(shape, 0.0)
    )
    assert (engine.snapshot()["sliced_prefill_tokens"] == 0) == (
        not engine.backend.capabilities.sliced_prefill
    )
    engine.close()
    alone.close()


def test_a_forbidden_end_token_is_not_chosen_if_the_device_selects_candidates(
    tiny_model: Path,
) -> None:
    """Several concurrent greedy streams have the end token as their best logit. The best token
    found by the device may be forbidden."""
    spec, rng = LoadSpec(str(tiny_model), n_ctx=1024, n_seq_max=8), random.Random(1)
    alone, sorting = llamacpp.load(spec), llamacpp.load(spec)
    ends = set(alone.info.eog_tokens)
    prompts: list[list[int]] = []
    while len(prompts) < 4:
        prompt, sequence = [rng.randrange(3, 250) for _ in range(8)], alone.new_sequence()
        if alone.step([Chunk(sequence, prompt)]).argmax(0)[-1] in ends:
            prompts.append(prompt)
        alone.drop(sequence)
    assert isinstance(sorting, LlamaCppBackend)
    sorting.sort_where_computed()
    outcome, engine = Outcome(), Engine(sorting)
    for i, prompt in enumerate(prompts):
        request = request_for(str(i), prompt, max_tokens=4, sampling=GREEDY, ignore_eos=True)
        outcome.take(engine.submit(request, prompt))
    while engine.has_work:
        outcome.take(engine.step())
    for i, prompt in enumerate(prompts):
        assert outcome.tokens[str(i)][0] == isolated(alone, prompt, 1)[0][0]
        assert not ends & set(outcome.tokens[str(i)])
    engine.close()
    alone.close()


@pytest.mark.usefixtures("all_threads")
def test_a_real_model_answers_the_same_with_many_requests_as_alone(few_layers: Path) -> None:
    backend = llamacpp.load(LoadSpec(str(few_layers), n_ctx=4096))
    engine = Engine(backend)
    questions = [
        "Name three colours.",
        "What is a lighthouse?",
        "Count to five.",
        "Who was Ada Lovelace?",
    ]
    prompts = {q: f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in questions}
    together = run(
        engine, *(request_for(q, p, max_tokens=24, sampling=GREEDY) for q, p in prompts.items())
    )
    for question, prompt in prompts.items():
        expected, gaps = isolated(backend, backend.tokenize(prompt), 24)
        got = together.tokens[question]
        at = divergence(got, expected)
        if at is not None:
            assert gaps[at] <= 0.3, (
                f"{question}: diverged at {at} where the choice was clear ({gaps[at]:.3f})"
            )
    engine.close()


class Jumping:
    """A clock by which every step takes a different time."""

    def __init__(self, seed: int) -> None:
        self._rng, self._now_s = random.Random(seed), 0.0

    def __call__(self) -> float:
        self._now_s += self._rng.choice([1e-5, 1e-3, 0.1, 3.0])
        return self._now_s


def test_a_request_without_prompt_cache_gets_bit_identical_log_probabilities(
    few_layers: Path,
) -> None:
    """This holds for any duration of steps and any earlier requests."""
    prompt = [(i * 7919) % 40_000 + 50 for i in range(300)] * 2
    said = []
    for seed in range(3):
        backend = llamacpp.load(LoadSpec(str(few_layers), n_ctx=2048))
        engine = Engine(backend, clock=Jumping(seed))
        run(engine, *(request_for(str(i), prompt[i:][:70], 9, GREEDY) for i in range(2 * seed)))
        for key in ("once", "again"):
            request = request_for(
                key, prompt, 24, GREEDY, ignore_eos=True, logprobs=5, cache_prompt=False
            )
            outcome = run(engine, request)
            said.append([(one.logprob, one.top) for one in outcome.logprobs[key]])
        engine.close()
    assert all(one == said[0] for one in said)
