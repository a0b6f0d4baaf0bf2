"""gpt-oss's channels, read token by token with control tokens rendered.

Reasoning, answer and calls are separated, and no part of a header is ever shown, wherever the
stream is cut.
"""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.conversation.reply import (
    CallArguments,
    CallStart,
    Content,
    ReasoningText,
    ReplyFormat,
)
from localllm.conversation.reply_parser import ReplyParser
from localllm.conversation.tools import FORMATS
from localllm.conversation.tools.base import parameters_of

STYLE = next(f for f in FORMATS if f.name == "harmony")
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
]
assert parameters_of(TOOLS[0])[0] == "get_weather"

TOKEN = re.compile(r"<\|\w+\|>|\s?\w+|.", re.DOTALL)
"""Control tokens come whole, text in words."""
MARKER = re.compile(r"<\|\w")

ANALYSIS = "<|channel|>analysis<|message|>We need the weather.<|end|>"
CALL = (
    '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": '
    '"Paris"}<|call|>'
)
FINAL = "<|channel|>final<|message|>It rains."
NEXT = "<|start|>assistant"

Read = tuple[str, str, list[tuple[str, str]]]


def parser(tools: bool = True) -> ReplyParser:
    return ReplyParser(
        ReplyFormat(
            think=STYLE.think,
            call_markers=STYLE.markers if tools else (),
            new_reader=(lambda first, marker: STYLE.reader(first, marker, TOOLS))
            if tools
            else None,
            drops=STYLE.drops,
        )
    )


def read(pieces: list[str], tools: bool = True) -> Read:
    """Return reasoning, answer and calls."""
    reader = parser(tools)
    thought, answer, calls = "", "", []
    for delta in [d for piece in pieces for d in reader.feed(piece)] + reader.close():
        if isinstance(delta, ReasoningText):
            thought += delta.text
        elif isinstance(delta, Content):
            answer += delta.text
        elif isinstance(delta, CallStart):
            calls.append([delta.name, ""])
        else:
            assert isinstance(delta, CallArguments)
            calls[delta.index][1] += delta.text
    return thought, answer, [(n, a) for n, a in calls]


def cuts(text: str) -> list[list[str]]:
    return [
        [text],
        TOKEN.findall(text),
        list(text),
        *([text[:i], text[i:]] for i in range(1, len(text))),
    ]


WEATHER = ("get_weather", '{"city": "Paris"}')
REPLIES: dict[str, tuple[str, Read]] = {
    "answer": (FINAL, ("", "It rains.", [])),
    "thought, answer": (
        ANALYSIS + NEXT + FINAL + "<|return|>",
        ("We need the weather.", "It rains.", []),
    ),
    "thought, call": (ANALYSIS + NEXT + CALL, ("We need the weather.", "", [WEATHER])),
    "two thoughts": (
        ANALYSIS + NEXT + "<|channel|>analysis<|message|> Yes.<|end|>" + NEXT + FINAL,
        ("We need the weather.Yes.", "It rains.", []),
    ),
    "words before a call": (
        ANALYSIS + NEXT + "<|channel|>commentary<|message|>Let me look.<|end|>" + NEXT + CALL,
        ("We need the weather.", "Let me look.", [WEATHER]),
    ),
    "call from the analysis channel": (
        CALL.replace("commentary", "analysis", 1),
        ("", "", [WEATHER]),
    ),
    "call as templates write it": (
        ANALYSIS + NEXT + ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": '
        '"Paris"}<|call|>',
        ("We need the weather.", "", [WEATHER]),
    ),
    "call without arguments": (
        CALL.replace('{"city": "Paris"}', ""),
        ("", "", [("get_weather", "{}")]),
    ),
    "braces and markers of text in arguments": (
        CALL.replace("Paris", "} <| {"),
        ("", "", [("get_weather", '{"city": "} <| {"}')]),
    ),
    "answer in a schema": (
        '<|channel|>final <|constrain|>json<|message|>{"ok": true}<|return|>',
        ("", '{"ok": true}', []),
    ),
    "thought without an end": (
        ANALYSIS.removesuffix("<|end|>") + FINAL,
        ("We need the weather.", "It rains.", []),
    ),
    "thought without an end, then a call": (
        ANALYSIS.removesuffix("<|end|>") + NEXT + CALL,
        ("We need the weather.", "", [WEATHER]),
    ),
    "a result the model makes up": (
        "<|start|>functions.get_weather "
        "to=assistant<|channel|>commentary<|message|>{}<|end|>" + NEXT + FINAL,
        ("", "It rains.", []),
    ),
    "a tool of the model's own": (
        NEXT + " to=python<|channel|>commentary<|message|>1+1",
        ("", "", []),
    ),
    "its call, and the answer": (
        "<|channel|>commentary to=container.exec code<|message|>ls<|end|>" + NEXT + FINAL,
        ("", "It rains.", []),
    ),
    "a header without a message": (
        "<|channel|>commentary to=assistant"
        + "<|channel|>analysis<|message|>Weather.<|end|>"
        + NEXT
        + FINAL,
        ("Weather.", "It rains.", []),
    ),
    "a call that is no JSON": (CALL.replace("{", "Paris, {"), ("", 'Paris, {"city": "Paris"}', [])),
    "operators in the answer": (
        "<|channel|>final<|message|>f <| x |> g <|",
        ("", "f <| x |> g <|", []),
    ),
    "the turn ends with a call": (
        ANALYSIS + NEXT + CALL + NEXT + FINAL,
        ("We need the weather.", "", [WEATHER]),
    ),
    "the turn ends with a return": (
        FINAL + "<|return|>" + NEXT + CALL + "more",
        ("", "It rains.", []),
    ),
}


