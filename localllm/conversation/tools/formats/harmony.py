"""gpt-oss: channels. `analysis` is reasoning, `final` the answer, `commentary to=functions.name` a
call.

A message is a header up to <|message|>, then its text up to <|end|>, <|call|> or <|return|>. The
last two end the turn. Headers consist of control tokens and a few words. They are never shown, even
if they were cut off.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.conversation.reply import CallArguments, CallStart, Delta, TurnEnd
from localllm.conversation.tools.base import (
    GrammarTrigger,
    NamedSchemas,
    Tool,
    ToolFormat,
    Triggers,
)
from localllm.conversation.tools.lark import json_calls, spelled, text
from localllm.conversation.tools.readers import JsonReader

_MESSAGE = "<|message|>"
_NAME = re.compile(r"\s*([\w.-]+)")
_HEAD = re.compile(rf"{_NAME.pattern}.*?{re.escape(_MESSAGE)}\s*(?=\{{)", re.DOTALL)
_HEADERS = ("<|channel|>commentary", "<|channel|>analysis", "<|start|>assistant")
_OVER = ("<|call|>", "<|end|>", "<|return|>")


class _Reader(JsonReader):
    """One call: its header, then its arguments. A message without a JSON object is shown as
    text."""

    def feed(self, text: str) -> list[Delta]:
        header, found, body = (self._pending + text).partition(_MESSAGE)
        name = _NAME.match(header)
        body = body.lstrip()
        is_open = body.startswith("{") or any(o.startswith(body) and o != body for o in _OVER)
        if self._scan is not None or not found or (name is not None and is_open):
            return super().feed(text)
        self.rest = body
        if name is None or not body.startswith(_OVER):
            return []
        return [CallStart(self._next, name[1]), CallArguments(self._next, "{}")]

    def close(self, cut: bool) -> list[Delta]:
        """End of the reply. An incomplete header is dropped."""
        return []


_MARKERS = tuple(f"{header} to=functions." for header in _HEADERS)
_FIRST = " to=functions."
# The text before the arguments. Templates omit <|constrain|> in the history.
_KIND = f'" " <|constrain|>? {spelled(f"json{_MESSAGE}")}'


def _in_channel(name: str) -> str:
    return f"{text(name)} {_KIND}"


def _before_channel(name: str) -> str:
    return f"{spelled(f'{name}<|channel|>commentary')} {_KIND}"


def _in_or_before_channel(name: str) -> str:
    return f'{text(name)} (<|channel|> "commentary")? {_KIND}'


def _triggers(template: str, tools: NamedSchemas) -> Triggers:
    """One call. <|call|> ends the turn, so no further call follows."""
    commentary, analysis, start = _MARKERS
    inside = GrammarTrigger("", json_calls(tools, _in_channel), "<|call|>")
    outside = GrammarTrigger("", json_calls(tools, _before_channel), "<|call|>")
    # The prompt ends with the beginning of a header, so the first marker of a reply may lack it.
    # Elsewhere these words are text.
    first = GrammarTrigger(
        "", json_calls(tools, _in_or_before_channel), "<|call|>", preceded_by=r"\A"
    )
    return {commentary: inside, analysis: inside, start: outside, _FIRST: first}


def _framed(choices: str, answer: str) -> str:
    """All text is in a channel, and reasoning may come first."""
    thought = (
        f"{spelled('<|channel|>analysis<|message|>')} /(?s:.*)/ "
        f"{spelled('<|end|><|start|>assistant')}"
    )
    final = spelled("<|channel|>final<|message|>")
    return f"start: thought? ({choices})\nthought: {thought}\nanswer: {final} {answer}\n"


def _reader(first: int, marker: str, tools: Sequence[Tool]) -> _Reader:
    return _Reader(first, marker, _HEAD, "\0", single_value=True)


# Messages to the model's built-in tools (python, container.exec, browser.search) are dropped. A
# call of a function that was not offered is shown as text.
_TO_OWN_TOOLS = tuple((f"{header} to=", "<|end|>") for header in _HEADERS)
_TO_USERS = tuple((f"{header} to=user", _MESSAGE) for header in _HEADERS)
_TO_FUNCTIONS = tuple((f"{header} to=functions", _MESSAGE) for header in _HEADERS)
FORMATS = (
    # All text of a reply is in a channel.
    ToolFormat(
        name="harmony",
        signs=("<|channel|>",),
        markers=_MARKERS,
        control=True,
        named_tokens=True,
        drops=(
            "<|start|>assistant",
            # The header of any other message, and messages written in another role's name.
            ("<|channel|>", _MESSAGE),
            *_TO_OWN_TOOLS,
            *_TO_USERS,
            *_TO_FUNCTIONS,
            ("<|start|>assistant to=assistant", _MESSAGE),
            ("<|start|>", "<|end|>"),
            # A header without a message, before the real one.
            "<|channel|>commentary to=assistant",
            "<|end|>",
            # Misplaced: no header is open.
            _MESSAGE,
            "<|constrain|>",
            TurnEnd("<|return|>"),
            TurnEnd("<|call|>"),
        ),
        think=("<|channel|>analysis<|message|>", "<|end|>"),
        header="<|start|>assistant",
        reader=_reader,
        triggers=_triggers,
        framed=_framed,
    ),
)
