"""Texts of the chat: the welcome, warnings, the line under an answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from localllm.conversation.history import ConversationSummary, StoredMessage
from localllm.errors import ContextLengthError, LocalLLMError
from localllm_tui.control.formatting import ago, elide, how_many
from localllm_tui.control.terminal import one_line


def welcome(
    model: str, greeting: str, earlier: Sequence[ConversationSummary], host: str = ""
) -> str:
    """The top of an empty conversation, as Markdown; `earlier` are the conversations it offers,
    newest first. `host` is the address of a server that is not on this machine."""
    name = _plain(one_line(model))
    parts = [f"**localllm** with **{name}** on this machine. Nothing you type leaves it."]
    if host:
        parts = [f"**localllm** with **{name}** at {host}. Your questions are sent there."]
    if greeting:
        parts.append(greeting)
    if not earlier:
        return "\n\n".join([*parts, "Ask anything. F1 shows all commands."])
    parts.append("Earlier conversations (`/continue` opens the first, `/list` finds any):")
    now = time.time()
    rows = []
    for n, summary in enumerate(earlier, 1):
        title = _plain(elide(one_line(summary.title), 48))
        size = how_many(summary.n_messages, "message")
        rows.append(f"{n}. {title} · {ago(now - summary.updated_s)}, {size}")
    parts.append("\n".join(rows))
    return "\n\n".join(parts)


CONTINUED_IN_COPY = (
    "Another window removed an earlier turn, so this "
    "conversation continues in a copy; /list shows both"
)
CHANGED_ELSEWHERE = (
    "Another window has continued this conversation too. Its turns are other versions here "
    "(◂ ▸, F2 selects a turn)"
)


NOT_LOADED = (
    "Your text is kept. /model shows the other installed models, /retry asks again when the "
    "cause is fixed."
)


def next_steps(error: LocalLLMError, *, kept: bool, without_history: bool) -> str:
    """Return the user's next steps after an answer failed. `kept`: a part of it is saved.
    `without_history`: no more messages can be left out."""
    may_compact = isinstance(error, ContextLengthError) and not without_history
    if kept and may_compact:
        return (
            "The text so far is kept. /compact leaves out the oldest messages and asks again; "
            "/retry asks again, /edit changes the question, /new starts a new conversation."
        )
    if kept:
        return (
            "The text so far is kept. /more continues it, /retry asks again, /edit changes the "
            "question, /new starts a new conversation."
        )
    if may_compact:
        return (
            "/compact leaves out the oldest messages and asks again; /retry asks again, "
            "/edit changes the question, /drop removes it, /new starts a new conversation."
        )
    return (
        "/retry asks again, /edit changes the question, /drop removes it, /new starts a new "
        "conversation."
    )


def in_a_line(error: LocalLLMError) -> str:
    """Format an error in one line, for a short message."""
    return f"{error.message}. {error.hint}".rstrip(". ")


def nearly_full(used: int, n_ctx: int) -> str:
    """The warning that the context is nearly full."""
    return (
        f"The context is {used / n_ctx:.0%} full ({used:,} of {n_ctx:,} tokens). Compact it? "
        "/compact replaces the earlier messages by a summary, and /compact WHAT says what to keep. "
        "/new starts another conversation, /save writes this one to a file."
    )


def _plain(text: str) -> str:
    """`text` with Markdown's special characters escaped."""
    return "".join("\\" + c if c in "\\`*_{}[]<>()#+-.!|~" else c for c in text)


# The notes about finish reasons other than the usual ones.
_ENDS = {
    "stopped": "stopped; /more continues it, /retry answers again",
    "repetition": "ended, because it repeats itself; /more continues it, /retry answers again",
    "length": "cut at the token limit; /more continues it",
    "content_filter": "ended by the server's content filter",
    "error": "interrupted; /more continues it, /retry answers again",
}


def note_under(turn: StoredMessage) -> str:
    """The line under an answer: only exceptional facts."""
    return "; ".join(_notes(turn))


def _notes(turn: StoredMessage) -> Iterator[str]:
    meta = turn.meta
    reason = meta.get("finish_reason")
    if not turn.complete:
        yield "the chat ended before the answer; /more continues it, /retry answers again"
    elif reason in _ENDS:
        yield _ENDS[reason]
    if meta.get("left_out"):
        yield f"the {meta['left_out']} oldest messages were left out, because of the context size"
    if meta.get("identical_calls"):
        called = one_line(meta["identical_calls"])
        yield f"called in a row, with the same result: {called}"
    again = int(meta.get("reread_tokens") or 0)
    if again and meta.get("reread_why"):
        yield f"{again:,} tokens were prefilled again: {meta['reread_why']}"
    elif again:
        yield f"{again:,} tokens were prefilled again"
    if meta.get("edited"):
        yield "changed by you"
