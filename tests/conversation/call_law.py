"""The round trip of a call in every format.

The grammar accepts the complete call that a template writes, and then ends. The reader returns
the same call.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from conversation.test_grammar_triggers import CONTROL, ids_of, matcher
from localllm.conversation.messages import normalise
from localllm.conversation.reply import (
    CallArguments,
    CallStart,
    Content,
    Delta,
    ReasoningText,
    ReplyFormat,
)
from localllm.conversation.reply_parser import ReplyParser
from localllm.conversation.template import ChatTemplate
from localllm.conversation.tools.base import GrammarTrigger
from localllm.conversation.tools.prompt import Choice
from localllm.server.generation.prompt import Prompt, ResponseOptions, build_prompt

Calls = Sequence[tuple[str, Mapping[str, Any]]]

ASKED = "What (now)?"
# Text after the last call: the tokens that end a turn, and headers of the next one.
_AFTERWARDS = re.compile(r"(?:\s|<[^<>]*>|\[e~\[|<\|close\|>message<\|sep\|>)*")
# A message's header, which the grammar leaves to the model.
_HEADER = re.compile(r"[^{\n]*<\|message\|>")


class LawError(AssertionError):
    """A call is not written, constrained and read in the same way."""


def obeyed(
    template: ChatTemplate,
    tools: Sequence[dict[str, Any]],
    calls: Calls,
    prompt: Prompt | None = None,
) -> str:
    """Check the round trip of `calls` of `tools` in one turn, and return the checked text.

    `prompt` is the plan for `tools`, if the caller has it. Raises LawError.
    """
    prompt = prompt or planned(template, tools)
    turn = written(template, tools, calls, prompt)
    said = held(prompt.answer.calls, turn)
    check_read(prompt.answer.reply, said, calls)
    return said


def planned(template: ChatTemplate, tools: Sequence[dict[str, Any]]) -> Prompt:
    """Return the server's own plan of an answer that may call `tools`."""
    asked = normalise([{"role": "user", "content": ASKED}])
    return asyncio.run(
        build_prompt(template, asked, ResponseOptions(tools=tools, choice=Choice("auto")))
    )


def written(
    template: ChatTemplate, tools: Sequence[dict[str, Any]], calls: Calls, prompt: Prompt
) -> str:
    """Return the template's text of the assistant's turn, starting at the first call."""
    sent = [
        {
            "id": f"call0000{i}",
            "type": "function",
            "function": {"name": n, "arguments": json.dumps(a)},
        }
        for i, (n, a) in enumerate(calls)
    ]
    turns = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": "", "tool_calls": sent},
    ]
    whole = template.render(normalise(turns), tools=tools, add_generation_prompt=False)
    # An id is any nine letters. If the server writes the id itself, it writes zeros.
    turn = re.sub(
        r"\[CALL_ID\]\w{9}", "[CALL_ID]000000000", whole[whole.rindex(ASKED) + len(ASKED) :]
    )
    lead = prompt.answer.reply.lead
    if lead and lead in turn:
        return turn[turn.index(lead) + len(lead) :]
    at, _ = _opening(prompt.answer.calls, turn)
    if at < 0:
        raise LawError(f"no opening of {sorted(prompt.answer.calls)} in {turn!r}")
    return turn[at:]


def held(starts: Mapping[str, GrammarTrigger], turn: str) -> str:
    """Return the part of `turn` that the grammars accepted, which is every call in it.

    Raises LawError.
    """
    rest, again = turn, True
    while (found := _opening(starts, rest))[0] >= 0:
        at, opening = found
        if not (_AFTERWARDS.fullmatch(rest[:at]) or _HEADER.fullmatch(rest[:at])):
            raise LawError(f"between two calls: {rest[:at]!r}")
        if not again:
            raise LawError(f"another call where one was the last: {rest!r}")
        start = starts[opening]
        rest = rest[at + len(opening) :]
        if not rest.startswith(start.lead):
            raise LawError(f"not the lead {start.lead!r}: {rest!r}")
        rest = _behind(start, rest[len(start.lead) :])
        again = start.again
    if not _AFTERWARDS.fullmatch(rest):
        raise LawError(f"behind the last call: {rest!r}")
    return turn[: len(turn) - len(rest)]


def _behind(start: GrammarTrigger, text: str) -> str:
    state = _matcher(start.grammar).deep_copy()
    taken = taken_by(state, text, [c for c in CONTROL if c in start.grammar[1]])
    if not state.is_accepting():
        raise LawError(f"accepted {text[:taken]!r}, refused {text[taken : taken + 60]!r}")
    rest = text[taken:]
    if not rest.startswith(start.closing):
        raise LawError(f"not the closing {start.closing!r}: {rest!r}")
    return rest[len(start.closing) :]


_matcher = lru_cache(64)(matcher)


def taken_by(state: LLMatcher, text: str, control: Sequence[str]) -> int:
    """Return how many characters of `text` the grammar accepts until it ends.

    `control` texts are passed as control tokens.
    """
    taken = 0
    for piece in re.findall("|".join([*map(re.escape, control), "(?s:.)"]), text):
        ids = ids_of(piece) if piece in control else list(piece.encode())
        if state.is_stopped() or state.validate_tokens(ids) < len(ids):
            break
        state.consume_tokens(ids)
        taken += len(piece)
    return taken


def check_read(reply: ReplyFormat, said: str, calls: Calls) -> None:
    """Raise LawError unless `said` is read as `calls` and no other text.

    It is read in one piece and character by character.
    """
    said = said.removeprefix(reply.lead)
    if reply.thinking and reply.think is not None:
        said = reply.think[1] + said
    wanted = [(n, dict(a)) for n, a in calls]
    for pieces in ([said], list(said)):
        text, thought, found = read(reply, pieces)
        if not same(found, wanted) or text or thought:
            raise LawError(f"read {found} {text!r} {thought!r}, wanted {wanted} of {said!r}")


def same(found: Any, wanted: Any) -> bool:
    """Return whether both are equal and of the same types: 1 equals neither true nor 1.0."""
    return json.dumps(found, sort_keys=True) == json.dumps(wanted, sort_keys=True)


def told(
    reply: ReplyFormat, pieces: Sequence[str], cut: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the answer, reasoning and calls of a reply in `pieces`, with arguments as text."""
    parser = ReplyParser(reply)
    deltas: list[Delta] = [d for piece in pieces for d in parser.feed(piece)] + parser.close(cut)
    calls: list[tuple[str, str]] = []
    for d in deltas:
        if isinstance(d, CallStart):
            calls.append((d.name, ""))
        elif isinstance(d, CallArguments):
            calls[d.index] = (calls[d.index][0], calls[d.index][1] + d.text)
    text = "".join(d.text for d in deltas if isinstance(d, Content))
    return text, "".join(d.text for d in deltas if isinstance(d, ReasoningText)), calls


def read(
    reply: ReplyFormat, pieces: Sequence[str], cut: bool = False
) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return the result of `told` with parsed arguments. Invalid JSON stays text."""
    text, thought, calls = told(reply, pieces, cut)
    return text, thought, [(n, _arguments(a)) for n, a in calls]


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _opening(starts: Mapping[str, GrammarTrigger], text: str) -> tuple[int, str]:
    """Return the position and text of the first opening, or -1 if there is none.

    Of two at the same position, the longer is returned.
    """
    found = [(at, -len(o), o) for o in starts if (at := text.find(o)) >= 0]
    return (min(found)[0], min(found)[2]) if found else (-1, "")
