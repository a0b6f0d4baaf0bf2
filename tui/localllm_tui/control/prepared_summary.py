"""The model's text of a summary, which may be written in a quiet moment before `/compact`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from localllm.conversation.lasting_facts import read_facts
from localllm.conversation.summary import task
from localllm.errors import LocalLLMError, UsageError
from localllm_tui.control.client import ChatClient
from localllm_tui.control.session import Session, after_summary
from localllm_tui.control.stream_events import AnswerDone, AnswerUsage, TextDelta
from localllm_tui.control.terminal import printable

# The summary, and the user's messages in it, have at most this share of the context.
_SHARE = 4
_DEFAULT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class PreparedSummary:
    """The model's `text` for the conversation up to the answer with the id `after`, and what it
    cost. `text` is empty if it could not be written."""

    text: str = ""
    usage: AnswerUsage | None = None
    after: int = 0


def wanted(client: ChatClient, session: Session, prepared: PreparedSummary) -> bool:
    """True if to prepare a summary: none was tried after the last answer, and the server is on this
    machine. Another server may take money for it."""
    turn = session.last_answer
    if turn is None or session.unanswered or prepared.after == turn.id:
        return False
    return client.is_local


async def prepare(
    client: ChatClient, model: str, session: Session, n_ctx: int | None
) -> PreparedSummary:
    """Write the summary before the user asks for it. If this fails, its text is empty."""
    turn = session.last_answer
    with suppress(LocalLLMError):
        request = task("", known_facts(session))
        return await write_summary(client, model, session, request, max_tokens(n_ctx))
    return PreparedSummary(after=turn.id if turn is not None else 0)


async def write_summary(
    client: ChatClient, model: str, session: Session, request: str, limit: int
) -> PreparedSummary:
    """The model's answer to `request`, of at most `limit` tokens. Raises UsageError if the model
    writes none."""
    turn = session.last_answer
    asked = [*session.context(), {"role": "user", "content": request}]
    sampling = {"max_tokens": limit, "temperature": 0, "service_tier": "flex"}
    text = ""
    usage: AnswerUsage | None = None
    async for event in client.stream(model, asked, compact=True, sampling=sampling):
        if isinstance(event, TextDelta):
            text += event.text
        elif isinstance(event, AnswerDone):
            usage = event.usage
    if not text.strip():
        raise UsageError(
            "the model wrote no summary, so nothing was compacted", hint="/compact asks again"
        )
    return PreparedSummary(text, usage, turn.id if turn is not None else 0)


def max_tokens(n_ctx: int | None) -> int:
    """The most tokens of a summary in a context of `n_ctx` (None: unknown)."""
    if n_ctx:
        return n_ctx // _SHARE
    return _DEFAULT_TOKENS


def facts_file(session: Session) -> Path | None:
    """The file of the conversation's lasting facts; None before the first message."""
    if session.id is None:
        return None
    return session.history.facts_path(session.id)


def known_facts(session: Session) -> tuple[str, ...]:
    """The facts in the file; without a file those of the last summary. Raises UsageError if the
    file can't be read."""
    file = facts_file(session)
    if file is None or not file.exists():
        earlier, _ = after_summary(session.sent_turns)
        if earlier is None:
            return ()
        return earlier.facts
    try:
        return tuple(printable(fact) for fact in read_facts(file))
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(
            f"the lasting facts in {file} can't be read: {e}",
            hint="correct or remove this file; /compact then asks again",
        ) from e
