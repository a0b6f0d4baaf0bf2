"""A conversation compacted to a summary: what the model is asked for, and the text that replaces the
earlier messages.

The model writes the summary. The rest is copied, so that no model can lose it: the newest messages
of the user, word for word, and one line for each tool call whose result is left out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from localllm import json_store

# Tool calls that are named one by one, the newest ones; the others are only counted.
_MAX_LISTED_CALLS = 40
_MAX_ARGUMENT_CHARS = 80
_MAX_QUESTIONS = 64
_MAX_QUESTION_CHARS = 16_000
_CUT = "[…]"
_STOP = """\
Stop here. Your context is full, so this conversation is replaced by a summary that you write now. \
Do not call tools and do not go on with the work."""
_CONTENT = """\
Write first the lasting facts, one in each line that begins with "- ": what the user wants and \
decided, names, numbers, paths and errors that matter later. Write then what is done, and what the \
next step is. Leave out everything that can be read again from a file or a tool."""
_TO_KEEP = "Keep in any case: "
_ALREADY_KEPT = "These facts are kept already, so do not repeat them:"
_CONTINUE = "[Go on with the newest of the user's messages]"


def task(to_keep: str = "", facts: Sequence[str] = (), content: str = "") -> str:
    """The request for a summary. `to_keep`: what the user wants to keep. `facts`: those that are
    kept already. `content`: a program's own description of the summary."""
    parts = [_STOP, content.strip() or _CONTENT]
    if to_keep.strip():
        parts.append(f"{_TO_KEEP}{to_keep.strip()}")
    if facts:
        parts.append("\n".join([_ALREADY_KEPT, *(f"- {fact}" for fact in facts)]))
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class Summary:
    """What is left of a conversation.

    - `text`: the model's summary.
    - `questions`: the user's newest messages, the oldest first.
    - `left_out`: the tool calls whose results are left out, one line each, the oldest first.
    - `uncounted`: older tool calls, which are not listed in `left_out`.
    - `facts`: the lasting facts, which are kept apart from the text (lasting_facts.py).
    """

    text: str
    questions: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    uncounted: int = 0
    facts: tuple[str, ...] = ()

    def message(self, sent: Collection[str] = (), *, answer_follows: bool = False) -> str:
        """The message that replaces the conversation. `sent`: messages of the user that the client
        still sends, which are not repeated. `answer_follows`: the answer follows at once."""
        parts = [f"[Earlier messages were replaced by this summary]\n{self.text.strip()}"]
        if self.facts:
            parts.append("\n".join(["[Lasting facts]", *(f"- {fact}" for fact in self.facts)]))
        questions = [question for question in self.questions if question not in sent]
        if questions:
            parts.append("\n".join(["[The user's messages before]", *questions]))
        if self.left_out:
            head = "[Left out are the results of these calls; call again if one is needed]"
            lines = [head, *self.left_out]
            if self.uncounted:
                lines.append(f"and {self.uncounted} earlier calls")
            parts.append("\n".join(lines))
        if answer_follows:
            parts.append(_CONTINUE)
        return "\n\n".join(parts)

    def as_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Summary | None:
        """The summary that `as_json` wrote, or None if `text` is something else."""
        summary = json_store.record(cls, json_store.parsed(text))
        if summary is None:
            return None
        lists = (summary.questions, summary.left_out, summary.facts)
        if not all(_are_texts(texts) for texts in lists):
            return None
        return summary


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) for text in value)


def left_of(
    messages: Sequence[Mapping[str, Any]], earlier: Summary | None, budget_chars: int
) -> Summary:
    """The summary of normalised `messages`, still without the model's text. `earlier`: the summary
    that these messages follow. The user's messages take at most `budget_chars`."""
    questions = [*earlier.questions] if earlier is not None else []
    lines = [*earlier.left_out] if earlier is not None else []
    uncounted = earlier.uncounted if earlier is not None else 0
    for message in messages:
        if message["role"] == "user":
            questions.append(message["content"])
        lines += (call_line(call["function"]) for call in message.get("tool_calls", ()))
    newest_lines = lines[-_MAX_LISTED_CALLS:]
    newest_questions = tuple(reversed([*_newest_questions(questions, budget_chars)]))
    return Summary(
        "", newest_questions, tuple(newest_lines), uncounted + len(lines) - len(newest_lines)
    )


def written(summary: Summary, text: str) -> Summary:
    """`summary` with the model's text."""
    return replace(summary, text=text.strip())


def _newest_questions(questions: Sequence[str], budget_chars: int) -> Iterator[str]:
    """The newest different messages within the budget, the newest first. The last one may be
    cut."""
    budget_left = min(budget_chars, _MAX_QUESTION_CHARS)
    for question in [*dict.fromkeys(reversed(questions))][:_MAX_QUESTIONS]:
        if not question.strip():
            continue
        if len(question) > budget_left:
            if budget_left > len(_CUT):
                yield question[: budget_left - len(_CUT)] + _CUT
            return
        budget_left -= len(question)
        yield question


def call_line(function: Mapping[str, Any]) -> str:
    """One line for a call: its name and the beginning of its arguments."""
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    arguments = " ".join(arguments.split())
    if len(arguments) > _MAX_ARGUMENT_CHARS:
        arguments = arguments[:_MAX_ARGUMENT_CHARS] + _CUT
    return f"{function['name']} {arguments}"
