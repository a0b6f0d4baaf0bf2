"""Texts of the chat: the welcome, warnings, the line under an answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from localllm.conversation.history import ConversationSummary, StoredMessage
from localllm.errors import ContextLengthError, LocalLLMError
from localllm_tui.control.formatting import ago, elide, how_many
from localllm_tui.control.terminal import one_line


def welcome(
    model: str, greeting: str, earlier: Sequence[ConversationSummary], elsewhere: str = ""
) -> str:
    """The top of an empty conversation, as Markdown; `earlier` are the conversations it offers,
    newest first. `elsewhere` is the address of a server that is not on this machine."""
    name = _plain(one_line(model))
    parts = [f"**localllm** with **{name}** on this machine. Nothing you type leaves it."]
    if elsewhere:
        parts = [f"**localllm** with **{name}** at {elsewhere}: what you ask goes there."]
    if greeting:
        parts.append(greeting)
    if not earlier:
        return "\n\n".join([*parts, "Ask anything. F1 shows what else there is."])
    parts.append("Earlier conversations (`/continue` opens the first, `/list` finds any):")
    now = time.time()
    rows = []
    for n, summary in enumerate(earlier, 1):
        title = _plain(elide(one_line(summary.title), 48))
        size = how_many(summary.n_messages, "message")
        rows.append(f"{n}. {title} · {ago(now - summary.updated_s)}, {size}")
    parts.append("\n".join(rows))
    return "\n\n".join(parts)


CONTINUED_ELSEWHERE = (
    "Another window has removed what this goes on from, so here it goes on in a copy of the "
    "conversation; /list has both"
)
CONTINUED_BESIDE = (
    "Another window has gone on with this conversation too: what was said there stands beside "
    "this (◂ ▸, F2 selects a turn)"
)


NOT_LOADED = (
    "What you type is kept. /model shows what else is installed here, /retry asks again once "
    "that is settled."
)


def next_steps(error: LocalLLMError, *, kept: bool, alone: bool) -> str:
    """Say how the user can go on after an answer failed; `kept`: part of it is kept, `alone`: no
    more messages can be left out."""
    may_compact = isinstance(error, ContextLengthError) and not alone
    if kept and may_compact:
        return (
            "The text so far is kept. /compact leaves out the oldest messages and asks again; "
            "/retry asks again, /edit changes the question, /new starts afresh."
        )
    if kept:
        return (
            "The text so far is kept. /retry asks again, /edit changes the question, "
            "/new starts afresh."
        )
    if may_compact:
        return (
            "/compact leaves out the oldest messages and asks again; /retry asks again, "
            "/edit changes the question, /drop removes it, /new starts afresh."
        )
    return "/retry asks again, /edit changes the question, /drop removes it, /new starts afresh."


def in_a_line(error: LocalLLMError) -> str:
    """Format an error in one line, for a short message."""
    return f"{error.message}. {error.hint}".rstrip(". ")


def nearly_full(used: int, n_ctx: int) -> str:
    """The warning that the context is nearly full."""
    return (
        f"The context is {used / n_ctx:.0%} full ({used:,} of {n_ctx:,} tokens): soon the "
        "conversation will not fit. /compact lets the oldest messages be left out then, /new "
        "starts another, /save keeps this one as a file."
    )


def _plain(text: str) -> str:
    """`text` with Markdown's special characters escaped."""
    return "".join("\\" + c if c in "\\`*_{}[]<>()#+-.!|~" else c for c in text)


def note_under(turn: StoredMessage) -> str:
    """The line under an answer: only exceptional facts."""
    return "; ".join(_notes(turn))


def _notes(turn: StoredMessage) -> Iterator[str]:
    meta = turn.meta
    reason = meta.get("finish_reason")
    if not turn.complete:
        yield "the chat ended here before the answer did; /more goes on, /retry answers again"
    elif reason == "stopped":
        yield "stopped; /more goes on, /retry answers again"
    elif reason == "length":
        yield "cut at the token limit; /more goes on"
    elif reason == "error":
        yield "broke off; /more goes on, /retry answers again"
    if meta.get("left_out"):
        yield f"the {meta['left_out']} oldest messages were left out to fit the context"
    again = int(meta.get("reread_tokens") or 0)
    if again and meta.get("reread_why"):
        yield f"{again:,} tokens were read again: {meta['reread_why']}"
    elif again:
        yield f"{again:,} tokens were read again"
    if meta.get("edited"):
        yield "changed by you"
