"""The same calls in every format give one result, complete, cut anywhere or by character."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localllm.conversation import tools as tool_formats
from localllm.conversation.reply import (
    CallArguments,
    CallStart,
    Content,
    ReasoningText,
    ReplyFormat,
)
from localllm.conversation.reply_parser import ReplyParser
from localllm.conversation.tools import FORMATS, format_for
from localllm.conversation.tools.readers import JsonEnd
from localllm.conversation.tools.tag_reader import typed
from support.tool_writers import WRITERS, Calls

# Every type of parameter. If the format does not show the type, the schema determines it.
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "path": {"type": "string"},
                    "n": {"type": "integer"},
                    "x": {"type": "number"},
                    "on": {"type": "boolean"},
                    "items": {"type": "array"},
                    "opts": {"type": "object"},
                },
            },
        },
    }
    for name in ("f", "get_weather", "write_file", "a-b", "Search2", "ns.tool")
]


CASES: list[Calls] = [
    [("f", {})],
    [("f", {"text": ""})],
    [("get_weather", {"text": "Paris"})],
    [("get_weather", {"text": "São Paulo, 東京 🎉"})],
    [("f", {"n": 0})],
    [("f", {"n": -12345678901})],
    [("f", {"x": 1.5e-7})],
    [("f", {"on": True})],
    [("f", {"on": False, "n": 1})],
    [("f", {"items": []})],
    [("f", {"items": [1, 2, 3]})],
    [("f", {"items": ["a", "b, c", 'd"e']})],
    [("f", {"opts": {}})],
    [("f", {"opts": {"deep": {"deeper": [1, {"x": None}]}}})],
    [
        (
            "write_file",
            {"path": "/tmp/a.py", "text": "def f():\n    return {'a': [1]}\n\n\nprint(f())"},
        )
    ],
    [("write_file", {"path": "C:\\dir\\x", "text": 'quote " and \\ backslash'})],
    [("write_file", {"path": "a", "text": "braces } ] { [ and ``` fences"})],
    [("f", {"text": "line one\nline two"})],
    [("f", {"text": "123"})],
    [("f", {"text": "true"})],
    [("f", {"text": "null"})],
    [("f", {"text": '{"json": "inside"}'})],
    [("f", {"text": "a < b && c > d"})],
    [("a-b", {"text": "dash in the name"})],
    [("Search2", {"text": "Case and digit"})],
    [("ns.tool", {"text": "dot in the name"})],
    [("f", {"text": "x" * 300})],
    [("f", {"n": 1}), ("get_weather", {"text": "Rome"})],
    [("f", {}), ("f", {}), ("f", {"n": 3})],
    [
        (
            "write_file",
            {
                "path": "a",
                "text": "b",
                "n": 1,
                "x": 0.5,
                "on": True,
                "items": [None],
                "opts": {"k": "v"},
            },
        )
    ],
]


def _format(name: str) -> ReplyFormat:
    style = next(f for f in FORMATS if f.name == name)
    return ReplyFormat(
        think=style.think or ("<think>", "</think>"),
        call_markers=style.markers,
        new_reader=lambda first, marker: style.reader(first, marker, TOOLS),
        drops=style.drops,
    )


def _read(style: ReplyFormat, pieces: list[str]) -> tuple[str, str, list[list[str]]]:
    parser = ReplyParser(style)
    deltas = [d for piece in pieces for d in parser.feed(piece)] + parser.close()
    text, thought, calls = "", "", []
    for delta in deltas:
        if isinstance(delta, Content):
            text += delta.text
        elif isinstance(delta, ReasoningText):
            thought += delta.text
        elif isinstance(delta, CallStart):
            assert delta.index == len(calls)
            calls.append([delta.name, ""])
        elif isinstance(delta, CallArguments):
            assert delta.index == len(calls) - 1
            calls[-1][1] += delta.text
    return text, thought, calls


def _cuts(text: str) -> list[list[str]]:
    """Return the text in one piece, character by character, and cut in two.

    The cuts are after every character, or at about 200 places of a long text.
    """
    return [
        [text],
        list(text),
        *([text[:i], text[i:]] for i in range(1, len(text), 1 + len(text) // 200)),
    ]


@pytest.mark.parametrize("writer", WRITERS)
def test_every_case_is_parsed_in_every_format_with_any_cut(writer: str) -> None:
    name, write = WRITERS[writer]
    for calls in CASES:
        for pieces in _cuts(write(calls)):
            text, thought, found = _read(_format(name), pieces)
            assert [(n, json.loads(a)) for n, a in found] == calls, pieces
            assert (text, thought) == ("", "")


OWN_SECTIONS = ("llama3", "harmony", "gemma4", "kimi_k3", "muse", "cohere", "minimax_m3")


@pytest.mark.parametrize("writer", [w for w in WRITERS if not w.startswith(OWN_SECTIONS)])
def test_reasoning_and_words_before_the_call_are_kept(writer: str) -> None:
    name, write = WRITERS[writer]
    reply = "<think>\nWeather, so a tool.\n</think>\n\nLet me look.\n\n" + write(CASES[2])
    for pieces in _cuts(reply):
        text, thought, found = _read(_format(name), pieces)
        assert (text, thought, len(found)) == ("Let me look.", "Weather, so a tool.", 1)


SECTIONS = {
    "cohere": "<|START_THINKING|>Weather.<|END_THINKING|><|START_RESPONSE|>Let me "
    "look.<|END_RESPONSE|>",
    "kimi_k3": "<|open|>think<|sep|>Weather.<|close|>think<|sep|><|open|>response<|sep|>Let me "
    "look."
    "<|close|>response<|sep|>",
    "minimax_m3": "<mm:think>Weather.</mm:think>Let me look.",
    "muse": "<|start|>assistant to=self<|message|>Weather.<|eom|><|start|>assistant "
    "to=user<|message|>Let me look.<|eom|>",
}


@pytest.mark.parametrize("writer", SECTIONS)
def test_formats_with_sections_of_their_own_keep_reasoning_and_words(writer: str) -> None:
    name, write = WRITERS[writer]
    for pieces in _cuts(SECTIONS[writer] + write(CASES[2])):
        text, thought, found = _read(_format(name), pieces)
        assert (text, thought, len(found)) == ("Let me look.", "Weather.", 1)


def test_muse_calls_only_in_a_message_to_a_function() -> None:
    tags = WRITERS["muse"][1](CASES[2]).partition("<|message|>")[2]
    for pieces in _cuts(f"<|start|>assistant to=user<|message|>Write {tags} there.<|eot|>"):
        assert _read(_format("muse"), pieces) == (f"Write {tags} there.", "", [])


def test_minimax_m3_may_end_reasoning_that_it_did_not_begin() -> None:
    for pieces in _cuts("</mm:think>Hello."):
        assert _read(_format("minimax_m3"), pieces) == ("Hello.", "", [])


def test_gemma_4_opens_a_channel_twice() -> None:
    for pieces in _cuts("<|channel><|channel>thought\n<channel|>Hello."):
        assert _read(_format("gemma4"), pieces) == ("Hello.", "", [])


UNREADABLE = {
    "qwen_coder": "<tool_call><function=f>text: abc</function></tool_call>",
    "glm": "<tool_call>f<arg_key>text</arg_key>abc</tool_call>",
    "minimax": '<minimax:tool_call><invoke name="f">abc</invoke></minimax:tool_call>',
    "dsml": '<｜DSML｜tool_calls><｜DSML｜invoke name="f">abc</｜DSML｜invoke></｜DSML｜tool_calls>',
    "minicpm": '<function name="f">abc</function>',
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_call_with_unreadable_arguments_stays_text(name: str) -> None:
    assert _read(_format(name), [UNREADABLE[name]]) == (UNREADABLE[name], "", [])


def test_json_arguments_in_place_of_tags_are_parsed() -> None:
    assert _read(_format("qwen_coder"), ['<function=f>{"n": 1}</function>'])[2] == [
        ["f", '{"n": 1}']
    ]


@pytest.mark.parametrize(
    ("schema", "value", "read"),
    [
        ({"type": ["string", "integer"]}, "42", 42),
        ({"type": ["string", "integer"]}, "2 dollars", "2 dollars"),
        ({"type": ["string", "object"]}, '{"a": 1}', {"a": 1}),
        ({"type": ["string", "object"]}, "{a", "{a"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"anyOf": [{"type": "string"}, {"type": "boolean"}]}, "true", True),
        ({"type": "string"}, "null", "null"),
    ],
)  # fmt: skip
def test_a_value_of_several_types_is_text_only_if_no_other_type_fits(
    schema: dict[str, Any], value: str, read: Any
) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"v": schema}}},
    }
    assert typed(value, "v", "f", [tool]) == read


def test_gemma_4_thinks_in_a_channel_and_waits_for_results() -> None:
    reply = (
        '<|channel>thought\nWeather.\n<channel|>Let me look.<|tool_call>call:f{text:<|"|>a, '
        'b<|"|>}<tool_call|>'
    )
    for pieces in _cuts(reply + "<|tool_response>"):
        text, thought, calls = _read(_format("gemma4"), pieces)
        assert (text, thought) == ("Let me look.", "Weather.")
        assert [(n, json.loads(a)) for n, a in calls] == [("f", {"text": "a, b"})]
    for pieces in _cuts("<|channel>thought\n<channel|>Yes."):
        assert _read(_format("gemma4"), pieces) == ("Yes.", "", [])


MALFORMED = {
    "hermes": [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"nam',
        "<tool_call>{}</tool_call>",
        "<tool_call>",
    ],
    "llama3": [
        '{"name": "Bob", "age": 3}',
        '{"name": "unknown", "parameters": {"a": 1}}',
        '{"name"',
    ],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] sorry", "[TOOL_CALLS][1, 2]"],
    "phi": ["<|tool_call|>nothing<|/tool_call|>"],
    "deepseek": ["<｜tool▁calls▁begin｜>what<｜tool▁calls▁end｜>"],
    "kimi": ["<|tool_calls_section_begin|>what<|tool_calls_section_end|>"],
    "qwen_coder": ["<tool_call>\nwords\n</tool_call>", "<tool_call>"],
    "glm": ["<tool_call>not a call, words</tool_call>"],
    "minimax": ["<minimax:tool_call>what</minimax:tool_call>"],
    "lfm": [
        "<|tool_call_start|>[f(1 +]<|tool_call_end|>",
        "<|tool_call_start|>[f(x)]<|tool_call_end|>",
    ],
    "function_gemma": [
        "<start_function_call>call f<end_function_call>",
        "<start_function_call>call:f{a:[1}<end_function_call>",
        "<start_function_call>call:f{a:<escape>b}<end_function_call>",
        "<start_function_call>call:f{a}<end_function_call>",
        "<start_function_call>call:f{a:1} b<end_function_call>",
        "<start_function_call>call:f" + "{a:" * 2000 + "<end_function_call>",
    ],
    "gemma4": ["<|tool_call>f(1)<tool_call|>", "<|tool_call>call:f{a:<tool_call|>"],
}


@pytest.mark.parametrize(
    ("name", "reply"), [(n, r) for n, replies in MALFORMED.items() for r in replies]
)
def test_a_malformed_call_is_text(name: str, reply: str) -> None:
    for pieces in _cuts(reply):
        assert _read(_format(name), pieces) == (reply, "", [])


def test_arguments_are_streamed_as_they_come() -> None:
    parser = ReplyParser(_format("hermes"))
    parser.feed('<tool_call>\n{"name": "write_file", "arguments": {"text": "a')
    assert parser.feed(" b c") == [CallArguments(0, " b c")]


def test_only_the_first_call_passes_if_one_call_is_allowed() -> None:
    from dataclasses import replace

    one = replace(_format("hermes"), parallel=False)
    reply = WRITERS["hermes"][1](CASES[28])
    for pieces in _cuts(reply):
        assert len(_read(one, pieces)[2]) == 1


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("… <tool_call>\n{\"name\": …", "hermes"),
        ("<tool_call>\n<function=example>", "qwen_coder"),
        ("<tool_call>{name}<arg_key>", "glm"),
        ("<|channel|>analysis", "harmony"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|tool_call>call:", "gemma4"),
        ("<|tool_call|>", "phi"),
        ("Environment: ipython", "llama3"),
        ("no tools at all", "hermes"),
    ],
)  # fmt: skip
def test_the_format_is_detected_from_the_template(template: str, name: str) -> None:
    assert format_for(template).name == name


def test_every_format_has_its_own_name_and_a_case_here() -> None:
    names = [f.name for f in tool_formats.FORMATS]
    assert len(set(names)) == len(names)
    assert {name for name, _ in WRITERS.values()} == set(names)


@pytest.mark.parametrize(
    "value", ["{}", '{"a": "}"}', "[1, [2]]", '{"a": "\\"}", "b": {"c": "\\\\"}}']
)
def test_the_end_of_a_json_value_is_found_with_any_cut(value: str) -> None:
    text = value + " rest } ]"
    for cut in range(len(text)):
        scan = JsonEnd()
        at = scan.feed(text[:cut])
        if at < 0:
            at = cut + scan.feed(text[cut:])
        assert at == len(value)


HALF = {
    "hermes": '<tool_call>{"name": "f", "arguments": "{\\"items\\": '
    '[\\"\\\\ud83d\\"]}"}</tool_call>',
    "qwen_coder": '<tool_call><function=f><parameter=items>["\\ud83d"]</parameter></function></tool_call>',
    "glm": '<tool_call>f\n<arg_key>items</arg_key><arg_value>["\\ud83d"]</arg_value></tool_call>',
    "minimax": '<minimax:tool_call><invoke name="f"><parameter '
    'name="items">["\\ud83d"]</parameter></invoke>'
    "</minimax:tool_call>",
    "lfm": '<|tool_call_start|>[f(items=["\\ud83d"])]<|tool_call_end|>',
}


@pytest.mark.parametrize("name", HALF)
def test_half_of_a_surrogate_pair_in_arguments_is_passed_on(name: str) -> None:
    text, _, calls = _read(_format(name), [HALF[name]])
    assert text == ""
    assert [n for n, _ in calls] == ["f"]
    calls[0][1].encode()
    assert json.loads(calls[0][1]) == {"items": ["\ud83d"]}