@pytest.mark.parametrize("name", REPLIES)
def test_channels_are_separated_with_any_division_of_the_stream(name: str) -> None:
    text, expected = REPLIES[name]
    for pieces in cuts(text):
        assert read(pieces) == expected, pieces


@pytest.mark.parametrize("name", REPLIES)
def test_a_stream_cut_anywhere_shows_no_marker(name: str) -> None:
    text, expected = REPLIES[name]
    tokens = TOKEN.findall(text)
    for pieces in [
        *(tokens[:n] for n in range(len(tokens))),
        *(list(text[:n]) for n in range(len(text))),
    ]:
        thought, answer, calls = read(pieces)
        shown = "\n".join([thought, answer, *(n + a for n, a in calls)])
        assert MARKER.search(shown) is None, pieces
        # "<" and "<|" alone are text: a control token comes in one piece, and languages have such
        # operators.
        assert expected[0].startswith(re.sub(r"<\|?$", "", thought))
        assert expected[1].startswith(re.sub(r"<\|?$", "", answer))
        assert [n for n, _ in calls] == [n for n, _ in expected[2]][: len(calls)]


@pytest.mark.parametrize(
    "name", ["answer", "thought, answer", "two thoughts", "answer in a schema"]
)
def test_channels_are_separated_without_tools_too(name: str) -> None:
    text, expected = REPLIES[name]
    for pieces in cuts(text):
        assert read(pieces, tools=False) == expected, pieces


def test_a_call_of_a_tool_that_was_not_offered_shows_no_marker() -> None:
    for pieces in cuts(ANALYSIS + NEXT + CALL):
        assert read(pieces, tools=False) == ("We need the weather.", '{"city": "Paris"}', [])


def test_each_token_produces_its_delta_at_once() -> None:
    reader = parser()
    seen = [
        (reader.feed(t), reader.thinking, reader.in_call)
        for t in TOKEN.findall(ANALYSIS + NEXT + CALL)
    ]
    deltas = [d for out, _, _ in seen for d in out]
    assert deltas[0] == ReasoningText("We")
    at = deltas.index(CallStart(0, "get_weather"))
    arguments = [d.text for d in deltas[at + 1 :] if isinstance(d, CallArguments)]
    assert json.loads("".join(arguments)) == {"city": "Paris"}
    assert len(arguments) > 3
    assert any(thinking for _, thinking, _ in seen)
    assert any(in_call for _, _, in_call in seen)
    assert not seen[-1][1]
    assert not seen[-1][2]


CONTROL = [
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
]
WORDS = [
    "assistant",
    "analysis",
    "commentary",
    "final",
    " to=functions.",
    "get_weather",
    " json",
    "{",
    '"',
    "}",
    " hi",
]


@given(st.lists(st.sampled_from([*CONTROL, *WORDS]), max_size=25))
def test_tokens_in_any_order_raise_no_error_and_are_parsed_alike_with_any_division(
    tokens: list[str],
) -> None:
    assert read(tokens) == read(["".join(tokens)]) == read(list("".join(tokens)))
