"""A grammar that becomes active in the middle of an answer: after a trigger text that the model
writes, or after its reasoning. The answer remains one request."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from engine.drive import GREEDY, Outcome, advance, run, settle
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Constraint, Reasoning, Request, Sampling, ThinkingLimit
from localllm.engine.sampling.grammar import GrammarCompiler, GrammarMatcher
from localllm.errors import UnsupportedError
from localllm.grammars.trigger import GrammarTrigger
from localllm_backends.contract import Chunk, StepResult
from support.requests import request_for
from support.scripted_backend import ScriptedBackend

PROMPT = "go"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
CALL = ("json_schema", json.dumps(SCHEMA))
ONE = {"<call>": GrammarTrigger("\n", CALL, "</call>")}
MORE = {"<call>": GrammarTrigger("\n", CALL, "</call>", again=True)}
THINKS = Reasoning("<think>", "</think>", opened=True)


class Wishes(ScriptedBackend):
    """A model that writes `words`, and then continues like the scripted backend. If a grammar
    forces other letters, it continues after them with its next words."""

    def __init__(self, words: str, **facts: Any) -> None:
        super().__init__(n_ctx=1024, **facts)
        self._words = self.tokenize(words, special=False)
        self.fed: list[list[int]] = []

    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        self.fed += [list(chunk.tokens) for chunk in chunks]
        result = super().step(chunks)
        first = len(self.tokenize(PROMPT))
        for i, chunk in enumerate(chunks):
            line = self.lines[chunk.sequence]
            for row, length in zip(reversed(result.rows[i]), range(len(line), 0, -1), strict=False):
                at = self._place(list(line[first:length]))
                if at < len(self._words):
                    row[self._words[at]] = 100.0
                else:
                    row[self.info.eog_tokens[0]] = 100.0
        return result

    def _place(self, said: list[int]) -> int:
        """Return how many of the words are written."""
        at = 0
        for token in said:
            if at < len(self._words) and token == self._words[at]:
                at += 1
        return at


def answer(
    words: str, constraint: Constraint, *, draft: str = "off", most: int = 200, **more: Any
) -> tuple[Outcome, Engine, Wishes]:
    backend = Wishes(words)
    ticks = itertools.count(1.0)
    settings = EngineSettings(draft=draft, make_matcher=GrammarCompiler(backend))
    engine = Engine(backend, settings, clock=lambda: next(ticks) / 1000)
    settle(engine)
    sampling = more.pop("sampling", GREEDY)
    request = request_for("a", PROMPT, most, sampling, constraint=constraint, **more)
    return run(engine, request), engine, backend


def test_the_grammar_applies_after_the_trigger_within_one_request() -> None:
    said, engine, _ = answer('Hm. <call>{"n": 7}', Constraint(triggers=ONE))
    assert re.fullmatch(r'Hm\. <call>\n\{"n": [12] ?\}</call>', said.text["a"])
    assert said.finish("a").reason == "stop"
    assert engine.snapshot()["requests"] == 1
    assert said.finish("a").usage.completion_tokens == len(said.tokens["a"])


def test_an_answer_continues_after_a_call_that_allows_more_text() -> None:
    words = 'a<call>\n{"n": 1}</call>b<call>\n{"n": 2}</call>c'
    said, engine, _ = answer(words, Constraint(triggers=MORE))
    assert said.text["a"] == words
    assert engine.snapshot()["requests"] == 1
    without, _, _ = answer(words, Constraint(triggers=ONE))
    assert without.text["a"] == 'a<call>\n{"n": 1}</call>'


def test_an_answer_ends_after_too_many_repeated_calls() -> None:
    words = '<call>\n{"n": 1}</call><call>\n{"n": 2}</call>' * 20
    said, _, _ = answer(words, Constraint(triggers=MORE), most=900)
    assert said.text["a"].count("<call>") == 7
    assert said.finish("a").reason == "stop"


def test_a_trigger_allowed_only_once_ends_the_answer_at_its_second_use() -> None:
    once = {"<call>": GrammarTrigger("\n", CALL, "</call>", again=True, once=True)}
    said, _, _ = answer(
        '<call>\n{"n": 1}</call> <call>\n{"n": 2}</call>', Constraint(triggers=once)
    )
    assert said.text["a"] == '<call>\n{"n": 1}</call> <call>'
    assert said.finish("a").reason == "stop"


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.7, seed=3)])
@pytest.mark.parametrize("trigger", [ONE, MORE], ids=["one", "more"])
def test_a_trigger_within_a_draft_discards_the_rest_of_the_draft(
    sampling: Sampling, trigger: dict[str, GrammarTrigger]
) -> None:
    """Draft tokens after the trigger are discarded, even if they match the unconstrained answer."""
    words = 'The answer is this: <call>{"n": 7}</call> and more of it'
    constraint = Constraint(triggers=trigger)
    plain, _, _ = answer(words, constraint, sampling=sampling)
    drafted, _, backend = answer(
        words, constraint, draft="auto", sampling=sampling, prediction=words
    )
    assert drafted.text["a"] == plain.text["a"]
    assert '<call>\n{"n": 7}' not in drafted.text["a"]
    assert drafted.finish("a").usage.accepted_draft_tokens > 10
    trigger_end = backend.tokenize("<call>", special=False)
    within = [tokens for tokens in backend.fed if _holds(tokens[:-1], trigger_end[-3:])]
    assert within, "no draft went beyond the trigger"


def _holds(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[i : i + len(part)] == part for i in range(len(tokens)))


def test_a_grammar_waits_for_the_end_of_the_reasoning() -> None:
    constraint = Constraint(CALL, lead="\n\n", reasoning=THINKS)
    said, engine, _ = answer('Well {"n": 9}</think>{"n": 7}', constraint)
    thought, _, form = said.text["a"].partition("</think>\n\n")
    assert thought == 'Well {"n": 9}'
    assert json.loads(form)["n"] in (1, 2)
    assert engine.snapshot()["requests"] == 1


def test_reasoning_that_ends_without_its_marker_is_closed() -> None:
    said, _, _ = answer("Hm", Constraint(CALL, lead="\n\n", reasoning=THINKS))
    assert said.text["a"].startswith("Hm</think>\n\n{")
    assert json.loads(said.text["a"].partition("</think>")[2])["n"] in (1, 2)


def test_the_limit_on_the_reasoning_ends_it_and_the_grammar_begins() -> None:
    limit = ThinkingLimit(10, "<think>", "</think>", "\n\n", opened=True)
    constraint = Constraint(CALL, lead="\n\n", reasoning=THINKS)
    said, _, _ = answer("hm " * 50, constraint, thinking=limit)
    assert said.text["a"].startswith("hm hm hm h</think>\n\n{")
    assert json.loads(said.text["a"].partition("</think>")[2])["n"] in (1, 2)


def test_a_trigger_within_the_reasoning_is_ordinary_text() -> None:
    words = 'I write <call>{"n": 7}</think>ok'
    said, _, _ = answer(words, Constraint(triggers=MORE, reasoning=THINKS))
    assert said.text["a"] == words
    own = Reasoning("<think>", "</think>")
    said, _, _ = answer("<think>" + words, Constraint(triggers=MORE, reasoning=own))
    assert said.text["a"] == "<think>" + words


def test_a_call_at_the_start_of_reasoning_counts_if_the_model_may_call_there() -> None:
    may = Reasoning("<think>", "</think>", opened=True, may_call=True)
    said, _, _ = answer('\n<call>{"n": 7}', Constraint(triggers=ONE, reasoning=may))
    assert json.loads(said.text["a"].partition("<call>")[2].removesuffix("</call>"))["n"] in (1, 2)


def test_a_stop_string_ends_free_text_but_not_a_call() -> None:
    words = 'a<call>\n{"n": 1}</call>b1c'
    said, _, _ = answer(words, Constraint(triggers=MORE), stop=("1",))
    assert said.text["a"] == 'a<call>\n{"n": 1}</call>b'
    assert said.finish("a").stop == "1"


def test_a_limit_counts_the_whole_answer() -> None:
    said, _, _ = answer('a<call>\n{"n": 1}</call>b', Constraint(triggers=MORE), most=12)
    assert len(said.tokens["a"]) == 12
    assert said.finish("a").reason == "length"


def test_a_trigger_with_a_required_prefix_counts_only_after_it() -> None:
    behind = {"<call>": GrammarTrigger("\n", CALL, preceded_by=r"to=\w+ ")}
    free, _, _ = answer('<call>{"n": 7}', Constraint(triggers=behind))
    assert free.text["a"] == '<call>{"n": 7}'
    held, _, _ = answer('to=f <call>{"n": 7}', Constraint(triggers=behind))
    assert held.text["a"].startswith('to=f <call>\n{"n": ')
    assert "7" not in held.text["a"]


class HeldBack:
    """A compiler that starts only after the test sets `let`, and fails if `can` is false."""

    def __init__(self, compile_: GrammarCompiler, can: bool = True) -> None:
        self._compile = compile_
        self._can = can
        self.asked = threading.Event()
        self.let = threading.Event()

    def __call__(self, grammar: tuple[str, str], begun: str) -> GrammarMatcher:
        self.asked.set()
        assert self.let.wait(60)
        if not self._can:
            raise UnsupportedError("the lark can't be enforced")
        return self._compile(grammar, begun)


def _submit(engine: Engine, outcome: Outcome, request: Request) -> None:
    outcome.take(engine.submit(request, engine.backend.tokenize(str(request.prompt))))


@pytest.mark.parametrize("can", [True, False])
def test_only_the_answer_that_needs_a_grammar_waits_for_it(can: bool) -> None:
    backend = Wishes('<call>{"n": 7}')
    compiler = HeldBack(GrammarCompiler(backend), can)
    engine = Engine(backend, EngineSettings(make_matcher=compiler))
    outcome = Outcome()
    tied = request_for("tied", PROMPT, 100, GREEDY, constraint=Constraint(triggers=ONE))
    _submit(engine, outcome, tied)
    while outcome.text.get("tied") != "<call>\n":
        outcome.take(advance(engine))
    assert compiler.asked.is_set()
    _submit(engine, outcome, request_for("free", "other words", 20, GREEDY, ignore_eos=True))
    while "free" not in outcome.ends:
        outcome.take(advance(engine))
    assert outcome.text["tied"] == "<call>\n"
    compiler.let.set()
    while engine.has_work:
        outcome.take(advance(engine))
    engine.check_integrity()
    if can:
        assert re.fullmatch(r'<call>\n\{"n": [12] ?\}</call>', outcome.text["tied"])
    else:
        assert outcome.text["tied"] == '<call>\n{"n": 7}'
    assert outcome.finish("tied").reason == "stop"
