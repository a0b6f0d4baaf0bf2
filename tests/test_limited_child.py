"""A child process that exceeds its limits, or whose caller stops waiting, is ended. The next
request gets a fresh child."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from localllm.grammars.compile_limit import COMPILED
from localllm.limited_child import ChildError, ChildLimits, LimitedChild, Stages

SETUP = {"n_vocab": 300, "special": {"<|end|>": 299}, "named": {}, "eog": [299]}
SMALL = ("json_schema", '{"type": "object", "properties": {"a": {"type": "string"}}}')
LIMITS = (ChildLimits(0.05, 32 * 2**20), ChildLimits(0.3, 48 * 2**20))
# Grammars of different kinds that exceed a limit of time or memory.
TOO_MUCH = {
    "intersections": (
        "lark",
        "start: T\nT: " + " & ".join(f"/(a|b)*a(a|b){{{i}}}/" for i in range(20)),
    ),
    "repeats": ("regex", "(ab?)*" * 9000),
    "alternatives": ("lark", "start: " + " | ".join(f'"w{i}"' for i in range(40_000))),
}


@pytest.fixture(scope="module")
def stages() -> Iterator[Stages]:
    made = Stages(
        [
            LimitedChild("localllm.grammars.compile_limit", limits, lambda: SETUP)
            for limits in LIMITS
        ]
    )
    yield made
    made.close()


class Answer:
    def __init__(self, stages: Stages, question: object, wanted: bool = True) -> None:
        self.answer, self.reason = None, ""
        self._came = threading.Event()
        stages.submit(question, lambda: wanted, self._take)
        assert self._came.wait(60)

    def _take(self, answer: object, reason: str) -> None:
        self.answer, self.reason = answer, reason
        self._came.set()


@pytest.mark.parametrize("kind", TOO_MUCH)
def test_a_call_beyond_its_limits_is_ended_and_the_next_one_answered(
    stages: Stages, kind: str
) -> None:
    over = Answer(stages, TOO_MUCH[kind])
    assert over.answer is None
    assert "it takes more than" in over.reason
    small = Answer(stages, SMALL)
    assert small.answer is not None
    assert small.answer[0] == COMPILED


def test_the_reason_of_a_refused_grammar_is_returned(stages: Stages) -> None:
    assert "can't be enforced" in Answer(stages, ("regex", "(")).reason


def test_closing_ends_running_calls() -> None:
    child = LimitedChild("localllm.grammars.compile_limit", ChildLimits(60.0, 2**30), lambda: SETUP)
    assert child.ask(SMALL)
    threading.Timer(0.1, child.close).start()
    with pytest.raises(ChildError, match="caller stopped waiting"):
        child.ask(TOO_MUCH["alternatives"])
