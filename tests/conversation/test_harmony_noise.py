"""A client never sees harmony's control tokens, in any order and with any cut."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.conversation.reply import (
    CallArguments,
    CallStart,
    Content,
    Delta,
    ReasoningText,
    ReplyFormat,
)
from localllm.conversation.reply_parser import ReplyParser
from localllm.conversation.tools.formats import harmony
from support.examples import examples

CONTROL = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
WORDS = (
    "assistant", "analysis", "final", "commentary", " to", "=functions", ".f", " ", "json",
    '{"n": 1}', "{", "\n",
    "Hello", " a < b", " a <| b", "code", " to=python",
)  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
PLAIN = ReplyFormat(think=harmony.FORMATS[0].think, drops=harmony.FORMATS[0].drops)
WITH_TOOLS = replace(
    PLAIN,
    call_markers=harmony.FORMATS[0].markers,
    new_reader=lambda first, marker: harmony.FORMATS[0].reader(first, marker, TOOLS),
)


def heard(format: ReplyFormat, tokens: list[str]) -> list[Delta]:  # noqa: A002 - the word of the trade
    """Return the deltas of a reply that arrives token by token."""
    parser = ReplyParser(format)
    return [d for token in tokens for d in parser.feed(token)] + parser.close()


def shown(deltas: list[Delta]) -> str:
    """Return all text of the deltas."""
    return "\x00".join(d.name if isinstance(d, CallStart) else d.text for d in deltas)


@settings(max_examples=examples(1500))
@given(
    st.lists(st.sampled_from(CONTROL + WORDS), max_size=14), st.sampled_from([PLAIN, WITH_TOOLS])
)
def test_no_control_token_is_ever_shown(tokens: list[str], format: ReplyFormat) -> None:  # noqa: A002
    assert not re.search(r"<\|[a-z]+\|>", shown(heard(format, tokens))), tokens


REPLY = [
    "<|channel|>", "analysis", "<|message|>", "Think", ".", "<|end|>", "<|start|>", "assistant",
    "<|channel|>",
    "commentary", " to", "=functions", ".f", " ", "<|constrain|>", "json", "<|message|>", '{"n"',
    ": 1}", "<|call|>",
]  # fmt: skip


@pytest.mark.parametrize("end", range(len(REPLY) + 1))
def test_a_call_cut_after_any_token_shows_only_its_reasoning_and_arguments(end: int) -> None:
    deltas = heard(WITH_TOOLS, REPLY[:end])
    assert not any(isinstance(d, Content) for d in deltas)
    assert "Think.".startswith("".join(d.text for d in deltas if isinstance(d, ReasoningText)))
    assert '{"n": 1}'.startswith("".join(d.text for d in deltas if isinstance(d, CallArguments)))
    assert [d.name for d in deltas if isinstance(d, CallStart)] == (["f"] if end >= 18 else [])


@pytest.mark.parametrize("last", ["<|call|>", "<|return|>"])
def test_tokens_after_the_end_of_the_turn_are_dropped(last: str) -> None:
    before = ["<|channel|>", "final", "<|message|>", "Yes."]
    behind = ["<|start|>", "user", "<|message|>", "And now?", "<|end|>", *REPLY]
    assert (
        heard(WITH_TOOLS, [*before, last, *behind])
        == heard(WITH_TOOLS, [*before, last])
        == [Content("Yes.")]
    )
