"""What the chat says in words: its welcome, and the line under an answer that did not end in the ordinary way."""

from __future__ import annotations

import time
from collections.abc import Sequence

from localllm.conversation.history import ConversationSummary, StoredMessage
from localllm.errors import ContextLengthError, LocalLLMError
from localllm_tui.meter import ago, elide
from localllm_tui.terminal import printable
from localllm_tui.transcript import Question


def welcome(model: str, greeting: str, earlier: Sequence[ConversationSummary]) -> str:
    """The top of an empty conversation, as Markdown; `earlier` are the conversations it offers, newest first."""
    lines = [f"**localllm** with **{model}** on this machine. Nothing you type leaves it."]
    if greeting:
        lines.append(greeting)
    if not earlier:
        return "\n\n".join([*lines, "Ask anything. `/help` shows what else there is."])
    lines.append("Earlier conversations (`/continue` opens the first, `/list` finds any):")
    now = time.time()
    lines.append(
        "\n".join(
            f"- {_plain(elide(printable(c.title), 48))} · {ago(now - c.updated_s)}, {c.n_messages} messages"
            for c in earlier
        )
    )
    return "\n\n".join(lines)


def question_of(turn: StoredMessage) -> Question:
    """A stored question as the screen shows it: what was typed, and the names of the files."""
    return Question(str(turn.meta.get("typed", turn.content)), list(turn.meta.get("attached", ())))


def way_on(error: LocalLLMError, *, kept: bool, compacts: bool) -> str:
    """What can be done after an answer that failed; `kept`: some of it came, `compacts`: leaving out is allowed already."""
    said = "The text so far is kept. " if kept else ""
    if isinstance(error, ContextLengthError) and not compacts:
        said += "/compact leaves out the oldest messages and asks again; "
    return f"{said}/retry asks again, /edit changes the question, /new starts afresh."


def _plain(text: str) -> str:
    """`text` with what Markdown would obey taken out of force."""
    return "".join("\\" + c if c in "\\`*_{}[]<>()#+-.!|~" else c for c in text)


def note_under(turn: StoredMessage) -> str:
    """The line under an answer: only what is out of the ordinary."""
    reason = str(turn.meta.get("finish_reason") or "")
    said = {
        "stopped": "stopped; /retry answers again",
        "length": "cut at the token limit; say “continue” for the rest",
        "error": "broke off; /retry answers again",
    }.get(reason, "")
    if not turn.complete:
        said = "the chat ended here before the answer did; /retry answers again"
    left_out = int(turn.meta.get("left_out") or 0)
    if left_out:
        said += ("; " if said else "") + f"the {left_out} oldest messages were left out to fit the context"
    earlier = len(turn.meta.get("earlier", ()))
    if earlier:
        said += ("; " if said else "") + f"one of {earlier + 1} versions, /earlier shows another"
    return said
