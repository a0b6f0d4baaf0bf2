"""Drafting with real models: greedy answers are token-identical with every drafter, alone and in
batches, for every kind of memory.

Near ties between batch shapes are allowed as in crowds.py, and counted."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from engine.crowds import NEAR_TIE, isolated
from engine.drive import GREEDY, run, settle
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Finish, Sampling, Text
from localllm.engine.sampling.grammar import GrammarCompiler
from localllm.engine.worker.client import WorkerOptions
from localllm.errors import LocalLLMError
from localllm_backends.contract import Backend, LoadSpec
from localllm_backends.llamacpp import backend_type as llamacpp
from models import tiny_gguf
from models.first_layers import write_first_layers
from support.requests import events_of, request_for

COPY = (
    "def mean(values):\n    total = 0\n    for value in values:\n        total = total + value\n  "
    "  return total\n\n" * 2
)
PROMPTS = [
    COPY,
    "Once upon a time there was a",
    "The days of the week are Monday, Tuesday,",
    '{"name": "Ada", "age": 36}\n{"name": "Bob", "age": 41}\n{"name":',
]


def speculating(path: Path, draft: Path | None = None, **spec: int) -> Engine:
    """Return an engine that drafts whenever a guess has any chance, because its cost table makes
    verification free."""
    shape = {"n_ctx": 2048, "n_seq_max": 4, **spec}
    small = llamacpp.load(LoadSpec(str(draft), n_ctx=2048, n_seq_max=4)) if draft else None
    backend = llamacpp.load(LoadSpec(str(path), **shape))  # type: ignore[arg-type]
    engine = Engine(
        backend,
        EngineSettings(draft="auto", make_matcher=GrammarCompiler(backend)),
        draft_backend=small,
    )
    settle(engine)
    engine.speculator.cost.set({1: 1.0, 32: 1.01})
    engine.speculator.cost.observe = lambda *_: None  # type: ignore[method-assign]
    if small is not None:
        assert engine.speculator.drafters["model"] is not None
        engine.speculator.drafters["model"].token_s = 1e-6
        # These few tokens would only be enough for some trials, which may all be wrong.
        engine.speculator.accounts["model"].trusted = True
    return engine


def assert_same(
    backend: Backend, prompts: dict[str, list[int]], got: dict[str, list[int]], n: int
) -> int:
    """Check that every answer equals the isolated run's; return how many diverged at a near tie."""
    ties = 0
    for key, prompt in prompts.items():
        tokens, gaps = isolated(backend, prompt, n)
        if got[key] != tokens:
            at = next(i for i in range(n) if got[key][i] != tokens[i])
            print(key, at, gaps[at])
            assert gaps[at] <= NEAR_TIE, (
                f"{key} differs at {at} where the choice was clear ({gaps[at]:.3f})"
            )
            ties += 1
    return ties


