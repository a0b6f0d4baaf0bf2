"""What the chat says: its welcome, its warnings, the line under an answer."""

from __future__ import annotations

import time
from collections.abc import Sequence

from localllm.conversation.history import ConversationSummary, StoredMessage
from localllm.errors import ContextLengthError, LocalLLMError
from localllm_tui.control.formatting import ago, elide, how_many
from localllm_tui.control.terminal import one_line


def welcome(
    model: str, greeting: str, earlier: Sequence[ConversationSummary], elsewhere: str = ""
) -> str:
    """The top of an empty conversation, as Markdown; `earlier` are the conversations it offers,
    newest first. `elsewhere` is the address of a server that is not on this machine."""
    if elsewhere:
        stays = f"at {elsewhere}: what you ask goes there."
    else:
        stays = "on this machine. Nothing you type leaves it."
    lines = [f"**localllm** with **{_plain(one_line(model))}** {stays}"]
    if greeting:
        lines.append(greeting)
    if not earlier:
        return "\n\n".join([*lines, "Ask anything. F1 shows what else there is."])
    lines.append("Earlier conversations (`/continue` opens the first, `/list` finds any):")
    now = time.time()
    lines.append(
        "\n".join(
            f"{n}. {_plain(elide(one_line(c.title), 48))} · {ago(now - c.updated_s)}, "
            f"{how_many(c.n_messages, 'message')}"
            for n, c in enumerate(earlier, 1)
        )
    )
    return "\n\n".join(lines)


CONTINUED_ELSEWHERE = (
    "Another window has removed what this goes on from, so here it goes on in a "
    "copy "
    "of "
    "the "
    "conversation; /list has both"
)
CONTINUED_BESIDE = (
    "Another window has gone on with this conversation too: what was said there "
    "stands "
    "beside "
    "this (◂ ▸, F2 selects a turn)"
)


NOT_LOADED = (
    "What you type is kept. /model shows what else is installed here, /retry asks again "
    "once "
    "that "
    "is settled."
)


def next_steps(error: LocalLLMError, *, kept: bool, alone: bool) -> str:
    """What the user can do after an answer failed; `kept`: part of it is kept, `alone`: nothing
    more can be left out."""
    said = "The text so far is kept. " if kept else ""
    if isinstance(error, ContextLengthError) and not alone:
        said += "/compact leaves out the oldest messages and asks again; "
    drop = "" if kept else "/drop removes it, "
    return f"{said}/retry asks again, /edit changes the question, {drop}/new starts afresh."


def in_a_line(error: LocalLLMError) -> str:
    """An error as it is said in passing."""
    return f"{error.message}. {error.hint}".rstrip(". ")


WILL_NOT_FIT = (
    "the conversation will not fit. /compact lets the oldest messages be left out then, /new "
    "starts another, /save keeps this one as a file."
)


def _plain(text: str) -> str:
    """`text` with Markdown's special characters escaped."""
    return "".join("\\" + c if c in "\\`*_{}[]<>()#+-.!|~" else c for c in text)


def note_under(turn: StoredMessage) -> str:
    """The line under an answer: only what is out of the ordinary."""
    meta = turn.meta
    ended = {
        "stopped": "stopped; /more goes on, /retry answers again",
        "length": "cut at the token limit; /more goes on",
        "error": "broke off; /more goes on, /retry answers again",
    }.get(str(meta.get("finish_reason") or ""), "")
    if not turn.complete:
        ended = "the chat ended here before the answer did; /more goes on, /retry answers again"
    left_out = int(meta.get("left_out") or 0)
    again = int(meta.get("reread_tokens") or 0)
    why = f": {meta['reread_why']}" if meta.get("reread_why") else ""
    said = [
        ended,
        f"the {left_out} oldest messages were left out to fit the context" if left_out else "",
        f"{again:,} tokens were read again{why}" if again else "",
        "changed by you" if meta.get("edited") else "",
    ]
    return "; ".join(part for part in said if part)
