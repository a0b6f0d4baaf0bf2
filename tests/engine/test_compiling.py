"""Grammars are compiled in parallel with the streams: the streams continue, and only the request
with the grammar waits."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.drive import GREEDY, Outcome, advance, prompt_tokens, run
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Queued, Request
from localllm.engine.sampling import grammar as compiling
from localllm.engine.sampling.grammar import GrammarCompiler, GrammarMatcher
from localllm_backends.contract import LoadSpec
from localllm_backends.llamacpp import backend_type as llamacpp
from support.requests import request_for

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "legs": {"type": "integer"}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
GRAMMAR = ("json_schema", json.dumps(SCHEMA))


class HeldBack:
    """A compiler that starts only after the test sets `let`."""

    def __init__(self, compile_: GrammarCompiler) -> None:
        self._compile = compile_
        self.asked, self.let = threading.Event(), threading.Event()

    def __call__(self, grammar: tuple[str, str], beginning: str) -> GrammarMatcher:
        self.asked.set()
        assert self.let.wait(60)
        return self._compile(grammar, beginning)


@pytest.fixture
def held_back(few_layers: Path) -> Iterator[tuple[Engine, HeldBack]]:
    backend = llamacpp.load(LoadSpec(str(few_layers), n_ctx=1024))
    compiler = HeldBack(GrammarCompiler(backend))
    engine = Engine(backend, EngineSettings(make_matcher=compiler))
    yield engine, compiler
    compiler.let.set()
    engine.close()


def submit(engine: Engine, outcome: Outcome, request: Request) -> None:
    outcome.take(engine.submit(request, prompt_tokens(engine, request)))


def finish(engine: Engine, outcome: Outcome) -> None:
    for _ in range(3000):
        if not engine.has_work:
            engine.check_integrity()
            return
        outcome.take(advance(engine))
    raise AssertionError("the engine does not come to an end")


def test_streams_continue_while_a_grammar_is_compiled(held_back: tuple[Engine, HeldBack]) -> None:
    engine, compiler = held_back
    outcome = Outcome()
    submit(engine, outcome, request_for("stream", "Once upon a time", 60, GREEDY, ignore_eos=True))
    while not outcome.tokens.get("stream"):
        outcome.take(advance(engine))
    submit(engine, outcome, request_for("tied", "A cat in JSON: ", 60, GREEDY, grammar=GRAMMAR))
    assert compiler.asked.wait(60)
    before = len(outcome.tokens["stream"])
    for _ in range(10):
        outcome.take(advance(engine))
    assert len(outcome.tokens["stream"]) >= before + 10
    assert "tied" not in outcome.tokens
    compiler.let.set()
    finish(engine, outcome)
    assert outcome.finish("stream").usage.completion_tokens == 60
    assert set(json.loads(outcome.text["tied"])) == {"name", "legs"}


def test_other_requests_overtake_a_request_that_waits_for_its_grammar(
    held_back: tuple[Engine, HeldBack],
) -> None:
    engine, compiler = held_back
    outcome = Outcome()
    submit(engine, outcome, request_for("tied", "A cat in JSON: ", 60, GREEDY, grammar=GRAMMAR))
    submit(engine, outcome, request_for("free", "Once upon a time", 10, GREEDY, ignore_eos=True))
    while "free" not in outcome.ends:
        outcome.take(advance(engine))
    assert "tied" not in outcome.ends
    compiler.let.set()
    finish(engine, outcome)
    assert outcome.finish("tied").reason == "stop"


def test_a_cancelled_request_stops_waiting_for_its_grammar(
    held_back: tuple[Engine, HeldBack],
) -> None:
    engine, compiler = held_back
    outcome = Outcome()
    submit(engine, outcome, request_for("tied", "A cat in JSON: ", 60, GREEDY, grammar=GRAMMAR))
    assert compiler.asked.wait(60)
    outcome.take(engine.cancel("tied"))
    assert outcome.finish("tied").reason == "cancelled"
    assert not engine.has_work
    compiler.let.set()
    finish(engine, outcome)
    assert len(outcome.ends["tied"]) == 1


def test_a_grammar_compiled_too_late_ends_the_request_as_busy(
    held_back: tuple[Engine, HeldBack], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, compiler = held_back
    monkeypatch.setattr(compiling, "COMPILE_S", 0.05)
    outcome = Outcome()
    submit(engine, outcome, request_for("tied", "A cat in JSON: ", 60, GREEDY, grammar=GRAMMAR))
    assert compiler.asked.wait(60)
    finish(engine, outcome)
    failure = outcome.failure("tied")
    assert failure.code == "server_busy"
    assert "not compiled within" in failure.message
    monkeypatch.undo()
    compiler.let.set()
    submit(engine, outcome, request_for("next", "A cat in JSON: ", 60, GREEDY, grammar=GRAMMAR))
    finish(engine, outcome)
    assert set(json.loads(outcome.text["next"])) == {"name", "legs"}


def test_a_request_is_queued_only_if_its_grammar_is_valid(
    held_back: tuple[Engine, HeldBack],
) -> None:
    engine, compiler = held_back
    compiler.let.set()
    for key, grammar in (("good", GRAMMAR), ("bad", ("regex", "("))):
        request = request_for(key, "x", 3, GREEDY, grammar=grammar)
        events = engine.submit(request, prompt_tokens(engine, request))
        while engine.has_work:
            events += advance(engine)
        kinds = [type(event) for event in events]
        assert kinds.count(Queued) == (1 if key == "good" else 0)
        assert not kinds.index(Queued) if key == "good" else len(kinds) == 1, events


def test_a_grammar_continues_after_the_given_beginning(few_layers: Path) -> None:
    backend = llamacpp.load(LoadSpec(str(few_layers), n_ctx=1024))
    engine = Engine(backend, EngineSettings(make_matcher=GrammarCompiler(backend)))
    beginning = '{"name": "To'
    ask = request_for(
        "tied", "A cat in JSON: " + beginning, 60, GREEDY, grammar=GRAMMAR, beginning=beginning
    )
    outcome = run(engine, ask)
    assert outcome.finish("tied").reason == "stop"
    assert not outcome.text["tied"].startswith("{")
    value = json.loads(beginning + outcome.text["tied"])
    assert re.fullmatch("To.{0,10}", value["name"], re.DOTALL)
    assert isinstance(value["legs"], int)
    whole = '{"name": "Tom", "legs": 4}'
    outcome = run(
        engine,
        request_for("whole", "A cat: " + whole, 60, GREEDY, grammar=GRAMMAR, beginning=whole),
    )
    assert outcome.text.get("whole", "") == ""
    assert outcome.finish("whole").reason == "stop"
    # Text before the constrained part is not part of the grammar's text: the constrained part
    # starts after it.
    said = "Here it is: "
    outcome = run(
        engine,
        request_for("behind", "A cat. " + said, 60, GREEDY, grammar=GRAMMAR, beginning=said),
    )
    assert set(json.loads(outcome.text["behind"])) == {"name", "legs"}
    engine.close()
