"""What the chat says in words: its welcome, its warnings, the line under an answer that ended out of the ordinary."""

from __future__ import annotations

import time
from collections.abc import Sequence

from localllm.conversation.history import ConversationSummary, StoredMessage
from localllm.errors import ContextLengthError, LocalLLMError
from localllm_tui.control import commands
from localllm_tui.control.keys import Moment, hints
from localllm_tui.control.meter import ago, elide
from localllm_tui.control.terminal import printable


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


def footer(moment: Moment, typed: str, width: int, *, queued: bool = False) -> str:
    """The line under the input: what the keys do at `moment`, or the commands that `typed` can become.

    `queued`: a question waits for the answer to end.
    """
    if moment is Moment.ANSWERING:
        return hints(moment) + (" · sent when this answer ends" if queued else "")
    found = commands.matching(typed)
    if len(found) == 1:
        return f"/{found[0].name} · {found[0].help}"
    if found:
        return elide("  ".join(f"/{c.name}" for c in found), width)
    return hints(moment) + (" · /help" if moment is Moment.WRITING else "")


def way_on(error: LocalLLMError, *, kept: bool, compacts: bool) -> str:
    """What can be done after an answer that failed; `kept`: some of it came, `compacts`: leaving out is allowed already."""
    said = "The text so far is kept. " if kept else ""
    if isinstance(error, ContextLengthError) and not compacts:
        said += "/compact leaves out the oldest messages and asks again; "
    return f"{said}/retry asks again, /edit changes the question, /new starts afresh."


def full_context(used: int, n_ctx: int) -> str:
    """The warning that `used` of `n_ctx` tokens leave little room."""
    return (
        f"The context is {used / n_ctx:.0%} full ({used:,} of {n_ctx:,} tokens): soon the conversation will not fit. "
        "/compact lets the oldest messages be left out then, /new starts another, /save keeps this one as a file."
    )


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
