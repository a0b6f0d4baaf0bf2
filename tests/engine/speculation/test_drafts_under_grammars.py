"""Drafts under a grammar. A draft is cut before verification where it violates the grammar, and
each remaining token is verified under the mask of its own position. The answer is the same token
for token."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest

from engine.drive import ALONE, GREEDY, Outcome, run, settle
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Sampling
from localllm.engine.sampling.grammar import GrammarCompiler
from localllm_backends.contract import Chunk, LoadSpec
from localllm_backends.llamacpp import backend_type as llamacpp
from support.requests import request_for
from support.scripted_backend import END, ScriptedBackend, ScriptedResult

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "n": {"type": "integer"},
        "on": {"type": "boolean"},
    },
    "required": ["name", "n", "on"],
    "additionalProperties": False,
}
GRAMMARS = [("json_schema", json.dumps(SCHEMA)), ("regex", r"([a-z]{3,8} [0-9]{2}; ){6}end")]


class Watching(ScriptedBackend):
    """Record the tokens of every verified chunk: those with more than one output."""

    def __init__(self) -> None:
        super().__init__(n_ctx=1024, n_batch=64)
        self.verified: list[list[int]] = []

    def step(self, chunks: Seq[Chunk]) -> ScriptedResult:
        self.verified += [list(c.tokens) for c in chunks if c.outputs > 1]
        return super().step(chunks)


def answer(
    sampling: Sampling, grammar: tuple[str, str], draft: str, prediction: str
) -> tuple[Outcome, Watching]:
    backend, ticks = Watching(), itertools.count(1.0)
    settings = EngineSettings(draft=draft, make_matcher=GrammarCompiler(backend))
    # A clock that ticks once per reading, so that a step with drafts takes as long as one without.
    engine = Engine(backend, settings, clock=lambda: next(ticks) / 1000, cpu=ALONE)
    settle(engine)
    backend.verified.clear()
    outcome = run(
        engine, request_for("a", "go", 200, sampling, grammar=grammar, prediction=prediction)
    )
    engine.close()
    return outcome, backend


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("grammar", GRAMMARS, ids=["schema", "regex"])
def test_drafts_do_not_change_ids_and_invalid_tokens_are_not_verified(
    grammar: tuple[str, str], temperature: float
) -> None:
    rng = random.Random(f"{grammar}{temperature}")
    accepted = 0
    for seed in range(6):
        sampling = Sampling(temperature=temperature, seed=seed)
        plain, _ = answer(sampling, grammar, "off", "")
        text = plain.text["a"]
        # The guess is partly right. In some places the wrong characters violate the grammar; in
        # others they only differ from this model's choice.
        guess = "".join(
            rng.choice(["}", "!", "x", "7"]) if rng.random() < 0.08 else c for c in text
        )
        drafted, backend = answer(sampling, grammar, "auto", guess)
        assert drafted.tokens["a"] == plain.tokens["a"]
        assert drafted.finish("a").reason == plain.finish("a").reason == "stop"
        accepted += drafted.finish("a").usage.accepted_draft_tokens
        # Every draft is a valid continuation of the answer up to that point.
        compiled = GrammarCompiler(backend)
        ids = [t for t in plain.tokens["a"] if t != END]
        for chunk in backend.verified:
            ways = [i for i in range(len(ids)) if ids[i] == chunk[0]]
            assert any(_allowed(compiled, grammar, [*ids[: i + 1], *chunk[1:]]) for i in ways), (
                chunk
            )
    assert accepted > 60


def _allowed(compiled: GrammarCompiler, grammar: tuple[str, str], tokens: list[int]) -> bool:
    constraint = compiled(grammar)
    return constraint.acceptable(tokens) == len(tokens)


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(temperature=0.8, seed=4)], ids=["greedy", "sampled"]
)
def test_a_half_right_draft_does_not_change_a_real_models_answer(
    few_layers: Path, sampling: Sampling
) -> None:
    backend = llamacpp.load(LoadSpec(str(few_layers), n_ctx=1024))
    engine = Engine(backend, EngineSettings(draft="ngram", make_matcher=GrammarCompiler(backend)))
    settle(engine)
    engine.speculator.cost.set({1: 1.0, 32: 1.01})
    engine.speculator.cost.observe = lambda *_: None  # type: ignore[method-assign]

    def say(key: str, draft: str, prediction: str) -> Outcome:
        return run(
            engine,
            request_for(
                key, "A cat in JSON: ", 60, sampling, grammar=GRAMMARS[0], draft=draft,
                prediction=prediction,
                cache_prompt=False,
            ),
        )  # fmt: skip

    plain = say("plain", "off", "")
    guess = re.sub(r"\d+", "many", plain.text["plain"])
    drafted = say("drafted", "auto", guess)
    assert drafted.tokens["drafted"] == plain.tokens["plain"]
    assert drafted.finish("drafted").usage.accepted_draft_tokens > 4
    engine.close()
