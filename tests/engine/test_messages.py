"""Messages at the engine's boundary survive a round trip through JSON, field by field."""

from __future__ import annotations

import json
from dataclasses import asdict, fields

from localllm.engine.messages import (
    Constraint,
    Generation,
    HiddenSpan,
    LoopLimits,
    Reasoning,
    Request,
    Sampling,
    SharedPrefix,
    ThinkingLimit,
    request_from_json,
)
from localllm.grammars.trigger import GrammarTrigger

SAMPLING = Sampling(
    0.1,
    2,
    0.3,
    0.4,
    0.5,
    1.6,
    7,
    0.8,
    0.9,
    10,
    {11: -1.5, 12: 2.0},
    0.2,
    1.5,
    3,
    99,
    ("x", "yz"),
    0.3,
    0.4,
)
GENERATION = Generation(
    SAMPLING,
    20,
    ("a", "b"),
    True,
    3,
    (5, 6),
    4.5,
    False,
    "expected",
    4,
    (8, 9),
    77,
    LoopLimits(9, 3, 4),
    -1,
    "anna",
    "of-three",
    "salt",
    ((0, 0.5), (2, 1.0)),
)
CONSTRAINT = Constraint(
    ("regex", "x+"),
    "{",
    "\n\n",
    {"<call>": GrammarTrigger("\n", ("lark", "start: x"), "</call>", True, True, "to=f")},
    Reasoning("<a>", "</a>", True, True),
)
REQUEST = Request(
    "id",
    [1, 2],
    GENERATION,
    CONSTRAINT,
    False,
    True,
    "ngram",
    ThinkingLimit(77, "<a>", "</a>", "\n", True),
    {"mark": "aGk="},
    (HiddenSpan("<a>", "</a>", True, True, True),),
    7,
    SharedPrefix(("host:1",), 5, 3),
)


def test_every_field_of_a_request_crosses_the_pipe() -> None:
    for value in (REQUEST, CONSTRAINT, GENERATION, SAMPLING):
        plain = type(value)("", "") if isinstance(value, Request) else type(value)()
        same = [f.name for f in fields(value) if getattr(value, f.name) == getattr(plain, f.name)]
        assert not same, f"these would not show that they got lost: {same}"
    assert request_from_json(json.loads(json.dumps(asdict(REQUEST)))) == REQUEST


def test_a_request_with_default_values_crosses_the_pipe() -> None:
    assert request_from_json(json.loads(json.dumps(asdict(Request("id", "text"))))) == Request(
        "id", "text"
    )