@pytest.mark.parametrize("drafter", ["ngram", pytest.param("first layers", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("together", "n"),
    [
        (1, 16),
        pytest.param(1, 32, marks=pytest.mark.long),
        pytest.param(4, 32, marks=pytest.mark.long),
    ],
)
def test_greedy_answers_of_smollm2_stay_the_same(
    smollm2: Path, tmp_path: Path, drafter: str, together: int, n: int
) -> None:
    draft = (
        write_first_layers(smollm2, tmp_path / "draft.gguf", 6)
        if drafter == ("first layers")
        else None
    )
    engine = speculating(smollm2, draft)
    prompts = {f"p{i}": engine.backend.tokenize(p) for i, p in enumerate(PROMPTS)}
    requests = [
        request_for(k, p, n, GREEDY, ignore_eos=True, cache_prompt=False)
        for k, p in prompts.items()
    ]
    got = {}
    for start in range(0, len(requests), together):
        got |= run(engine, *requests[start : start + together]).tokens
    alone = llamacpp.load(LoadSpec(str(smollm2), n_ctx=1024, n_seq_max=2))
    print("parted at a near-tie:", assert_same(alone, prompts, got, n))
    snapshot = engine.snapshot()
    used = "model" if draft else "ngram"
    assert snapshot[f"accepted_{used}_tokens"] > 0  # type: ignore[operator]
    assert snapshot[f"accepted_{used}_tokens"] < snapshot[f"drafted_{used}_tokens"]  # type: ignore[operator]
    alone.close()
    engine.close()


SHAPES = {
    "sliding": (tiny_gguf.write_sliding, {}),
    "hybrid": (tiny_gguf.write_hybrid, {"n_rewind": 6}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_windows_and_recurrent_states_take_rejected_drafts_back(shape: str, tmp_path: Path) -> None:
    write, more = SHAPES[shape]
    path = write(tmp_path / "model.gguf")
    engine = speculating(path, n_batch=64, n_ctx=768, **more)
    rng = random.Random(shape)
    prompts = {}
    for i in range(8):
        part = [rng.randrange(3, 250) for _ in range(20)]
        prompts[f"p{i}"] = [*part, *part, *part[: rng.randrange(3, 20)]]
    requests = [request_for(k, p, 30, GREEDY, ignore_eos=True) for k, p in prompts.items()]
    cancelled = request_for("gone", prompts["p0"], 30, GREEDY, ignore_eos=True)
    engine.submit(cancelled, prompts["p0"])
    for _ in range(4):
        engine.step()
    engine.cancel("gone")
    got = run(engine, *requests).tokens
    alone = llamacpp.load(LoadSpec(str(path), n_ctx=768, n_seq_max=2, n_batch=64))
    print("parted at a near-tie:", assert_same(alone, prompts, got, 30))
    assert engine.snapshot()["drafted_ngram_tokens"] > 0  # type: ignore[operator]


def test_a_recurrent_model_without_snapshots_reports_why_it_cannot_draft(tmp_path: Path) -> None:
    engine = Engine(
        llamacpp.load(LoadSpec(str(tiny_gguf.write_hybrid(tmp_path / "m.gguf")), n_ctx=256)),
        EngineSettings(draft="auto"),
    )
    assert "can't remove rejected draft tokens" in str(engine.snapshot()["speculation"])


def test_forced_text_of_a_schema_is_drafted_and_the_answer_is_the_same(few_layers: Path) -> None:
    schema = '{"type":"object","properties":{"longest_name_of_all":{"type":"integer"},"another_long_name":{"type":"boolean"}},"required":["longest_name_of_all","another_long_name"],"additionalProperties":false}'  # noqa: E501
    engine = speculating(few_layers)

    def answer(key: str, draft: str) -> tuple[str, Finish]:
        request = request_for(
            key, "Answer in JSON:\n", 60, GREEDY, grammar=("json_schema", schema), draft=draft
        )
        outcome = run(engine, request)
        return outcome.text[key], outcome.finish(key)

    # In this order, because a plain answer generated first would be remembered and used by lookups.
    drafted, finish = answer("drafted", "auto")
    plain, _ = answer("plain", "off")
    assert drafted == plain
    assert finish.usage.accepted_draft_tokens >= 6
    assert engine.snapshot()["accepted_grammar_tokens"] >= 6  # type: ignore[operator]


def test_a_sampled_answer_with_a_draft_model_ends_well(few_layers: Path, tmp_path: Path) -> None:
    engine = speculating(few_layers, write_first_layers(few_layers, tmp_path / "draft.gguf", 2))
    outcome = run(
        engine, request_for("a", PROMPTS[1], 40, Sampling(temperature=0.8, seed=3), ignore_eos=True)
    )
    usage = outcome.finish("a").usage
    assert usage.completion_tokens == 40
    assert usage.accepted_draft_tokens + usage.rejected_draft_tokens > 0


async def _through_a_worker(options: WorkerOptions) -> tuple[str, Finish]:
    client = await options.start()
    text = ""
    try:
        async for event in events_of(client, request_for("a", COPY, 40, GREEDY, ignore_eos=True)):
            if isinstance(event, Text):
                text += event.text
            if isinstance(event, Finish):
                return text, event
    finally:
        await client.close()
    raise AssertionError("no end")


def test_a_draft_model_works_through_the_worker(few_layers: Path) -> None:
    """The model is its own draft model, so every proposed token is right."""
    options = WorkerOptions(
        LoadSpec(str(few_layers), n_ctx=512, n_seq_max=2),
        engine={"draft": "auto"},
        draft_path=str(few_layers),
    )
    drafted, finish = asyncio.run(_through_a_worker(options))
    plain, _ = asyncio.run(
        _through_a_worker(WorkerOptions(LoadSpec(str(few_layers), n_ctx=512, n_seq_max=2)))
    )
    assert drafted == plain
    assert finish.usage.completion_tokens == 40


def test_a_draft_model_of_another_vocabulary_is_refused_before_loading(
    smollm2: Path, tiny_model: Path
) -> None:
    options = WorkerOptions(
        LoadSpec(str(smollm2), n_ctx=512), engine={"draft": "auto"}, draft_path=str(tiny_model)
    )
    with pytest.raises(LocalLLMError, match="49,152 tokens, the draft model's") as refused:
        asyncio.run(_through_a_worker(options))
    assert "same family" in refused.value.hint
