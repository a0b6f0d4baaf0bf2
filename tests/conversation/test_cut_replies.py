"""Replies that a limit cuts, in every format and after every character.

No partial call is returned as complete, and no part of a marker is shown.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from conversation.call_law import told
from conversation.test_tool_formats import CASES, TOOLS, WRITERS, Calls
from localllm.conversation.reply import ReplyFormat
from localllm.conversation.tools import FORMATS

TWO: Calls = [
    ("write_file", {"path": "a.c", "text": "int main() {\n  return 0;\n}"}),
    ("f", {"n": 12, "on": True}),
]


def reply_format(name: str, thinking: bool = False) -> ReplyFormat:
    style = next(f for f in FORMATS if f.name == name)
    return ReplyFormat(
        think=style.think or ("<think>", "</think>"),
        thinking=thinking,
        call_markers=style.markers,
        new_reader=lambda first, marker: style.reader(first, marker, TOOLS),
        drops=style.drops,
        calls_in_reasoning=style.calls_in_reasoning,
        quotable=not style.control,
    )


def whole(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("calls", [TWO, CASES[13]])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_reply_cut_at_any_character_has_no_partial_call_and_no_tag(
    writer: str, calls: Calls
) -> None:
    name, write = WRITERS[writer]
    reply, style = write(calls), reply_format(name)
    for end in range(len(reply)):
        part = reply[:end]
        for pieces in ([part], list(part)):
            text, thought, found = told(style, pieces, cut=True)
            complete = [(n, json.loads(a)) for n, a in found if whole(a)]
            assert complete == calls[: len(complete)], part
            # The text streamed before the cut is half an object, which no client accepts as
            # arguments.
            assert len(found) - len(complete) <= 1, part
            assert (len(text) <= 2, thought) == (True, ""), part


@pytest.mark.parametrize("writer", ["qwen_coder", "glm", "minimax", "seed"])
def test_a_call_with_a_truncated_value_is_dropped(writer: str) -> None:
    name, write = WRITERS[writer]
    reply = write(TWO[:1])
    part = reply[: reply.index("return 0") + 5]
    assert told(reply_format(name), [part], cut=True) == ("", "", [])


THOUGHT = [
    w
    for w, (name, _) in WRITERS.items()
    if next(f for f in FORMATS if f.name == name).calls_in_reasoning
]


@pytest.mark.parametrize("letters", [False, True])
@pytest.mark.parametrize("writer", THOUGHT)
class TestOpenReasoning:
    """The prompt ends with the reasoning's opening marker, and the model never writes the closing
    one."""

    def read(
        self, writer: str, letters: bool, reply: str, cut: bool = False
    ) -> tuple[str, str, list[str]]:
        text, thought, calls = told(
            reply_format(WRITERS[writer][0], True), list(reply) if letters else [reply], cut
        )
        return text, thought, [n for n, _ in calls]

    def test_a_call_at_the_end_of_the_reasoning_is_a_call(self, writer: str, letters: bool) -> None:
        call = WRITERS[writer][1](TWO)
        for end in ("", "\n", "\n</think>\n", "</think>"):
            got = self.read(writer, letters, f"I need a file.\n{call}{end}")
            assert got == ("", "I need a file.", ["write_file", "f"]), end

    def test_a_call_before_any_reasoning_is_a_call(self, writer: str, letters: bool) -> None:
        assert self.read(writer, letters, WRITERS[writer][1](TWO)) == ("", "", ["write_file", "f"])

    def test_a_call_quoted_in_the_reasoning_stays_reasoning(
        self, writer: str, letters: bool
    ) -> None:
        call = WRITERS[writer][1](TWO[1:])
        quoted = f"I could write\n{call}\nbut no."
        assert self.read(writer, letters, f"{quoted}</think>Hello.") == ("Hello.", quoted, [])
        assert self.read(writer, letters, f"So:\n{call}\n</think>\nHello.") == (
            "Hello.",
            f"So:\n{call}",
            [],
        )

    def test_a_call_planned_in_the_reasoning_is_made_only_once(
        self, writer: str, letters: bool
    ) -> None:
        call = WRITERS[writer][1](TWO[1:])
        assert self.read(writer, letters, f"Plan:\n{call}\n</think>\n{call}") == (
            "",
            f"Plan:\n{call}",
            ["f"],
        )

    def test_a_truncated_call_in_the_reasoning_is_dropped(self, writer: str, letters: bool) -> None:
        call = WRITERS[writer][1](TWO[1:])
        assert self.read(writer, letters, f"So:\n{call[: len(call) // 2]}", cut=True) == (
            "",
            "So:",
            [],
        )


def test_a_marker_mentioned_in_the_reasoning_stays_reasoning() -> None:
    style = reply_format("hermes", thinking=True)
    assert told(style, ["Then <tool_call> is what I write."], cut=False)[1] == (
        "Then <tool_call> is what I write."
    )


@pytest.mark.parametrize("thinking", [False, True])
def test_text_after_the_end_of_the_turn_is_dropped(thinking: bool) -> None:
    style = replace(reply_format("glm", thinking), ends=("<|role_end|>",))
    text, thought, _ = told(style, list("Yes.<|role_end|><role>HUMAN"), cut=False)
    assert (text, thought) == (("", "Yes.") if thinking else ("Yes.", ""))
