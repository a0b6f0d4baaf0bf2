"""A title for a conversation, made by its model when nobody waits for it."""

from __future__ import annotations

import re

from localllm.conversation.history import StoredMessage
from localllm.errors import LocalLLMError
from localllm_tui.control.client import ChatClient, TextDelta
from localllm_tui.control.session import Session
from localllm_tui.control.terminal import printable
from localllm_tui.control.texts import TITLE_CHARS

_ASK = "Give this conversation a title of two to six words. Answer with the title alone, without quotes."
_MOST_TOKENS = 24
_MOST_WORDS = 9


def wanted(session: Session) -> bool:
    """Whether a title is to be made: there is an answer, and the title is still the beginning of the first question."""
    return session.id is not None and not session.titled and session.last_answer is not None and not session.unanswered


async def give(client: ChatClient, model: str, session: Session) -> None:
    """Ask the model for a title, and keep it if it is one. Asked once: an answer that is no title is not asked for again."""
    conv_id, turns = session.id, list(session.turns)
    if conv_id is None:
        return
    text = ""
    messages = [*session.context(), {"role": "user", "content": _ASK}]
    try:
        # What was said is known to the server, so this costs the request's own few tokens; typing ends it.
        async for event in client.stream(model, messages, sampling={"max_tokens": _MOST_TOKENS, "temperature": 0}):
            if isinstance(event, TextDelta):
                text += event.text
    except LocalLLMError:
        session.titled = 1  # here, not on disk: it is asked for again when the conversation is opened again
        return
    title = clean(text, turns)
    if session.id != conv_id or session.titled:
        return
    try:
        session.rename(title or session.title, titled=1)
    except LocalLLMError:
        session.titled = 1  # removed meanwhile, or the disk refuses: as above


def clean(text: str, turns: list[StoredMessage]) -> str | None:
    """The title in a model's answer; None where it gave something else, such as another answer to the question."""
    line = next((part.strip() for part in printable(text).splitlines() if part.strip()), "")
    line = re.sub(r"^(#+|[-*]|title:|\*\*title:?\*\*)\s*", "", line, flags=re.IGNORECASE)
    line = re.sub(r"[*_`\"“”„«»]+", "", line).strip().rstrip(".:;, ")
    words = line.split()
    if not words or len(line) > TITLE_CHARS or len(words) > _MOST_WORDS or line.endswith("?"):
        return None
    said = [" ".join(t.content.split()).lower() for t in turns if t.role == "assistant"]
    return None if any(s.startswith(line.lower()) for s in said) else line
