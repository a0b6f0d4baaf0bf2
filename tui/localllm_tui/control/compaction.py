"""`/compact`: the model replaces the earlier messages of a conversation by a summary.

All turns stay on the screen and on disk. Only what later requests send changes, so it can be undone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.conversation.lasting_facts import merged, split_facts, write_facts
from localllm.conversation.summary import left_of, task, written
from localllm.errors import UsageError
from localllm_tui.control.formatting import how_many
from localllm_tui.control.prepared_summary import (
    facts_file,
    known_facts,
    max_tokens,
    write_summary,
)
from localllm_tui.control.session import after_summary
from localllm_tui.control.stream_events import AnswerUsage
from localllm_tui.control.terminal import printable

if TYPE_CHECKING:
    from localllm_tui.control.chat import ChatController

_CHARS_PER_TOKEN = 2


async def summarise(chat: ChatController, wanted: str) -> None:
    """Have the model summarise the conversation and keep the summary. `wanted`: what the user wants
    to keep. Shows what this costs and saves. Raises LocalLLMError."""
    session = chat.session
    turn = session.last_answer
    if turn is None or session.unanswered:
        raise UsageError("there is no answer to summarise yet", hint="/compact works after one")
    turns = session.sent_turns
    messages = session.context()
    share = max_tokens(chat.listed.n_ctx)
    file = facts_file(session)
    earlier, newer = after_summary(turns)
    known = known_facts(session)
    prepared = chat.idle_writing.summary
    if wanted or prepared.after != turn.id or not prepared.text:
        prepared = await write_summary(chat.client, chat.model, session, task(wanted, known), share)
    newer_messages = [
        {"role": newer_turn.role, "content": newer_turn.content} for newer_turn in newer
    ]
    left = left_of(newer_messages, earlier, share * _CHARS_PER_TOKEN)
    new, rest = split_facts(printable(prepared.text))
    facts = merged(known, new)
    summary = replace(written(left, rest), facts=facts)
    sent = [*messages[:1]] if messages[0]["role"] == "system" else []
    sent.append({"role": "user", "content": summary.message()})
    after = await chat.client.count(chat.model, sent)
    before = session.used_tokens
    if turn.id not in session.all_turns:
        raise UsageError(
            "the conversation changed meanwhile, so it was not compacted",
            hint="/compact asks again",
        )
    meta = {**turn.meta, "summary": summary.as_json()}
    if after is not None:
        meta["summary_tokens"] = after
    session.rewrite(replace(turn, meta=meta))
    note = _receipt(prepared.usage, before, after)
    if file is not None and facts:
        note += f". {_kept(file, facts)}"
    await chat.face.show_note(note)
    chat.face.changed(recount=True)


def _kept(file: Path, facts: tuple[str, ...]) -> str:
    """Write the facts, and say where they are."""
    try:
        write_facts(file, facts)
    except OSError as e:
        return f"The lasting facts could not be written to {file}: {e}"
    lasting = how_many(len(facts), "lasting fact")
    return f"{lasting}, which you may change: {file}"


def _receipt(usage: AnswerUsage | None, before: int, after: int | None) -> str:
    words = "the model now gets a summary in place of the earlier messages"
    if after is not None and before:
        words += f": {before:,} tokens became {after:,}"
    if usage is not None and usage.cached is not None:
        words += (
            f". It cost {usage.prompt - usage.cached:,} prompt tokens "
            f"({usage.cached:,} more were cached) and {usage.completion:,} output tokens"
        )
    return f"{words}. All messages stay here and on disk; /compact off undoes this"
